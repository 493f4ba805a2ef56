"""What commands do about messages that wait: single ones, seconds, and those looked for."""
