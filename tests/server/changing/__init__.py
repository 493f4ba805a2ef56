"""Answers about messages and slots, and cancels."""
