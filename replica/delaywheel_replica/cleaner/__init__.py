"""The cleaner process: forwards what is due to Kafka and says what may be deleted."""
