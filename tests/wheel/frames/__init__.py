"""The bytes of frames and rows, and messages as columns."""
