"""What a leader decides."""
