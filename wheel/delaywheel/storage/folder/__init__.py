"""The disk port, and a data folder's files beside wheels: layout, node.json, status files."""
