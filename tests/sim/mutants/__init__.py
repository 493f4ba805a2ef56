"""Deliberate errors in the real code, each of which some run has to find."""
