"""The simulated Kafka keeps Kafka's promises."""
