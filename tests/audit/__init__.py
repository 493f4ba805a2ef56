"""Tests of the audit, with Spark."""
