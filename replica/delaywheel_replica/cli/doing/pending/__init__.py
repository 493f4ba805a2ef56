"""What commands do about pending messages: single ones, seconds, and search results."""
