"""What a node writes to its log, whatever strangers send."""
