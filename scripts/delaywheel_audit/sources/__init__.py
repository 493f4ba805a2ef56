"""The sources of rows: the ledger's files, Kafka's topics; and how their places are shown."""
