"""What a program says of its trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self
from weakref import finalize

from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reporter import Reporter
from delaywheel.trace.reports import EventReports
from delaywheel.trace.texts import KeyMode


class Trace(EventReports):
    """Tells the trace topic of a cluster what becomes of messages, for whoever looks for one.

    One object for all clients and consumers of a program. It is never in their way: events are
    gathered for a second and written by a thread of its own. While Kafka takes none they are held,
    8 MiB of them, then dropped and counted. `close`, or the program's end, waits for 2 s at most.

    docs/TRACE.md, "A program's trace", has the arguments. Raises ValueError if one is not in order,
    or Kafka's client does not take a setting; the extra `trace` has that client.

    Example:
        ::

            trace = Trace({"bootstrap.servers": "127.0.0.1:9092", "client.id": "web"}, sample=0.01)
    """

    def __init__(
        self,
        kafka: Mapping[str, Any],
        *,
        key: KeyMode = "plain",
        secret: bytes | None = None,
        tags: str | None = None,
        sample: float = 1.0,
        cluster: str | None = None,
    ) -> None:
        from delaywheel.trace.kafka import TraceProducer  # noqa: PLC0415 - others need no Kafka

        options = TraceOptions(key=key, secret=secret, tags=tags, sample=sample)
        if not isinstance(kafka, Mapping) or not kafka.get("bootstrap.servers"):
            raise ValueError("kafka: settings of a Kafka client, bootstrap.servers among them")
        own = dict(kafka)
        TraceProducer(own).close()
        reporter = Reporter(
            lambda: TraceProducer(own), options.prepared, share=sample, kafka=own, cluster=cluster
        )
        super().__init__(reporter, options)
        self._end: Final = finalize(self, reporter.close)
        self._end.atexit = False  # clients may send until later: see reporter.py

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes what has happened so far, for 2 s at most; what happens later is not told."""
        self._end()
