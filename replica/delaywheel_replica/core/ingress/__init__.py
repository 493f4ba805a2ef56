"""Records of ingress topics: what they request, and how each is accepted exactly once."""
