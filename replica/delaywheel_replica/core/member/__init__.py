"""The member machine: what a node's server decides, put together from the other rooms."""
