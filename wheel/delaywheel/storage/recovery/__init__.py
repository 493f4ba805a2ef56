"""Recovers a wheel after its writer ended, and finds faults in a data folder."""
