"""Group commit, the driver of the member machine, the store."""
