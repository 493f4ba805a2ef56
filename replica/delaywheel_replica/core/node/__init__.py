"""What the parts of a member know and hear: events, clocks, heartbeats."""
