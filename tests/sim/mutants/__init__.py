"""Deliberate errors in the real code; some run has to find each of them."""
