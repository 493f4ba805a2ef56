"""With `ordered`, no record is handed out before the earlier ones of its key have ended."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from delaywheel.consumer.message import ReceivedMessage, State
from delaywheel.consumer.records import Partition, Place
from support.consumer.driven import DrivenConsumer
from support.consumer.fake_kafka import FakeKafka, Fault

CONSUMERS = 2
PARTITIONS = 2
HOWS = ["done", "retry", "dead", "retry", "keep"]


class OrderedGroup(RuleBasedStateMachine):
    """Two consumers of a topic with two partitions; three keys."""

    def __init__(self) -> None:
        super().__init__()
        self.kafka = FakeKafka(partitions=PARTITIONS)
        self.consumers = [
            DrivenConsumer(self.kafka, ordered=True, max_deliveries=1_000) for _ in range(CONSUMERS)
        ]
        self.settled: dict[Place, list[tuple[ReceivedMessage, bool]]] = defaultdict(list)
        self.rebalance([0, 1], frozenset())
        self.send([0, 1, 2, 0, 1, 2, 0, 0])

    @rule(keys=st.lists(st.integers(0, 2), max_size=4))
    def send(self, keys: list[int]) -> None:
        for key in keys:
            self.kafka.send(b"v", key=bytes([key]))

    @rule(
        owners=st.lists(st.integers(0, CONSUMERS - 1), min_size=PARTITIONS, max_size=PARTITIONS),
        lost=st.frozensets(st.integers(0, CONSUMERS - 1)),
    )
    def rebalance(self, owners: list[int], lost: frozenset[int]) -> None:
        topics = (self.kafka.source, self.kafka.retry)
        given = {
            consumer.broker: [
                Partition(topic, partition)
                for topic in topics
                for partition, owner in enumerate(owners)
                if owner == number
            ]
            for number, consumer in enumerate(self.consumers)
        }
        self.kafka.rebalance(given, [self.consumers[number].broker for number in lost])

    @rule(who=st.integers(0, CONSUMERS - 1), fault=st.sampled_from(Fault))
    def fail_next(self, who: int, fault: Fault) -> None:
        self.consumers[who].broker.fault = fault

    @rule(
        who=st.integers(0, CONSUMERS - 1),
        most=st.integers(1, 8),
        hows=st.lists(st.sampled_from(HOWS), min_size=8),
        runs=st.integers(0, 2),
    )
    def handle(self, who: int, most: int, hows: list[str], runs: int) -> None:
        consumer = self.consumers[who]
        consumer.run_once()
        self.take(consumer, most)
        hand, consumer.hand = consumer.hand, []
        for message, how in zip(hand, hows, strict=False):
            if how == "keep":
                consumer.hand.append(message)
            else:
                self.settle(message, how)
        for _ in range(runs):
            consumer.run_once()

    def take(self, consumer: DrivenConsumer, most: int) -> None:
        taken = consumer.take(most)
        if not consumer.broker.is_current:
            return  # it was put out of its group, and does not know it yet
        for message in taken:
            log = self.kafka.logs[Partition(message.origin.topic, message.origin.partition)]
            for earlier in log[: message.origin.offset]:
                assert earlier.key != message.key or self.has_ended(earlier.place), message

    def has_ended(self, origin: Place) -> bool:
        return any(
            message.state in (State.SETTLED, State.COMMITTED) or self.is_passed(place)
            for place, known in self.settled.items()
            for message, is_final in known
            if is_final and message.origin == origin
        )

    def is_passed(self, place: Place) -> bool:
        return self.kafka.offsets.get(Partition(place.topic, place.partition), 0) > place.offset

    def settle(self, message: ReceivedMessage, how: str) -> None:
        is_ours = message.retry(after="1s") if how == "retry" else message.done()
        if is_ours:
            self.settled[message.place].append((message, how != "retry"))

    def teardown(self) -> None:
        """In the end everything ends, in order, and nothing is away any more."""
        for consumer in self.consumers:
            consumer.broker.fault = None
        self.rebalance([0] * PARTITIONS, frozenset(range(CONSUMERS)))
        consumer = self.consumers[0]
        consumer.hand.clear()
        for _ in range(400):
            consumer.run_once()
            self.take(consumer, 100)
            for message in consumer.hand:
                self.settle(message, "done")
            consumer.hand.clear()
            ends = {where: len(log) for where, log in self.kafka.logs.items()}
            if all(self.kafka.offsets.get(where, 0) == end for where, end in ends.items()):
                break
        else:
            raise AssertionError(self.kafka.offsets, ends)
        lanes = [Partition(self.kafka.source, number) for number in range(PARTITIONS)]
        assert not any(consumer.broker.away(lanes).values())
        assert consumer.engine._state.order is not None
        assert consumer.engine._state.order.away_bytes == 0


TestOrderedGroup = OrderedGroup.TestCase
TestOrderedGroup.settings = settings(
    stateful_step_count=30, max_examples=2 * settings().max_examples
)
