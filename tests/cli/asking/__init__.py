"""The commands that ask a node: what they ask, and what they print."""
