"""What reading costs a program: a RetryConsumer beside confluent-kafka's own consumer.

    python -m local.costs.consumer_cost [--records N] [--calls N]

Records of 200 bytes lie in a topic of six partitions; the handlers do nothing. In turn they are
read by confluent-kafka's `consume(1000)`, with a commit after each; by the loop of a RetryConsumer;
by its batches of 1,000, as a whole and message by message; and by an AsyncRetryConsumer with 50
handlers that each wait 10 ms (of fewer records: `--calls`), beside as many coroutines without any
consumer. Each has a group of its own. Printed are records a second from the first record to the
last commit, the program's CPU for each record, and both as ratios to confluent-kafka's own
consumer in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from local.loopback.kafka import KafkaBroker

TOPIC: Final = "consumer-cost"
PARTITIONS: Final = 6
LENGTH_BYTES: Final = 200
WAIT_S: Final = 0.010
CONCURRENCY: Final = 50
BATCH: Final = 1_000
PATIENCE_S: Final = 60.0


class Meter:
    """Time and CPU from the first record on.

    Attributes:
        plain: What the client alone took: seconds and CPU of each record.
    """

    plain: tuple[float, float] | None = None

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None

    def begin(self) -> None:
        """Starts with the first call."""
        if self._began is None:
            self._began = time.monotonic(), time.process_time()

    def report(self, name: str, records: int) -> None:
        """Prints what it took until now."""
        assert self._began is not None
        took_s, cpu_s = time.monotonic() - self._began[0], time.process_time() - self._began[1]
        each = (took_s / records, cpu_s / records)
        if Meter.plain is None:
            Meter.plain = each
        ratios = f"{Meter.plain[0] / each[0]:6.2f} {each[1] / Meter.plain[1]:6.1f}"
        print(
            f"{name:34} {records:9,} records {1 / each[0]:10,.0f} a second"
            f" {each[1] * 1e6:7.1f} us of CPU each; beside the client: {ratios}",
            flush=True,
        )


def fill(address: str, records: int) -> None:
    """Makes the topics, and writes the records."""
    import confluent_kafka as kafka  # noqa: PLC0415 - not for `--help`
    from confluent_kafka.admin import AdminClient  # noqa: PLC0415
    from confluent_kafka.cimpl import NewTopic  # noqa: PLC0415

    admin = AdminClient({"bootstrap.servers": address})
    made = [NewTopic(TOPIC, PARTITIONS), NewTopic("delaywheel-cost-ingress", 1)]
    for future in admin.create_topics(made).values():
        future.result()
    producer = kafka.Producer(
        {
            "bootstrap.servers": address,
            "linger.ms": 20,
            "queue.buffering.max.messages": records + 1,
        }
    )
    for number in range(records):
        producer.produce(TOPIC, bytes(LENGTH_BYTES), b"%d" % number)
    assert producer.flush(PATIENCE_S) == 0


def with_confluent_kafka(address: str, records: int) -> None:
    """Reads all records with the client alone."""
    import confluent_kafka as kafka  # noqa: PLC0415

    consumer = kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "plain",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([TOPIC])
    meter, seen = Meter(), 0
    while seen < records:
        messages = consumer.consume(BATCH, 0.1)
        if messages:
            meter.begin()
            seen += len([one for one in messages if one.error() is None])
            consumer.commit(asynchronous=False)
    meter.report("consume(1000), commit", records)
    consumer.close()


def with_loop(address: str, records: int) -> None:
    """Reads all records with the loop of a RetryConsumer."""
    from delaywheel.consumer import RetryConsumer  # noqa: PLC0415

    meter, seen = Meter(), 0
    with RetryConsumer(TOPIC, group="loop", bootstrap=address, cluster="cost") as consumer:
        for message in consumer:
            meter.begin()
            with message:
                seen += 1
            if seen == records:
                consumer.flush(PATIENCE_S)
                meter.report("RetryConsumer, loop", records)
                consumer.stop()


def with_batches(address: str, records: int, *, message_by_message: bool = False) -> None:
    """Reads all records with batches of a RetryConsumer."""
    from delaywheel.consumer import RetryConsumer  # noqa: PLC0415

    meter, seen = Meter(), 0
    group = f"batches-{message_by_message}"
    with RetryConsumer(TOPIC, group=group, bootstrap=address, cluster="cost") as consumer:
        for batch in consumer.batches(BATCH):
            meter.begin()
            with batch:
                if message_by_message:
                    seen += sum(message.value is not None for message in batch)
                else:
                    seen += len(batch)
            if seen == records:
                consumer.flush(PATIENCE_S)
                how = "each message" if message_by_message else f"batches({BATCH})"
                meter.report(f"RetryConsumer, {how}", records)
                consumer.stop()


def with_batches_by_message(address: str, records: int) -> None:
    """Reads all records with batches of a RetryConsumer, and looks at each message."""
    with_batches(address, records, message_by_message=True)


def with_asyncio(address: str, records: int) -> None:
    """Handles records on a loop, many at a time, each for a while."""
    from delaywheel.consumer import AsyncRetryConsumer, ReceivedMessage  # noqa: PLC0415

    async def run() -> None:
        meter, seen = Meter(), 0
        async with AsyncRetryConsumer(
            TOPIC, group="asyncio", bootstrap=address, cluster="cost"
        ) as consumer:

            async def handle(message: ReceivedMessage) -> None:
                nonlocal seen
                del message
                meter.begin()
                await asyncio.sleep(WAIT_S)
                seen += 1
                if seen == records:
                    meter.report(f"asyncio, {CONCURRENCY} of {WAIT_S * 1000:.0f} ms", records)
                    consumer.stop()

            await consumer.run(handle, concurrency=CONCURRENCY)

    asyncio.run(run())


def with_asyncio_alone(_: str, records: int) -> None:
    """Runs as many coroutines that wait as long, without any consumer: what asyncio itself can."""

    async def run() -> None:
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
        meter.report(f"asyncio alone, {CONCURRENCY} of {WAIT_S * 1000:.0f} ms", records)

    asyncio.run(run())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=200_000, metavar="N")
    parser.add_argument("--calls", type=int, default=20_000, metavar="N", help="on the loop")
    parser.add_argument("--only", default="", metavar="WORD", help="runs whose name has it")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    runs: tuple[tuple[Callable[[str, int], Any], int], ...] = (
        (with_confluent_kafka, given.records),
        (with_loop, given.records),
        (with_batches, given.records),
        (with_batches_by_message, given.records),
        (with_asyncio, given.calls),
        (with_asyncio_alone, given.calls),
    )
    with KafkaBroker() as kafka:
        fill(kafka.address, given.records)
        for run, count in runs:
            if given.only in run.__name__:
                run(kafka.address, count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
