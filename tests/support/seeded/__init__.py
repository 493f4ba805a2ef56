"""A run of real nodes into which faults are seeded, for the audit to find."""
