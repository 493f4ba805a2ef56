"""The reconciliation: rows brought together, judged, counted, and what was found."""
