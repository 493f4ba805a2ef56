"""Handlers that fail by a plan: how often each message fails follows from a seed and its number.

`Plan.consume` is a consumer that does so, until it is killed or asked to stop.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from delaywheel.consumer import AsyncRetryConsumer, RetryConsumer
from delaywheel.consumer.message import ReceivedMessage

LEVELS_MS = (300, 600, 1_200)


class PlannedError(Exception):
    """A failure by plan."""


@dataclass(frozen=True)
class Plan:
    """The work of one group.

    Attributes:
        bootstrap: Of Kafka.
        cluster: The delaywheel cluster's id.
        topic: That is read.
        group: That reads.
        seed: That decides.
        handled: A file to which each attempt is written as it begins.
        written: A topic to which each attempt writes beside its outcome; empty: none does.
        ordered: Whether keys keep their order.
        kafka: Settings of its clients.
        rebalances: How its partitions move.
        wait_for_rights: How long rights that are taken away are waited for.
        is_async: Whether its consumers run on an event loop.
    """

    bootstrap: str
    cluster: str
    topic: str
    group: str
    seed: int
    handled: str
    written: str = ""
    ordered: bool = False
    kafka: Mapping[str, str] = field(default_factory=dict)
    rebalances: Literal["eager", "cooperative", "consumer"] = "eager"
    wait_for_rights: str | None = None
    is_async: bool = False

    def failures(self, number: int) -> int:
        """How many attempts at this message fail; one more than the number of levels: it dies."""
        return random.Random(f"{self.seed}/{number}").choice((0, 0, 0, 1, 1, 2, 3, 4))

    def retries(self, number: int) -> int:
        """How often this message is retried."""
        return min(self.failures(number), len(LEVELS_MS))

    def dies(self, number: int) -> bool:
        """Whether it ends as a dead letter."""
        return self.failures(number) > len(LEVELS_MS)

    def writes(self, sent: int) -> list[bytes]:
        """Returns what is written of so many messages: by the attempts that do not fail."""
        numbers = (number for number in range(sent) if not self.dies(number))
        return sorted(b"%d %d" % (number, self.retries(number) + 1) for number in numbers)

    def consume(self, instance: str) -> None:
        """Consumes by the plan."""
        with Path(self.handled).open("ab", buffering=0) as handled:
            if self.is_async:
                asyncio.run(self._consume_on_a_loop(instance, handled))
                return
            with RetryConsumer(self.topic, **self._options(instance)) as consumer:
                signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
                for message in consumer:
                    with message:
                        self._attempt(message, handled)

    async def _consume_on_a_loop(self, instance: str, handled: BinaryIO) -> None:
        async with AsyncRetryConsumer(self.topic, **self._options(instance)) as consumer:
            signal.signal(signal.SIGTERM, lambda *_: consumer.stop())

            async def handle(message: ReceivedMessage) -> None:
                await asyncio.sleep(0)
                self._attempt(message, handled)

            await consumer.run(handle, concurrency=4)

    def _options(self, instance: str) -> dict[str, Any]:
        return {
            "group": self.group,
            "bootstrap": self.bootstrap,
            "cluster": self.cluster,
            "retry": [f"{level}ms" for level in LEVELS_MS],
            "retry_on": PlannedError,
            # Cooperative ones have no name; with KIP-848 that of a killed one is taken until its
            # session ends.
            "instance": instance if self.rebalances == "eager" else None,
            "rebalances": self.rebalances,
            # They are killed each second: three such deaths in a row prove nothing here.
            "max_deliveries": 50,
            "wait_for_rights": self.wait_for_rights,
            "ordered": self.ordered,
            "kafka": self.kafka,
        }

    def _attempt(self, message: ReceivedMessage, handled: BinaryIO) -> None:
        line = b"%b %d" % (message.value or b"", message.attempt)
        handled.write(line + b"\n")
        if self.written:
            message.produce(self.written, line)
        if message.attempt <= self.failures(int(message.value or b"")):
            raise PlannedError(message.attempt)
