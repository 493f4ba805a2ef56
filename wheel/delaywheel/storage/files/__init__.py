"""The files of one wheel: slot files, index, slot table."""
