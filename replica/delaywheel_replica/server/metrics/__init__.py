"""Metrics: their definitions, and the objects that they read."""
