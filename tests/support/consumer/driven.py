"""Consumers without their threads, on a Kafka that fails: the test makes every step."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from delaywheel.consumer.engine import Engine
from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.message import ReceivedMessage
from delaywheel.consumer.records import Partition
from delaywheel.consumer.settings import ConsumerSettings, Options, read_settings
from support.consumer.fake_kafka import FakeBroker, FakeKafka


class DrivenConsumer:
    """One consumer of group `g`; it acts on request."""

    def __init__(
        self, kafka: FakeKafka, topics: Sequence[str] | None = None, /, **options: object
    ) -> None:
        reported: Options = {"retry": ("5s", "30s"), "drain": "0s", "commit_every": "0s"}
        reported.update(options)  # type: ignore[typeddict-item]
        self.settings: ConsumerSettings = read_settings(
            topics or kafka.source, "g", "nowhere", reported
        )
        self.broker = FakeBroker(kafka)
        state = EngineState(self.settings, self.broker, clock_ns=lambda: kafka.now_ms * 1_000_000)
        self.engine = Engine(state)
        self.engine._thread = threading.current_thread()
        self.hand: list[ReceivedMessage] = []
        self.engine._begin()

    def run_once(self) -> None:
        """Runs one iteration of its thread."""
        self.engine._run_once()

    def run_often(self) -> None:
        """Runs some iterations, without the waits after failures."""
        for _ in range(9):
            self.engine._commits._recover_at_s = 0.0
            self.run_once()

    def take(self, most: int = 1) -> list[ReceivedMessage]:
        """Takes messages; unsettled ones are in `hand`."""
        taken = list(self.engine.desk.hand_out(most))
        self.hand += taken
        return taken


def start(kafka: FakeKafka, **options: object) -> DrivenConsumer:
    """Makes a consumer to which all partitions are assigned."""
    consumer = DrivenConsumer(kafka, **options)
    topics = (kafka.source, kafka.retry)
    kafka.rebalance(
        {consumer.broker: [Partition(t, n) for t in topics for n in range(kafka.partitions)]}
    )
    consumer.run_once()
    return consumer
