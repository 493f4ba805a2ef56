"""Metrics, and what reads them."""
