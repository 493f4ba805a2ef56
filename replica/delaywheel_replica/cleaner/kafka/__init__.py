"""The real Kafka behind the ports: clients, producers, the control topic, brokers."""
