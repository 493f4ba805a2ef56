"""The member machine: the decisions of a node's server, assembled from the other rooms."""
