"""Changes of named messages: cancels, reschedules, commits and rollbacks, gathered and repeated."""
