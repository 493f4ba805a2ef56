"""Kafka as a Spark data source, and the questions asked before it is read."""
