"""Makers of messages, frames, wheels, books and data folders."""
