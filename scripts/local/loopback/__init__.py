"""Brokers and nodes on loopback, and the processes that end with the script."""
