"""The writers: a node's own wheel, its mirrors, the dial."""
