"""The audit: Spark jobs that hold what was accepted against what Kafka has."""
