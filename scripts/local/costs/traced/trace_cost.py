"""What a trace costs a program: CPU a message, off, on, and for a sample of 1 %.

    python -m local.costs.traced.trace_cost [--messages N] [--rounds N]

Answers to requests of 1,000 messages, each with a key of its own and tags, are told to a trace as a
client tells them; and runs of 1,000 records as a consumer tells them, all of which came through
delaywheel. Gathering, encoding and the thread are included; Kafka's client, which would compress
and send the batches, is not. Printed is the CPU of the whole process for each message, the least of
all rounds; off is what a client or consumer without a trace does. Bytes are those of the JSON, and
as zlib deflates it, about as Kafka's client does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from zlib import compress

from delaywheel import Handle, Message
from delaywheel.client.reporting import ClientReports
from delaywheel.consumer.block import RecordBlock
from delaywheel.consumer.records import FetchedRecords, Partition, RecordHeaders
from delaywheel.consumer.watching.tracing import CommittedRun
from delaywheel.message import Result
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reporter import Reporter
from delaywheel.trace.reports import EventReports

BATCH: Final = 1_000
TAGS: Final = "tags"


class Nowhere:
    """Takes batches, as Kafka's client does; each ends when it is polled."""

    def __init__(self) -> None:
        self.last = b""
        self._ends: list[Callable[[str], object]] = []

    def clusters(self) -> list[str]:
        """See `reporter.TracePort`."""
        return ["shop"]

    def has_topic(self, _topic: str) -> bool:
        """See `reporter.TracePort`."""
        return True

    def send(self, _topic: str, _key: bytes, value: bytes, on_end: Callable[[str], object]) -> None:
        """See `reporter.TracePort`."""
        if b'"rows"' in value:
            self.last = value
        self._ends.append(on_end)

    def poll(self, _timeout_s: float) -> None:
        """See `reporter.TracePort`."""
        while self._ends:
            self._ends.pop()("")

    def close(self) -> None:
        """See `reporter.TracePort`."""


def answers() -> list[Result]:
    """Returns the answers to one request."""
    headers = {TAGS: b"eu,retry-me", "traceparent": bytes(55)}
    messages = [
        Message("orders", bytes(200), key=b"key-%d" % n, delay="1h", headers=headers)
        for n in range(BATCH)
    ]
    return [Result(one, Handle("n1.7", 1, one.id, "orders"), None) for one in messages]


def handled() -> RecordBlock:
    """Returns records whose handlers are done."""
    headers: list[RecordHeaders | None] = [
        [
            (TAGS, b"eu,retry-me"),
            ("dw-id", b"0190163d8694739b8d3f8a4d6a1f%04x" % n),
            ("dw-due", b"1900001800410"),
            ("dw-accepted", b"1900000000410"),
            ("dw-wheel", b"n1.7"),
        ]
        for n in range(BATCH)
    ]
    keys: list[bytes | None] = [b"key-%d" % n for n in range(BATCH)]
    at, offsets = Partition("orders", 0), list(range(BATCH))
    forwarded_ms = [1_900_001_800_415 + n // 40 for n in offsets]
    fetched = FetchedRecords(at, offsets, forwarded_ms, keys, [b""] * BATCH, headers)
    return RecordBlock(None, fetched, is_retry=False)  # type: ignore[arg-type]


class Cost(NamedTuple):
    """What it takes to tell of one message."""

    cpu_us: float
    json_bytes: float
    deflated_bytes: float


def cost(share: float | None, tell: Callable[[EventReports | None], object], many: int) -> Cost:
    """Tells of so many batches, to a trace of its own; None: to none."""
    nowhere, trace = Nowhere(), None
    if share is not None:
        options = TraceOptions(tags=TAGS, sample=share)
        reporter = Reporter(lambda: nowhere, options.prepared, share=share, kafka={})
        trace = EventReports(reporter, options)
    tell(trace)
    began_s = time.process_time()
    for _ in range(many):
        tell(trace)
        if trace is not None:
            trace.flush()
    took_s = time.process_time() - began_s
    record = nowhere.last
    return Cost(took_s / many / BATCH * 1e6, len(record) / BATCH, len(compress(record)) / BATCH)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m local.costs.traced.trace_cost"
    )
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    many = max(1, given.messages // BATCH)
    results, block = answers(), handled()

    def tell_sent(trace: EventReports | None) -> None:
        ClientReports(trace).sent(results, 0.0, 1)

    def tell_processed(trace: EventReports | None) -> None:
        if trace is not None:
            trace.processed(CommittedRun(block, 0, BATCH, {}, "billing", is_check=False))

    print(f"{'of a message':14}{'µs of CPU':>10}{'JSON':>8}{'deflated':>10}")
    for what, tell in (("sent", tell_sent), ("processed", tell_processed)):
        for name, share in (("off", None), ("on", 1.0), ("1 %", 0.01)):
            best = min(cost(share, tell, many) for _ in range(given.rounds))
            sizes = f"{best.json_bytes:6.0f} B{best.deflated_bytes:8.0f} B" if share == 1 else ""
            print(f"{what + ', ' + name:14}{best.cpu_us:10.2f}{sizes}", flush=True)


if __name__ == "__main__":
    main()
