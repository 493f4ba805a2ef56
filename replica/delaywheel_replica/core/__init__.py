"""The protocol's decisions: tables, pure functions and one small machine.

Nothing here does I/O, reads a clock or draws a random number: events and times come in as values,
records and effects come out. So the same code runs in the real node, in a simulator and under
hypothesis. docs/PROTOCOL.md has the states as tables; tests compare them with the tables here.
"""
