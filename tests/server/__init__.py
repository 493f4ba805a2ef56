"""Tests of the server process, room by room."""
