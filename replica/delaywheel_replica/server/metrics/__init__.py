"""Metrics: what is measured, and from which facts."""
