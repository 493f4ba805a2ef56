"""Tests of what becomes of records of ingress topics."""
