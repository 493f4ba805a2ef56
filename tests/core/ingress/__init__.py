"""Tests of the handling of ingress records."""
