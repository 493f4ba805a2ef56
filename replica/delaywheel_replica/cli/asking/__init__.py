"""How commands ask nodes, Kafka and the operator, and end."""
