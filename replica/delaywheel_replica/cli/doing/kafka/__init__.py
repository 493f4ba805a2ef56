"""Commands that ask Kafka: topics, their messages, and dead letters."""
