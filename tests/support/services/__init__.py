"""Whole services of real processes, and callers that use them."""
