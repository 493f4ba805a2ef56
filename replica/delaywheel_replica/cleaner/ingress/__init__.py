"""Reads the ingress topics while this node leads, as core/ingress/ decides."""
