"""Records of ingress topics: what they ask for, and how each is taken in exactly once."""
