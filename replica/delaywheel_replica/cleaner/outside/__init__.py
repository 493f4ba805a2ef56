"""What the cleaner asks of the world, as ports: Kafka, clocks, background calls."""
