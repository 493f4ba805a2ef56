"""The cleaner process: forwards due messages to Kafka and decides what may be deleted."""
