"""The trace's index: the way of each message, kept as files and searched."""
