"""`delaywheel doctor`: what is wrong with a node and its cluster, and a bundle for who helps."""
