"""Metrics, and who watches them."""
