"""The process as a whole: candidacy, leadership, rows, restarts."""
