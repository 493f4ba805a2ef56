"""Cancels, of one message and of many, other dues for pending messages, and checks of used ids."""
