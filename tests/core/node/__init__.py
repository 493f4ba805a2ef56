"""What the parts of a member know and hear."""
