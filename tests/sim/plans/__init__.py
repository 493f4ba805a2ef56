"""Runs as plans: how plans are drawn from seeds, carried out and shortened."""
