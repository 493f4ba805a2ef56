"""Answers about the cluster, and operators' actions on it."""
