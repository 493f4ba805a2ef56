"""The command line's commands that the page runs for viewers: letters, and ways of messages."""
