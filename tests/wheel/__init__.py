"""Tests of wheels on disk, room by room."""
