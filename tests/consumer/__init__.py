"""Consumers that retry, most of them on a real Kafka with a real node."""
