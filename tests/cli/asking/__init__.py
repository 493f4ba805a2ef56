"""The commands that ask a node: their requests, and their output."""
