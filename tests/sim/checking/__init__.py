"""Invariants of every run, and the ground truth that they are checked against."""
