"""Requests: bounds, decoding, validation, topics that exist."""
