"""Events of messages at both ends, for those who look for one: who sent, changed, processed it.

docs/TRACE.md has the events and their format. Nothing here is imported unless a program traces.
"""
