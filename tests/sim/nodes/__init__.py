"""Simulated nodes and callers, and the world that has them all."""
