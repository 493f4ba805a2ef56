"""Nodes that are nothing but their peer network."""
