"""What passes between a node's cleaner and its server: ingress records, answers, rows of status."""
