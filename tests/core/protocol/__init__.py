"""Messages between nodes and processes, and PROTOCOL.md."""
