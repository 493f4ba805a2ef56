"""What a program says of its trace, and where clients and consumers report what has happened."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import finalize

from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reporter import CLOSE_S, EventSink, Reporter
from delaywheel.trace.sampling import Chosen, Sampling
from delaywheel.trace.schema import EventKind
from delaywheel.trace.sent import sent_rows
from delaywheel.trace.texts import KeyMode

if TYPE_CHECKING:
    from delaywheel.message import Result


class EventReports:
    """Takes what clients and consumers report, and gives what is told of it to a sink."""

    def __init__(self, sink: EventSink, options: TraceOptions) -> None:
        self._sink: Final = sink
        self._options: Final = options
        self._sampling: Final = Sampling(options.sample)

    def flush(self, timeout: float = CLOSE_S) -> bool:
        """Waits until what has happened so far is written, or dropped; False on timeout."""
        return self._sink.flush(timeout)

    def sent(self, results: Sequence[Result], cost_s: float, attempts: int) -> None:
        """Reports the final answers to messages that were sent together; not for programs."""
        failed = [row for row, result in enumerate(results) if result.handle is None]
        chosen = self._sampling.of_sent([result.message.id for result in results], failed)
        if chosen.rows is not None:
            results = [results[row] for row in chosen.rows]
        self._report(
            EventKind.SENT,
            chosen,
            *sent_rows(self._options, results, _now_ms(), int(cost_s * 1e6), attempts),
        )

    def _report(
        self, kind: EventKind, chosen: Chosen, rows: Mapping[str, list[Any]], length_bytes: int
    ) -> None:
        if chosen.dropped:
            self._sink.drop(chosen.dropped)
        if rows["time_ms"]:
            self._sink.add(kind, rows, length_bytes)


class Trace(EventReports):
    """Tells the trace topic of a cluster what becomes of messages, for whoever looks for one.

    One object for all clients and consumers of a program. It is never in their way: events are
    gathered for a second and written by a thread of its own. While Kafka takes none they are held,
    8 MiB of them, then dropped and counted. `close`, or the program's end, waits for 2 s at most.

    Args:
        kafka: Settings of the Kafka client, as librdkafka names them: `bootstrap.servers`, TLS,
            SASL; `client.id` is the program's name in the trace.
        key: How keys are told: `"plain"`, `"hash"`, or `"none"`: not at all.
        secret: For hashed keys, 1 to 64 bytes: who looks for a key needs it, too.
        tags: The name of the header whose value is told as the message's tags.
        sample: The share of ways that are traced, above 0 and at most 1. Give all programs the
            same: then each way is traced whole, or not at all. Failures are told in any case, 100
            a second.
        cluster: The delaywheel cluster's id, where several in that Kafka have a trace.

    Raises:
        ValueError: An argument is not in order, or Kafka's client does not take a setting.
        ModuleNotFoundError: confluent-kafka is missing: the extra `trace` has it.

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
        from delaywheel.trace.kafka import KafkaPort  # noqa: PLC0415 - others need no Kafka

        options = TraceOptions(key=key, secret=secret, tags=tags, sample=sample)
        if not isinstance(kafka, Mapping) or not kafka.get("bootstrap.servers"):
            raise ValueError("kafka: settings of a Kafka client, bootstrap.servers among them")
        own = dict(kafka)
        KafkaPort(own).close()
        reporter = Reporter(
            lambda: KafkaPort(own), options.prepared, share=sample, kafka=own, cluster=cluster
        )
        super().__init__(reporter, options)
        self._end: Final = finalize(self, reporter.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes what has happened so far, for 2 s at most; what happens later is not told."""
        self._end()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
