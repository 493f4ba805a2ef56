"""The cost of messages that are stored: finding them, reading them, starting over them."""
