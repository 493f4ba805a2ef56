"""Nodes that consist only of their peer network."""
