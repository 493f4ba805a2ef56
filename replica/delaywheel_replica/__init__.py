"""Many nodes: the service around one node's wheel, its decisions, and the command line tool."""
