"""A consumer that answers for half messages: what letters ask, its settings, and its loop."""
