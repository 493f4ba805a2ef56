"""Answers about messages and slots."""
