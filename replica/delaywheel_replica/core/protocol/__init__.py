"""What nodes and processes exchange, and the control topic's records, with encodings."""
