"""The reconciliation: joins the rows, judges and counts them, and lists findings."""
