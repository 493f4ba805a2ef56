"""What a leader decides: registration, closing, the floor, lost frames, cancels."""
