"""Kafka in memory: brokers, logs, topics, and the clients of it that nodes have."""
