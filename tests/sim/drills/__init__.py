"""Drills: short plans that lead straight to one rare situation."""
