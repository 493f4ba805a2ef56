"""Each record of a group ends once, under any failure: hypothesis plays handlers and brokers."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from delaywheel.consumer.message import ReceivedMessage, State
from delaywheel.consumer.records import Partition, Place
from delaywheel.transactional import Outgoing
from support.consumer.driven import DrivenConsumer
from support.consumer.fake_kafka import INGRESS, FakeKafka, Fault

CONSUMERS = 2
PARTITIONS = 2
WRITTEN = "written"
"""Where each handler says which attempt it has, before it settles it."""


class Group(RuleBasedStateMachine):
    """Two consumers of a topic with two partitions, and of their retry topic."""

    moves_alone = False
    """Whether a rebalance leaves those partitions alone that stay where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.kafka = FakeKafka(
            partitions=PARTITIONS,
            is_incremental=self.moves_alone,
            more={WRITTEN: "of writes"},
            written={WRITTEN},
        )
        self.consumers = [
            DrivenConsumer(self.kafka, max_deliveries=1_000, wait_for_rights="1h")
            for _ in range(CONSUMERS)
        ]
        self.sent = 0
        self.handed_out: set[Place] = set()
        self.partitions = [
            Partition(topic, number)
            for topic in (self.kafka.source, self.kafka.retry)
            for number in range(PARTITIONS)
        ]
        self._rebalance([0, 1, 1, 0], frozenset())
        self.send(8)

    def _rebalance(self, owners: list[int], lost: frozenset[int]) -> None:
        given = {
            consumer.broker: [
                partition
                for partition, owner in zip(self.partitions, owners, strict=True)
                if owner == number
            ]
            for number, consumer in enumerate(self.consumers)
        }
        self.kafka.rebalance(given, [self.consumers[number].broker for number in lost])

    @rule(number=st.integers(1, 4))
    def send(self, number: int) -> None:
        for _ in range(number):
            self.kafka.send(b"%d" % self.sent)
            self.sent += 1

    @rule(
        owners=st.lists(
            st.integers(0, CONSUMERS - 1), min_size=2 * PARTITIONS, max_size=2 * PARTITIONS
        ),
        lost=st.frozensets(st.integers(0, CONSUMERS - 1)),
    )
    def rebalance(self, owners: list[int], lost: frozenset[int]) -> None:
        self._rebalance(owners, lost)

    @rule(who=st.integers(0, CONSUMERS - 1), fault=st.sampled_from(Fault))
    def fail_next(self, who: int, fault: Fault) -> None:
        self.consumers[who].broker.fault = fault

    @rule(which=st.frozensets(st.integers(0, 3)), is_hidden=st.booleans())
    def deny(self, which: frozenset[int], *, is_hidden: bool) -> None:
        """Takes rights away, and gives the others back."""
        topics = (self.kafka.source, self.kafka.retry, self.kafka.dead, INGRESS)
        self.kafka.denied = {topics[number] for number in which}
        # Where partitions come one by one, what is hidden is waited for, and no time passes here.
        self.kafka.hidden = self.kafka.denied if is_hidden and not self.moves_alone else set()
        for consumer in self.consumers:
            be_prompt(consumer)

    @rule(who=st.integers(0, CONSUMERS - 1))
    def run_once(self, who: int) -> None:
        self.consumers[who].run_once()

    @rule(
        who=st.integers(0, CONSUMERS - 1),
        most=st.integers(1, 8),
        hows=st.lists(st.sampled_from(["done", "retry", "raise", "dead", "keep"]), min_size=8),
        backwards=st.booleans(),
        runs=st.booleans(),
    )
    def handle(self, who: int, most: int, hows: list[str], *, backwards: bool, runs: bool) -> None:
        """A handler takes some records, and settles most of what it has, in any order."""
        consumer = self.consumers[who]
        consumer.run_once()
        self.handed_out |= {message.place for message in consumer.take(most)}
        hand, consumer.hand = consumer.hand, []
        for message, how in zip(reversed(hand) if backwards else hand, hows, strict=False):
            if how == "keep":
                consumer.hand.append(message)
            else:
                settle(message, how)
        if runs:
            consumer.run_once()

    @invariant()
    def nothing_is_written_twice(self) -> None:
        written = Counter(map(_attempt, self.kafka.committed_records))
        assert not [attempt for attempt, times in written.items() if times > 1]

    @invariant()
    def what_is_written_is_passed(self) -> None:
        """An outcome in Kafka and the next offset came together."""
        for partition in self.partitions:
            passed = self.kafka.offsets.get(partition, 0)
            log = self.kafka.logs.get(partition, [])
            for record in log[passed:]:
                origin, attempt = _read_attempt(record.headers or [], record.place)
                assert (origin, attempt) not in set(map(_attempt, self.kafka.committed_records))

    def teardown(self) -> None:
        """In the end, without failures, everything has ended, and once."""
        for consumer in self.consumers:
            consumer.broker.fault = None
        self.deny(frozenset(), is_hidden=False)
        self._rebalance([0] * len(self.partitions), frozenset(range(CONSUMERS)))
        consumer = self.consumers[0]
        for _ in range(40 + 20 * self.sent):
            be_prompt(consumer)
            consumer.run_once()
            for message in consumer.take(100):
                self.handed_out.add(message.place)
                settle(message, "done")
        ended: set[tuple[str, int]] = set()
        for partition in self.partitions:
            log = self.kafka.logs.get(partition, [])
            assert self.kafka.offsets.get(partition, 0) == len(log)
            assert {record.place for record in log} <= self.handed_out
            ended |= {_read_attempt(record.headers or [], record.place) for record in log}
        assert ended == set(map(_attempt, self.kafka.committed_records))
        for one in self.consumers:
            one.run_once()
            assert one.engine._book.held_bytes == 0
        self.nothing_is_written_twice()


def be_prompt(consumer: DrivenConsumer) -> None:
    """Lets the next iteration look for rights, and recover: no time passes here."""
    consumer.engine._look_at_s = 0.0
    consumer.engine._commits._recover_at_s = 0.0


def settle(message: ReceivedMessage, how: str) -> None:
    was_forgotten = message.state is State.FORGOTTEN
    says = b"%b %d" % (str(message.origin).encode(), message.attempt)
    assert message.produce(WRITTEN, says) is not was_forgotten
    if how == "done":
        is_ours = message.done()
    elif how == "retry":
        is_ours = message.retry(after="1s")
    elif how == "dead":
        is_ours = message.dead("BY_HAND")
    else:
        with message:
            raise ValueError(how)
        return
    assert is_ours is not was_forgotten


def _attempt(record: Outgoing) -> tuple[str, int]:
    """The attempt, and the record, that wrote this."""
    reported = dict(record.headers)
    if record.topic == WRITTEN:
        origin, attempt = (record.value or b"").split()
        return origin.decode(), int(attempt)
    if record.topic == INGRESS:
        return (reported["dw-retry-origin"] or b"").decode(), int(
            reported["dw-retry-attempt"] or b""
        ) - 1
    return (reported["dw-dead-origin"] or b"").decode(), int(reported["dw-dead-attempts"] or b"")


def _read_attempt(headers: list[tuple[str, bytes | None]], place: object) -> tuple[str, int]:
    reported = dict(headers)
    origin = reported.get("dw-retry-origin")
    if origin is None:
        return str(place), 1
    return origin.decode(), int(reported["dw-retry-attempt"] or b"")


class IncrementalGroup(Group):
    """The same where partitions move one by one."""

    moves_alone = True


TestGroup = Group.TestCase
TestGroup.settings = settings(stateful_step_count=30)
TestIncrementalGroup = IncrementalGroup.TestCase
TestIncrementalGroup.settings = settings(stateful_step_count=30)
