"""A wheel's journal: its frames in the order of seq; see docs/JOURNAL.md."""
