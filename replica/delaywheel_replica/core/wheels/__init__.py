"""The wheels of one node, its own and its copies: writing, mirroring, fetching, fencing."""
