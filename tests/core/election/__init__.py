"""Leadership, and whether a node should stand."""
