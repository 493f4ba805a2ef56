"""Between tests and the real broker: proxies, readers, topics."""
