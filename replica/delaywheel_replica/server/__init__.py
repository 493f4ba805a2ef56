"""The server process of a node: accepts messages, writes the wheel files, answers questions.

A produce request goes through the modules in this order: ``service`` (gRPC), ``requests``
(decode, validate), ``topics`` (does Kafka have it), ``admission`` (bounds), ``committer`` (group
commit), and its answer back through ``service``.
"""
