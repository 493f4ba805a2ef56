"""The cost of a trace: telling, counting, keeping and searching it."""
