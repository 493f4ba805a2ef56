"""The real Kafka behind the ports."""
