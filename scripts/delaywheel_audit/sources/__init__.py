"""Where the rows come from: the ledger's files, Kafka's topics; and how their places are shown."""
