"""The cleaner's environment as ports: Kafka, clocks, background calls."""
