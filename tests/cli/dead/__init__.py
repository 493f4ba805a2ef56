"""`delaywheel dead`: its output, and its effects on the real Kafka."""
