"""The SDK's clients: endpoints, batching, retries with the same id and due.

What decides does no I/O and is shared by both clients: `delivery` (one batch over its attempts),
`question` (one cancel, look-up or description), `retry` (what a failure means), `endpoints`
(which address next, and when), `batching` (what goes into one request), `facts` (levels and
limits). `sync` and `aio` drive them over gRPC.
"""
