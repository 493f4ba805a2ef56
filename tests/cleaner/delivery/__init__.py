"""Delivery of due messages to Kafka: transactions, dead letters, topics and their troubles."""
