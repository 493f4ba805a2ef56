"""What is due, read from the node's wheels: seconds in memory, and what the next step takes."""
