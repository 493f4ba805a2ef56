"""Wheels with messages that are due, and what a step must take of them."""
