"""The way of ingress records from a node's cleaner to its server, and of the answers back."""
