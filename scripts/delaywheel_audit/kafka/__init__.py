"""Kafka as a Spark data source, and what Kafka is asked before it is read."""
