"""The server process of a node: accepts messages, writes the wheel files, answers questions.

A produce request goes downhill: ``serving``, ``intake`` (bounds, decoding, validation), ``commit``
(group commit, the driver), ``core`` and ``storage``; its answer comes back the same way.
"""
