"""Commands that ask Kafka: their output, and their effects on the real one."""
