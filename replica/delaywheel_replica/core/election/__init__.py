"""Leadership: the election machine, and whether a node should stand."""
