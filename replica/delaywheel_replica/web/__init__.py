"""The operator's page: shows a cluster in a browser, and passes calls to its nodes as JSON."""
