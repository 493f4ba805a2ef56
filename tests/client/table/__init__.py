"""The table of what a node answers: each row asks a node and the service in memory alike."""
