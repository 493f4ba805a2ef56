"""Cancels, of one message and of many, and other dues for pending messages."""
