"""The files of an index: their names, their rows, and the folder that holds them."""
