"""Kafka as a Spark data source."""
