"""Exhaustive models of a few nodes that call the real decision functions."""
