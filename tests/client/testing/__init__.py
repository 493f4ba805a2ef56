"""The service in memory, and what it has in common with a real node."""
