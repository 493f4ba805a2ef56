"""Passes ingress records from a node's cleaner to its server, and the answers back."""
