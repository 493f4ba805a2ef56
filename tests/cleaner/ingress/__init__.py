"""Reading the ingress topics, beside a simulated Kafka and server."""
