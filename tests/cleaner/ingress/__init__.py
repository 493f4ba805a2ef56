"""Taking in the ingress topics, beside a pretended Kafka and server."""
