"""The writers: a node's own wheel, its copies of others' wheels, the dial."""
