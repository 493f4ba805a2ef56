"""Metrics: what is measured, and where it is read."""
