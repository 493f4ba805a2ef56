"""Consumers without their threads, on a Kafka in memory that fails: the test makes each step."""
