"""How long topics in trouble hold up messages for others, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.bisection import Findings, name_of
from delaywheel_replica.cleaner.delivery.dead_letters import (
    DeadLetters,
    Hold,
    Plan,
)
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason
from delaywheel_replica.cleaner.delivery.topics import Limits, Topic, TopicState
from delaywheel_replica.cleaner.delivery.troubles import PATIENCE_S, RECENT_S
from delaywheel_replica.cleaner.due.rows import RECORD, DueRows
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.kafka_settings import KafkaNames

ITERATION_S = 0.1
BEGIN_S = 1_000.0
LIMITS = Limits(100_000)
PRESENT = Topic(TopicState.PRESENT, 0.0, partitions=2, limits=LIMITS)


def rows_of(
    *topics: str, partition: int = -1, due_ms: int = round(BEGIN_S * 1000), headers: bytes = b""
) -> DueRows:
    """One message for each topic, without key and value."""
    records = np.zeros(len(topics), RECORD)
    records["topic"] = np.arange(len(topics))
    records["key_length"] = records["value_length"] = records["timestamp_ms"] = -1
    records["partition"], records["due_ms"] = partition, due_ms
    records["headers_length"] = len(headers)
    return DueRows(records, topics, [WheelId("a", 1)], [memoryview(headers)])


class Kafka:
    """The test's answers about topics, and searches that it finishes.

    Attributes:
        now: of the clock.
        topics: what Kafka would answer; a topic that is not here is not answered for.
        answers: whether it answers at all; if not, what it said last is known.
        silent: topics that a search finds to take nothing; None: searches do not end.
        refusal: of each message that a search tries; empty: none is refused.
    """

    def __init__(self, topics: Mapping[str, Topic]) -> None:
        self.now = BEGIN_S
        self.topics = dict(topics)
        self.answers = True
        self.answered_at = self.now
        self.silent: set[str] | None = set()
        self.refusal = ""
        self.asked: list[str] = []
        self.searched: list[set[str]] = []
        self.everywhere: list[Mapping[str, int]] = []
        self.tried: list[DueRows] = []

    def monotonic(self) -> float:
        return self.now

    def monotonic_ms(self) -> int:
        return round(self.now * 1000)

    wall_ms = monotonic_ms

    def progress(self, before_s: float = 0.0) -> Progress:
        return Progress(round((self.now - before_s) * 1000), None)

    def find(self, names: Iterable[str]) -> Mapping[str, Topic]:
        if self.answers:
            self.answered_at = self.now
        at = self.answered_at
        known = {name: self.topics[name] for name in names if name in self.topics}
        return {n: replace(topic, asked_at=at, limits_at=at) for n, topic in known.items()}

    def ask(self, names: Iterable[str]) -> None:
        self.asked += names

    def search(self, rows: DueRows, everywhere: Mapping[str, int]) -> Future[Findings]:
        self.everywhere.append(everywhere)
        self.tried.append(rows)
        future: Future[Findings] = Future()
        names = rows.topic_names()
        self.searched.append(names)
        if self.silent is not None:
            stuck = dict.fromkeys(names & self.silent, "_TIMED_OUT: no answer")
            refused = {name_of(row): self.refusal for row in rows} if self.refusal else {}
            future.set_result(Findings(unavailable=stuck, refused=refused, tried=names))
        return future


def overdue(kafka: Kafka, *topics: str, by_s: float = 3.0) -> DueRows:
    return rows_of(*topics, due_ms=round((kafka.now - by_s) * 1000))


def judge(kafka: Kafka) -> DeadLetters:
    return DeadLetters(
        kafka,
        kafka,
        KafkaNames("c"),
        compresses=False,
        batch_size_bytes=1_000_000,
        clock=kafka,
    )


def run_once(kafka: Kafka, judging: DeadLetters, rows: DueRows) -> Plan | None:
    """One iteration of a leader; None: nothing is delivered."""
    kafka.now += ITERATION_S
    plan = judging.plan(rows)
    if isinstance(plan, Hold):
        return None
    judging.committed()
    return plan


def fates(kafka: Kafka, judging: DeadLetters, rows: DueRows) -> tuple[int, list[DeadReason]]:
    """In an iteration with deliveries: how many, and why other messages wait."""
    plan = run_once(kafka, judging, rows)
    assert plan is not None
    return len(plan.rows), [each.reason for each in plan.dead]


def held_s(
    kafka: Kafka,
    judging: DeadLetters,
    seconds: float,
    step: Callable[[float], DueRows],
    each: Callable[[Plan], None] = lambda _: None,
) -> float:
    """How long nothing was delivered during this many seconds."""
    begin, held = kafka.now, 0.0
    while kafka.now < begin + seconds:
        plan = run_once(kafka, judging, step(kafka.now - begin))
        if plan is None:
            held += ITERATION_S
        else:
            each(plan)
    return held


def test_a_topic_seen_to_be_in_trouble_ahead_is_not_waited_for_again() -> None:
    kafka = Kafka({"good": PRESENT, "bad": Topic(TopicState.LEADERLESS, 0.0, 1)})
    judging = judge(kafka)
    for _ in range(round(PATIENCE_S / ITERATION_S) + 1):
        kafka.now += ITERATION_S
        assert isinstance(judging.plan(rows_of("good"), lambda: ["bad"]), Plan)
    assert fates(kafka, judging, rows_of("good", "bad"))[1] == [DeadReason.TOPIC_UNAVAILABLE]


def test_a_short_trouble_makes_no_dead_letters() -> None:
    kafka = Kafka({"good": PRESENT, "bad": replace(PRESENT, state=TopicState.LEADERLESS)})
    judging, rows = judge(kafka), rows_of("good", "bad")
    assert held_s(kafka, judging, PATIENCE_S - 1, lambda _: rows) > PATIENCE_S - 1.2
    kafka.topics["bad"] = PRESENT
    assert fates(kafka, judging, rows) == (2, [])


def test_many_topics_that_only_trials_find_are_waited_for_together() -> None:
    bad = [f"bad{number}" for number in range(50)]
    kafka = Kafka(dict.fromkeys(["good", *bad], PRESENT))
    kafka.silent = set(bad)
    judging, rows = judge(kafka), rows_of("good", *bad)
    judging.failed(rows)
    dead: list[int] = []
    held = held_s(kafka, judging, 20, lambda _: rows, lambda plan: dead.append(len(plan.dead)))
    assert held <= PATIENCE_S + ITERATION_S
    assert set(dead) == {50}
    assert kafka.searched[0] == {"good", *bad}
    assert kafka.searched[1] == set(bad), "one probe for all"
    kafka.silent = set()
    kafka.now += 30
    judging.plan(rows)
    assert fates(kafka, judging, rows) == (51, [])
    assert not judging.unavailable


def test_a_search_tries_every_partition_for_messages_that_go_anywhere() -> None:
    kafka = Kafka({"any": PRESENT, "keyed": PRESENT, "named": PRESENT})
    judging, rows = judge(kafka), rows_of("any", "keyed", "named")
    rows.records["key_length"][1], rows.records["partition"][2] = 0, 1
    judging.failed(rows)
    run_once(kafka, judging, rows)
    assert kafka.everywhere == [{"any": 2}], "the others go again to the partition that failed"


def test_a_search_waits_until_it_knows_the_partitions_and_not_for_longer_than_a_message() -> None:
    kafka = Kafka({})
    judging, rows = judge(kafka), rows_of("any")
    judging.begin_term(kafka.progress())
    judging.failed(rows)
    assert run_once(kafka, judging, rows) is None
    assert not kafka.searched
    kafka.topics["any"] = PRESENT
    run_once(kafka, judging, rows)
    assert kafka.everywhere == [{"any": 2}]
    kafka = Kafka({})
    judging = judge(kafka)
    judging.failed(rows)
    held = held_s(kafka, judging, 10, lambda _: rows)
    assert kafka.everywhere == [{}], "Kafka did not say how many there are"
    assert held <= PATIENCE_S + ITERATION_S


def test_what_it_took_to_find_a_topic_counts_as_waiting_for_it() -> None:
    kafka = Kafka({"good": PRESENT, "bad": PRESENT})
    kafka.silent = {"bad"}
    judging, rows = judge(kafka), rows_of("good", "bad")
    kafka.now += RECENT_S
    judging.plan(rows)
    kafka.now += PATIENCE_S - 1
    judging.failed(rows)
    assert held_s(kafka, judging, 10, lambda _: rows) <= 1 + ITERATION_S
    assert [each.topic for each in judging.unavailable] == ["bad"]
    kafka.topics["next"] = replace(PRESENT, state=TopicState.LEADERLESS)
    after = rows_of("good", "next")
    assert held_s(kafka, judging, 10, lambda _: after) <= 2, "the allowance is used up"


def test_what_a_search_had_no_time_for_is_searched_before_anything_is_forwarded() -> None:
    kafka = Kafka({"a": PRESENT, "b": PRESENT})
    kafka.silent = None
    searches: list[Future[Findings]] = []

    def search(rows: DueRows, everywhere: Mapping[str, int]) -> Future[Findings]:
        del everywhere
        kafka.searched.append(rows.topic_names())
        searches.append(Future())
        return searches[-1]

    kafka.search = search  # type: ignore[method-assign]
    judging, rows = judge(kafka), rows_of("a", "b")
    judging.failed(rows)
    assert run_once(kafka, judging, rows) is None
    searches[0].set_result(Findings(tried={"a"}))
    assert run_once(kafka, judging, rows) is None
    assert kafka.searched == [{"a", "b"}, {"b"}]


def test_a_failure_just_before_an_election_is_looked_into_after_it() -> None:
    kafka = Kafka({"good": PRESENT, "bad": PRESENT})
    kafka.silent = {"bad"}
    judging, rows = judge(kafka), rows_of("good", "bad")
    judging.failed(rows)
    kafka.now += 3
    judging.begin_term(kafka.progress(3))
    assert run_once(kafka, judging, rows) is None
    assert kafka.searched == [{"good", "bad"}]


@pytest.mark.parametrize(
    ("came_before", "silent_after_s"), [(True, 10), (True, 2 * RECENT_S), (False, 2 * RECENT_S)]
)
def test_a_topic_that_fails_while_a_leader_catches_up_has_its_whole_patience(
    silent_after_s: float, *, came_before: bool
) -> None:
    kafka = Kafka(dict.fromkeys(["good", "bad"], PRESENT))
    judging = judge(kafka)
    judging.begin_term(kafka.progress(4))
    good, both = overdue(kafka, "good", by_s=4), overdue(kafka, "good", "bad", by_s=4)
    assert held_s(kafka, judging, silent_after_s, lambda _: both if came_before else good) == 0
    kafka.silent = {"bad"}
    judging.failed(both)
    held = held_s(kafka, judging, 10, lambda _: both)
    assert PATIENCE_S - 2 * ITERATION_S <= held <= PATIENCE_S + ITERATION_S


def test_a_topic_of_an_earlier_failure_that_comes_up_late_has_its_own_patience() -> None:
    kafka = Kafka(dict.fromkeys(["good", "bad"], PRESENT))
    kafka.silent = {"bad"}
    judging = judge(kafka)
    good, both = overdue(kafka, "good", by_s=4), overdue(kafka, "good", "bad", by_s=4)
    judging.plan(good)
    judging.failed(both)
    judging.begin_term(kafka.progress(4))
    assert held_s(kafka, judging, 2 * RECENT_S, lambda _: good) == 0
    held = held_s(kafka, judging, 10, lambda _: both)
    assert kafka.searched[1] == {"bad"}
    assert PATIENCE_S - 2 * ITERATION_S <= held <= PATIENCE_S + ITERATION_S


@pytest.mark.parametrize(
    ("overdue_s", "patience_s"),
    [(3, PATIENCE_S - 3), pytest.param(600, PATIENCE_S, id="Kafka was away")],
)
def test_what_a_failure_cost_counts_if_kafka_says_by_then_that_a_topic_takes_nothing(
    overdue_s: float, patience_s: float
) -> None:
    kafka = Kafka({"good": PRESENT, "bad": replace(PRESENT, state=TopicState.SHRUNK)})
    judging = judge(kafka)
    kafka.now += RECENT_S
    judging.begin_term(kafka.progress(overdue_s))
    rows = overdue(kafka, "good", "bad", by_s=overdue_s)
    held = held_s(kafka, judging, 10, lambda _: rows)
    assert patience_s - 2 * ITERATION_S <= held <= patience_s + ITERATION_S
    assert kafka.searched == [{"good"}]


def test_a_message_that_a_search_found_has_the_reason_that_its_topic_gives() -> None:
    """Kafka calls a record without a key invalid, and no more."""
    kafka = Kafka({"compacted": replace(PRESENT, limits=replace(LIMITS, needs_key=True))})
    judging, rows = judge(kafka), overdue(kafka, "compacted")
    kafka.refusal = "INVALID_RECORD: the broker refused it"
    judging.begin_term(kafka.progress(before_s=3))
    assert fates(kafka, judging, rows) == (0, [DeadReason.KEY_MISSING])
    assert kafka.searched == [{"compacted"}]


def test_a_partition_added_since_is_asked_for_before_a_message_is_condemned() -> None:
    kafka = Kafka({"a": PRESENT})
    judging = judge(kafka)
    assert run_once(kafka, judging, rows_of("a")) is not None
    kafka.answers = False
    kafka.now += 10
    third = rows_of("a", partition=2)
    assert run_once(kafka, judging, third) is None
    assert kafka.asked == ["a"]
    kafka.topics["a"], kafka.answers = replace(PRESENT, partitions=3), True
    plan = run_once(kafka, judging, third)
    assert plan is not None
    assert len(plan.rows) == 1
    assert plan.look_up == frozenset({"a"}), "the clients have to learn of it, too"
    assert fates(kafka, judging, rows_of("a", partition=3))[1] == [DeadReason.PARTITION_UNKNOWN]


def test_without_an_answer_a_doubtful_message_is_tried() -> None:
    kafka = Kafka({"a": PRESENT})
    judging, rows = judge(kafka), rows_of("a", partition=9)
    judging.plan(rows_of("a"))
    kafka.answers = False
    kafka.now += 10
    held = 0.0
    while (plan := run_once(kafka, judging, rows)) is None:
        held += ITERATION_S
    assert held <= PATIENCE_S + ITERATION_S
    assert (len(plan.rows), plan.dead) == (1, [])


def test_a_sample_to_probe_with_is_small_whatever_was_sent() -> None:
    kafka = Kafka({"bad": PRESENT})
    kafka.silent = {"bad"}
    probed: list[DueRows] = []
    rows = rows_of("bad")
    rows.records["value_length"], rows.records["key_length"] = 900_000, 3
    large = replace(rows, blobs=[memoryview(b"key" + bytes(900_000))])
    judging = judge(kafka)
    judging.failed(large)
    held_s(kafka, judging, 1.0, lambda _: large)
    search = kafka.search

    def watched(rows: DueRows, everywhere: Mapping[str, int]) -> Future[Findings]:
        probed.append(rows)
        return search(rows, everywhere)

    kafka.search = watched  # type: ignore[method-assign]
    held_s(kafka, judging, 6.0, lambda _: large)
    (message,) = probed[0]
    assert (message.topic, message.key, message.value) == ("bad", b"key", b"")


def test_a_plan_says_how_many_partitions_its_topics_have() -> None:
    """The leader paces its transactions by them."""
    kafka = Kafka({"orders": PRESENT, "bills": replace(PRESENT, partitions=7)})
    plan = run_once(kafka, judge(kafka), rows_of("orders", "bills"))
    assert plan is not None
    assert plan.partitions == {"orders": 2, "bills": 7}


@pytest.mark.parametrize("outage_s", [PATIENCE_S + ITERATION_S, 12, 25, 600])
@pytest.mark.parametrize("later_s", [0, 3])
def test_a_topic_that_answers_late_after_an_outage_is_waited_for(
    outage_s: float, later_s: float
) -> None:
    kafka = Kafka(dict.fromkeys(["good", "slow"], PRESENT))
    kafka.silent = {"slow"}
    judging = judge(kafka)
    judging.begin_term(kafka.progress(outage_s))
    good = overdue(kafka, "good", by_s=outage_s)
    both = overdue(kafka, "good", "slow", by_s=outage_s)
    assert held_s(kafka, judging, later_s, lambda _: good) == 0
    dead: list[int] = []
    held = held_s(kafka, judging, 3, lambda _: both, lambda plan: dead.append(len(plan.dead)))
    kafka.silent = set()
    held += held_s(kafka, judging, 7, lambda _: both, lambda plan: dead.append(len(plan.dead)))
    assert held <= PATIENCE_S + ITERATION_S
    assert set(dead) == {0}, "it answers later than within a trial, and not for long"
