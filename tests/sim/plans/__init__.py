"""Runs as plans: draws them from seeds, carries them out and shortens them."""
