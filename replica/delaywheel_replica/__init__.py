"""The service around one node's wheel, its protocol decisions, and the command line tool."""
