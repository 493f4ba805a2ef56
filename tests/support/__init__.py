"""Shared by tests: makers of values, fakes, and processes under test."""
