"""Kafka in memory: brokers, logs, topics, and the nodes' clients of it."""
