"""The wheels of one node: writing, mirroring, fetching."""
