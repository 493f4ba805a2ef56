"""What nodes and processes exchange, and PROTOCOL.md."""
