"""Wheels with due messages, and what a step must take of them."""
