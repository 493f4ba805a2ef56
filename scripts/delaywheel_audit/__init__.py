"""The audit: Spark jobs that compare accepted messages with Kafka's records."""
