"""State machines of consumers, by hypothesis."""
