"""`delaywheel dead`: what it prints, and what it does on the real Kafka."""
