"""The disk port, and what a data folder has beside wheels: its layout, node.json, status files."""
