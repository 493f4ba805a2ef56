"""Tests of the cleaner process, room by room."""
