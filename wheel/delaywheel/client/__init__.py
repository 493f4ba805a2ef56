"""The SDK's clients: endpoints, batching, retries with the same id and due.

The modules that decide do no I/O and are shared by both clients: `delivery` (one batch over its
attempts), `question` (one cancel, look-up or description), `retry` (what a failure means),
`endpoints` (which address next, and when; which other nodes exist), `route` (one exchange's way
over them), `batching` (what goes into one request), `facts` (what a node describes: levels, limits,
members). `sync` and `aio` drive them over gRPC.
"""
