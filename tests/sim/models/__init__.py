"""Exhaustive models of a few nodes, which call the real decision functions."""
