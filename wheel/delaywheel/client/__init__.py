"""The SDK's clients: endpoints, batching, retries with the same id and due.

What decides does no I/O: `exchange/`, `changing/`, `searching`, `description`. `calls` and
`operations` carry it out for both clients, over a `transport/`; `sync` and `aio` have what differs.
"""
