"""Writing what was accepted: group commit, the driver of the member machine, the store."""
