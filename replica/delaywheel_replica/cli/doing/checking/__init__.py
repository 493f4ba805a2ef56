"""What `config check --connect` tries: this machine, the other nodes, Kafka and its topics."""
