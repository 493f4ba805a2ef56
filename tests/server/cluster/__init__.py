"""Answers about the cluster, and what operators do to it."""
