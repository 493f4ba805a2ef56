"""The disk, node.json, status files."""
