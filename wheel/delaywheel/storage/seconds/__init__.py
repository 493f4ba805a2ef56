"""Slot files as a journal's fills write them; see docs/JOURNAL.md."""
