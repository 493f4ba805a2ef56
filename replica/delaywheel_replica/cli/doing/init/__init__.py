"""`delaywheel init`: what the nodes of a new cluster start with."""
