"""Tests that run the simulation, and tests of its parts."""
