"""The files of one wheel."""
