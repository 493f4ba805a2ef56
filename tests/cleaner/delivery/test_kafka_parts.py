"""Parts of the cleaner that need no broker: sizes, batches, settings, plans."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.bisection import Findings, name_of
from delaywheel_replica.cleaner.delivery.dead_letters import DeadLetters, Hold, Plan
from delaywheel_replica.cleaner.delivery.forward import _batches
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason, forwarded
from delaywheel_replica.cleaner.delivery.topics import Limits, Topic, TopicState
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.cleaner.outside.clocks import SystemClock
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.kafka_settings import FORWARD_ROOM_BYTES, KafkaNames, KafkaSettings, refused
from support.due.wheels import Sent, Wheels, wheels_in_memory

WHEEL = WheelId("n1", 1)
DUE_MS = 1_700_000_000_000
PRESENT = Topic(TopicState.PRESENT, 0.0, partitions=4, limits=Limits(10_000))


def due_rows(wheels: Wheels, rows: list[Sent]) -> DueRows:
    """The rows as a step hands them over."""
    wheels.write(WHEEL, rows)
    reader = DueReader(wheels.disk, wheels.data, preload_thread=False)
    try:
        reader.start(Progress(DUE_MS - 10_000, None))
        reader.update(wheels.last_seqs())
        return reader.next_step(DUE_MS + 10_000, 10_000, 1 << 30).messages
    finally:
        reader.close()


def row(
    number: int, topic: str = "a", size: int = 0, *, partition: int = -1, timestamp_ms: int = -1
) -> Sent:
    return Sent(
        DUE_MS + number,
        number.to_bytes(16, "big"),
        topic,
        value=b"x" * size,
        partition=partition,
        timestamp_ms=timestamp_ms,
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300)), min_size=1, max_size=60))
def test_no_batch_is_larger_than_its_topic_takes(messages: list[tuple[str, int]]) -> None:
    limits = {"a": 2 * FORWARD_ROOM_BYTES + 300, "b": 5 * FORWARD_ROOM_BYTES}
    with wheels_in_memory() as wheels:
        rows = due_rows(wheels, [row(n, topic, size) for n, (topic, size) in enumerate(messages)])
        batches = list(_batches(rows, limits))
    assert [m.id for batch, _ in batches for m in batch] == [m.id for m in rows]
    assert [ends for _, ends in batches] == [True] * (len(batches) - 1) + [False]
    assert not list(_batches(rows.take(slice(0)), limits)), "all were deferred, say"
    for batch, _ in batches:
        for topic, limit in limits.items():
            sizes = [len(m.value or b"") + FORWARD_ROOM_BYTES for m in batch if m.topic == topic]
            assert sum(sizes) <= limit or len(sizes) == 1


def test_settings_that_keep_promises_are_refused_by_name() -> None:
    client = {"bootstrap.servers": "k:9092", "security.protocol": "SSL", "acks": "1"}
    assert refused(client) == ["acks"]
    ours = KafkaSettings(KafkaNames("c"), {"bootstrap.servers": "k:9092", "linger.ms": 0})
    assert ours.producer("id")["linger.ms"] == 0
    assert ours.producer("id")["retry.backoff.ms"] > ours.producer("id")["transaction.timeout.ms"]


def test_forwarding_leaves_the_callers_headers_in_front(wheels: Wheels) -> None:
    sent = Sent(DUE_MS, bytes(16), headers=(("h", None), ("h", b"")), timestamp_ms=5, partition=2)
    (record,) = forwarded(KafkaNames("c"), due_rows(wheels, [sent]), 1_700_000_000_000)
    assert record.headers[:2] == [("h", None), ("h", b"")]
    assert [name for name, _ in record.headers[2:]] == [
        "dw-id",
        "dw-due",
        "dw-accepted",
        "dw-wheel",
        "dw-forwarded",
    ]
    assert (record.partition, record.timestamp_ms) == (2, 5)


class Topics:
    """What a test says about topics."""

    def __init__(self, **known: Topic) -> None:
        self.known = known
        self.asked: list[str] = []

    def find(self, names: Iterable[str]) -> Mapping[str, Topic]:
        known = {name: self.known[name] for name in names if name in self.known}
        # As young as on the clock of `Clock`.
        return {n: replace(topic, asked_at=1e6, limits_at=1e6) for n, topic in known.items()}

    def ask(self, names: Iterable[str]) -> None:
        self.asked += names


class Bisection:
    """Searches that a test finishes."""

    def __init__(self) -> None:
        self.searches: list[tuple[set[str], Future[Findings]]] = []

    def search(self, rows: DueRows, everywhere: Mapping[str, int]) -> Future[Findings]:
        del everywhere
        future: Future[Findings] = Future()
        self.searches.append((rows.topic_names(), future))
        return future


class Clock(SystemClock):
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def judge(topics: Topics, trials: Bisection, clock: Clock) -> DeadLetters:
    return DeadLetters(
        topics,
        trials,
        KafkaNames("c"),
        compresses=False,
        batch_size_bytes=1_000_000,
        clock=clock,
    )


def planned(result: Plan | Hold) -> tuple[int, list[DeadReason]]:
    assert isinstance(result, Plan), result
    return len(result.rows), [condemned.reason for condemned in result.dead]


def test_an_unknown_topic_is_waited_for_and_then_tried(wheels: Wheels) -> None:
    topics, clock = Topics(), Clock()
    judging = judge(topics, Bisection(), clock)
    rows = due_rows(wheels, [row(1)])
    assert isinstance(judging.plan(rows), Hold)
    clock.now += 4.9
    assert isinstance(judging.plan(rows), Hold)
    clock.now += 0.2
    assert planned(judging.plan(rows)) == (1, [])


def test_each_reason_that_is_seen_before(wheels: Wheels) -> None:
    now_ms = time.time_ns() // 1_000_000
    topics = Topics(
        a=PRESENT,
        gone=Topic(TopicState.MISSING, 0.0),
        bad=Topic(TopicState.ILLEGAL, 0.0),
        keyed=Topic(TopicState.PRESENT, 0.0, partitions=1, limits=Limits(10_000, needs_key=True)),
        dated=Topic(TopicState.PRESENT, 0.0, partitions=1, limits=Limits(10_000, newest_ms=1)),
    )
    rows = [
        row(1),
        row(2, "gone"),
        row(3, "bad"),
        row(4, size=20_000),
        row(5, partition=4),
        row(6, "keyed"),
        row(7, "dated", timestamp_ms=now_ms + 60_000),
        row(8, partition=3),
    ]
    plan = judge(topics, Bisection(), Clock()).plan(due_rows(wheels, rows))
    assert isinstance(plan, Plan)
    assert {int.from_bytes(c.message.id): c.reason for c in plan.dead} == {
        2: DeadReason.TOPIC_MISSING,
        3: DeadReason.TOPIC_ILLEGAL,
        4: DeadReason.MESSAGE_TOO_LARGE,
        5: DeadReason.PARTITION_UNKNOWN,
        6: DeadReason.KEY_MISSING,
        7: DeadReason.TIMESTAMP_REFUSED,
    }
    assert [int.from_bytes(m.id) for m in plan.rows] == [1, 8]
    assert plan.batch_limits == {"a": 10_000, "keyed": 10_000, "dated": 10_000}


def test_after_a_failure_a_search_says_who_was_guilty(wheels: Wheels) -> None:
    topics, trials, clock = Topics(a=PRESENT, b=PRESENT), Bisection(), Clock()
    judging = judge(topics, trials, clock)
    rows = due_rows(wheels, [row(1), row(2), row(3, "b")])
    judging.failed(rows)
    assert sorted(topics.asked) == ["a", "b"]
    assert isinstance(judging.plan(rows), Hold)
    ((names, future),) = trials.searches
    assert names == {"a", "b"}
    second = list(rows)[1]
    future.set_result(Findings(refused={name_of(second): "INVALID_RECORD: no"}, tried={"a", "b"}))
    assert planned(judging.plan(rows)) == (2, [DeadReason.REFUSED])
    judging.committed()
    assert planned(judging.plan(rows)) == (3, [])


def test_a_search_that_finds_nothing_has_the_clients_look_again(wheels: Wheels) -> None:
    trials, clock = Bisection(), Clock()
    judging = judge(Topics(a=PRESENT), trials, clock)
    rows = due_rows(wheels, [row(1)])
    judging.failed(rows)
    judging.plan(rows)
    trials.searches[0][1].set_result(Findings(tried={"a"}))
    plan = judging.plan(rows)
    assert isinstance(plan, Plan)
    assert plan.look_up == {"a"}


def test_a_topic_that_takes_nothing_holds_up_the_others_once(wheels: Wheels) -> None:
    trials, clock = Bisection(), Clock()
    judging = judge(Topics(a=PRESENT, b=PRESENT), trials, clock)
    rows = due_rows(wheels, [row(1), row(2, "b")])
    judging.plan(rows)
    judging.failed(rows)
    judging.plan(rows)
    clock.now += 2
    stuck = Findings(unavailable={"b": "no answer"}, tried={"a", "b"})
    trials.searches[0][1].set_result(stuck)
    assert isinstance(judging.plan(rows), Hold)
    assert not judging.unavailable
    clock.now += 3  # five seconds after it failed
    assert planned(judging.plan(rows)) == (1, [DeadReason.TOPIC_UNAVAILABLE])
    assert [each.topic for each in judging.unavailable] == ["b"]
    ((names, probe),) = trials.searches[1:]
    assert names == {"b"}
    probe.set_result(Findings(complete=False, tried={"b"}))  # of which it says nothing
    assert planned(judging.plan(rows)) == (1, [DeadReason.TOPIC_UNAVAILABLE])
    clock.now += 2
    judging.plan(rows)
    ((names, probe),) = trials.searches[2:]
    assert names == {"b"}
    probe.set_result(Findings(tried={"b"}))
    assert planned(judging.plan(rows)) == (2, [])
    assert not judging.unavailable


def test_a_topic_without_a_leader_comes_back_when_kafka_says_so(wheels: Wheels) -> None:
    topics, clock = Topics(a=Topic(TopicState.LEADERLESS, 0.0, partitions=1)), Clock()
    judging = judge(topics, Bisection(), clock)
    rows = due_rows(wheels, [row(1)])
    assert isinstance(judging.plan(rows), Hold)
    clock.now += 5
    assert planned(judging.plan(rows)) == (0, [DeadReason.TOPIC_UNAVAILABLE])
    topics.known["a"] = PRESENT
    assert planned(judging.plan(rows)) == (1, [])
