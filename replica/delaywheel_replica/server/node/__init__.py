"""What every part of the server uses: refusals, counts, the view of the node and of its cleaner."""
