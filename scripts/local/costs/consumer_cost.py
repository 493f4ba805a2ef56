"""What reading costs a program: a RetryConsumer beside confluent-kafka's own consumer.

    python -m local.costs.consumer_cost [--records N] [--calls N] [--only WORD] [--rounds N]

Records of 200 bytes lie in a topic of six partitions; the handlers do nothing. In turn they are
read by confluent-kafka's `consume(1000)`, with a commit after each; by the loop of a RetryConsumer;
by its batches of 1,000, as a whole, told to a trace, and message by message; and by an
AsyncRetryConsumer with 50 handlers that each wait 10 ms (of fewer records: `--calls`), beside as
many coroutines without any consumer. Each has a group of its own. Printed are records a second from
the first record to the last commit, the program's CPU for each record, and both as ratios to what
was read first in the same round. CPU of a trace's thread counts; what it tells after the last
commit does, too, as it is flushed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from local.loopback.kafka import KafkaBroker

if TYPE_CHECKING:
    from delaywheel.trace import Trace

PARTITIONS: Final = 6
LENGTH_BYTES: Final = 200
WAIT_S: Final = 0.010
CONCURRENCY: Final = 50
BATCH: Final = 1_000
PATIENCE_S: Final = 60.0


class Stand(NamedTuple):
    """Where records lie."""

    address: str
    cluster: str
    topic: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way of reading takes."""

    name: str
    records: int
    per_s: float
    cpu_us: float


class Meter:
    """Time and CPU from the first record on."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None

    def begin(self) -> None:
        """Starts with the first call."""
        if self._began is None:
            self._began = time.monotonic(), time.process_time()

    def end(self, name: str, records: int) -> Cost:
        """Returns what it took until now."""
        assert self._began is not None
        took_s, cpu_s = time.monotonic() - self._began[0], time.process_time() - self._began[1]
        return Cost(name, records, records / took_s, cpu_s / records * 1e6)


def _group(name: str) -> str:
    """Returns a group that has read nothing yet."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def fill(stand: Stand, records: int) -> None:
    """Makes the topic, and writes the records."""
    import confluent_kafka as kafka  # noqa: PLC0415 - not for `--help`
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415
    from confluent_kafka.cimpl import NewTopic  # noqa: PLC0415

    admin = AdminClient({"bootstrap.servers": stand.address})
    admin.create_topics([NewTopic(stand.topic, PARTITIONS)])[stand.topic].result()
    producer = kafka.Producer(
        {
            "bootstrap.servers": stand.address,
            "linger.ms": 20,
            "queue.buffering.max.messages": records + 1,
        }
    )
    for number in range(records):
        producer.produce(stand.topic, bytes(LENGTH_BYTES), b"%d" % number)
    assert producer.flush(PATIENCE_S) == 0


def with_confluent_kafka(stand: Stand, records: int) -> Cost:
    """Reads all records with the client alone."""
    import confluent_kafka as kafka  # noqa: PLC0415

    consumer = kafka.Consumer(
        {
            "bootstrap.servers": stand.address,
            "group.id": _group("plain"),
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([stand.topic])
    meter, seen = Meter(), 0
    while seen < records:
        messages = consumer.consume(BATCH, 0.1)
        if messages:
            meter.begin()
            seen += len([one for one in messages if one.error() is None])
            consumer.commit(asynchronous=False)
    cost = meter.end("consume(1000), commit", records)
    consumer.close()
    return cost


def with_loop(stand: Stand, records: int) -> Cost:
    """Reads all records with the loop of a RetryConsumer."""
    from delaywheel.consumer import RetryConsumer  # noqa: PLC0415

    meter, seen = Meter(), 0
    address, cluster, topic = stand
    with RetryConsumer(topic, group=_group("loop"), bootstrap=address, cluster=cluster) as consumer:
        for message in consumer:
            meter.begin()
            with message:
                seen += 1
            if seen == records:
                break
        consumer.flush(PATIENCE_S)
        return meter.end("RetryConsumer, loop", records)


def with_batches(stand: Stand, records: int) -> Cost:
    """Reads all records with batches of a RetryConsumer."""
    return _batches(stand, records)


def with_traced_batches(stand: Stand, records: int) -> Cost:
    """Reads all records with batches of a RetryConsumer that tells a trace."""
    from delaywheel.trace import Trace  # noqa: PLC0415

    with Trace({"bootstrap.servers": stand.address}, cluster=stand.cluster) as trace:
        return _batches(stand, records, trace=trace)


def with_batches_by_message(stand: Stand, records: int) -> Cost:
    """Reads all records with batches of a RetryConsumer, and looks at each message."""
    return _batches(stand, records, message_by_message=True)


def _batches(
    stand: Stand, records: int, *, message_by_message: bool = False, trace: Trace | None = None
) -> Cost:
    from delaywheel.consumer import RetryConsumer  # noqa: PLC0415

    meter, seen = Meter(), 0
    address, cluster, topic = stand
    with RetryConsumer(
        topic, group=_group("batches"), bootstrap=address, cluster=cluster, trace=trace
    ) as consumer:
        for batch in consumer.batches(BATCH):
            meter.begin()
            with batch:
                if message_by_message:
                    seen += sum(message.value is not None for message in batch)
                else:
                    seen += len(batch)
            if seen == records:
                break
        consumer.flush(PATIENCE_S)
        how = ", each message" if message_by_message else ""
        if trace is not None:
            how = ", traced" if trace.flush(PATIENCE_S) else ", traced, not all of it"
        return meter.end(f"RetryConsumer, batches({BATCH}){how}", records)


def with_asyncio(stand: Stand, records: int) -> Cost:
    """Handles records on a loop, many at a time, each for a while."""
    from delaywheel.consumer import AsyncRetryConsumer, ReceivedMessage  # noqa: PLC0415

    async def run() -> Cost:
        meter, seen = Meter(), 0
        address, cluster, topic = stand
        costs: list[Cost] = []
        async with AsyncRetryConsumer(
            topic, group=_group("asyncio"), bootstrap=address, cluster=cluster
        ) as consumer:

            async def handle(_: ReceivedMessage) -> None:
                nonlocal seen
                meter.begin()
                await asyncio.sleep(WAIT_S)
                seen += 1
                if seen == records:
                    costs.append(meter.end(f"AsyncRetryConsumer, {_WAITS}", records))
                    consumer.stop()

            await consumer.run(handle, concurrency=CONCURRENCY)
        return costs[0]

    return asyncio.run(run())


_WAITS = f"{CONCURRENCY} of {WAIT_S * 1000:.0f} ms"


def with_asyncio_alone(_: Stand, records: int) -> Cost:
    """Runs as many coroutines that wait as long, without any consumer: what asyncio itself can."""

    async def run() -> Cost:
        meter, free, freed = Meter(), CONCURRENCY, asyncio.Event()
        meter.begin()

        async def one() -> None:
            nonlocal free
            await asyncio.sleep(WAIT_S)
            free += 1
            freed.set()

        async with asyncio.TaskGroup() as handlers:
            for _ in range(records):
                if not free:
                    freed.clear()
                    await freed.wait()
                free -= 1
                handlers.create_task(one())
        return meter.end(f"asyncio alone, {_WAITS}", records)

    return asyncio.run(run())


WAYS: Final[tuple[Callable[[Stand, int], Cost], ...]] = (
    with_confluent_kafka,
    with_loop,
    with_batches,
    with_traced_batches,
    with_batches_by_message,
    with_asyncio,
    with_asyncio_alone,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=200_000, metavar="N")
    parser.add_argument("--calls", type=int, default=20_000, metavar="N", help="on the loop")
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name has it")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of all of it")
    parser.add_argument("--kafka", metavar="ADDRESS", help="a running one, instead of its own")
    parser.add_argument("--cluster", default="cost", metavar="ID", help="whose ingress is there")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each way")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    if given.kafka is not None:
        _measure(given, given.kafka)
        return 0
    with KafkaBroker() as kafka:
        _measure(given, kafka.address)
    return 0


def _make_topics(address: str, cluster: str) -> None:
    """Makes the topics that a node would make, or has made: of requests, and of the trace."""
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415
    from confluent_kafka.cimpl import NewTopic  # noqa: PLC0415

    from delaywheel.ingress import counts_topic, ingress_topic, trace_topic  # noqa: PLC0415

    names = ingress_topic(cluster), trace_topic(cluster), counts_topic(cluster)
    admin = AdminClient({"bootstrap.servers": address})
    there = admin.list_topics(timeout=PATIENCE_S).topics
    new = [NewTopic(name, 3) for name in names if name not in there]
    for made in admin.create_topics(new).values() if new else ():
        made.result()


def _measure(given: argparse.Namespace, address: str) -> None:
    _make_topics(address, given.cluster)
    name = f"consumer-cost-{uuid.uuid4().hex[:8]}"
    # Of a topic with more records than are handled, all would be fetched meanwhile.
    stands = {n: Stand(address, given.cluster, f"{name}-{n}") for n in (given.records, given.calls)}
    for count, stand in stands.items():
        fill(stand, count)
    for _ in range(given.rounds):
        _measure_round(given, stands)


def _measure_round(given: argparse.Namespace, stands: Mapping[int, Stand]) -> None:
    plain: Cost | None = None
    for way in WAYS:
        if given.only not in way.__name__:
            continue
        count = given.calls if "asyncio" in way.__name__ else given.records
        cost = way(stands[count], count)
        plain = plain or cost
        if given.json:
            print(json.dumps(asdict(cost)), flush=True)
            continue
        print(
            f"{cost.name:40} {cost.records:9,} records {cost.per_s:9,.0f} a second"
            f" {cost.cpu_us:6.1f} us of CPU each;"
            f" {cost.per_s / plain.per_s:5.2f} and {cost.cpu_us / plain.cpu_us:5.1f} x the first",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
