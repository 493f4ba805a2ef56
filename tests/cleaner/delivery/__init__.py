"""From what is due to Kafka: transactions, dead letters, topics and their troubles."""
