"""Reads due messages from the node's wheels: seconds in memory, and the next step."""
