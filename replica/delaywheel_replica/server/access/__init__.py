"""Who makes a call, and what they may do: the only place that decides it."""
