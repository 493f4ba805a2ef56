"""The tests that run the simulation, and those of its parts."""
