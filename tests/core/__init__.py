"""Tests of the protocol's decisions, room by room."""
