"""What is read of Kafka: planned, read by Spark's connector, and held against Kafka afterwards."""
