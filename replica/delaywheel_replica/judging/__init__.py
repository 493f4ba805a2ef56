"""Judges a cluster by its nodes' reports: verdict, causes, and the runbook's section for each."""
