"""Handlers of dead letters: programs that decide about the letters of one topic, as they come.

`consumer` has the rules, and the form for threads; `aio` that for coroutines; `figures` and
`metrics` what both say about themselves.
"""
