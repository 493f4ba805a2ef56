"""Messages whose topic, or partition, takes nothing: they come back through the ingress topic."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cleaner.delivery.test_outcomes import A1, LATER_MS, NAMES, NOW_MS, Leader, sent
from cleaner.delivery.test_topics_in_trouble import (
    BEGIN_S,
    ITERATION_S,
    LIMITS,
    PRESENT,
    Kafka,
    rows_of,
    run_once,
)
from delaywheel.headers import encode_headers
from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery import outcomes
from delaywheel_replica.cleaner.delivery.dead_letters import DeadLetters, Hold, Plan
from delaywheel_replica.cleaner.delivery.deferring import LEAST_WAIT_MS, Patience, partition_of
from delaywheel_replica.cleaner.delivery.expiring import find_expired
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason
from delaywheel_replica.cleaner.delivery.topics import TopicState
from delaywheel_replica.cleaner.delivery.troubles import DOUBTED_S
from delaywheel_replica.cleaner.due.rows import RECORD, Direct, DueRows
from delaywheel_replica.cleaner.outside.ports import Record
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import CommittedRecord, Delayed, IngressRules, read
from delaywheel_replica.patterns import Pattern
from support.due.wheels import Wheels, wheels_in_memory

__all__ = ["wheels_in_memory"]

PATIENCE_S = 120.0
BAD = replace(PRESENT, state=TopicState.LEADERLESS)
RULES = IngressRules({}, 1_000, frozenset())


def judge(kafka: Kafka, **more: float) -> DeadLetters:
    patience = Patience(
        NAMES.ingress, PATIENCE_S, [(Pattern(topic), s) for topic, s in more.items()]
    )
    return DeadLetters(
        kafka,
        kafka,
        NAMES,
        compresses=False,
        batch_size_bytes=1_000_000,
        patience=patience,
        clock=kafka,
    )


def now_ms(kafka: Kafka) -> int:
    return round(kafka.now * 1000)


def due_now(
    kafka: Kafka, *topics: str, before_s: float = 0.0, deferred_s: float | None = None
) -> DueRows:
    """They fell due before that time, and were deferred at first before that one, if they were."""
    headers = b""
    if deferred_s is not None:
        since_ms = round((kafka.now - deferred_s) * 1000)
        headers = encode_headers([("dw-first-deferred", b"%d" % since_ms)])
    return rows_of(*topics, due_ms=round((kafka.now - before_s) * 1000), headers=headers)


def read_again(record: Record, at: int = 0) -> Delayed:
    place = IngressPlace(NAMES.ingress, 0, at)
    taken = CommittedRecord(place, NOW_MS, record.key, record.value, record.headers)
    request = read(taken, RULES)
    assert isinstance(request, Delayed)
    return request


def dues_of(plan: Plan) -> list[int]:
    headers = [dict(each) for each in plan.deferred.headers()]
    return [int(each["dw-deliver-at"] or 0) for each in headers]


def test_messages_for_a_topic_that_takes_nothing_hold_up_no_others() -> None:
    kafka = Kafka({"good": PRESENT, "bad": BAD, NAMES.ingress: PRESENT})
    judging, rows = judge(kafka), rows_of("good", "bad")
    plans = [run_once(kafka, judging, rows) for _ in range(2)]
    first = next(plan for plan in plans if plan is not None)
    assert first.rows.topic_names() == {"good"}
    assert (first.deferred.topic_names(), first.dead) == ({NAMES.ingress}, [])
    assert kafka.now - BEGIN_S < 3 * ITERATION_S, "the first answers are waited for, nothing else"
    assert [each.topic for each in judging.unavailable] == ["bad"]


def test_each_wait_is_half_of_what_was_waited_by_then() -> None:
    kafka = Kafka({"bad": BAD, NAMES.ingress: PRESENT})
    judging = judge(kafka)
    run_once(kafka, judging, due_now(kafka, "bad"))
    waits_ms = []
    for _ in range(4):
        kafka.now += 10
        deferring = judging.plan(due_now(kafka, "bad"))
        assert isinstance(deferring, Plan)
        waits_ms.append(dues_of(deferring)[0] - now_ms(kafka))
    assert waits_ms == pytest.approx([5_000, 10_000, 15_000, 20_000], abs=200), "of its topic"
    fresh = Kafka({"bad": BAD, NAMES.ingress: PRESENT})
    judging = judge(fresh)
    plan = run_once(fresh, judging, due_now(fresh, "bad", before_s=30))
    plan = plan or run_once(fresh, judging, due_now(fresh, "bad", before_s=30))
    assert plan is not None
    assert dues_of(plan)[0] - now_ms(fresh) == LEAST_WAIT_MS, "not since its due"
    again = judging.plan(due_now(fresh, "bad", deferred_s=30))
    assert isinstance(again, Plan)
    assert dues_of(again)[0] - now_ms(fresh) == pytest.approx(15_000, abs=200), "or of the message"


def test_what_is_deferred_makes_no_batch_that_the_ingress_topic_refuses() -> None:
    small = replace(PRESENT, limits=replace(LIMITS, max_message_bytes=10_000))
    kafka = Kafka({"bad": BAD, NAMES.ingress: small})
    judging = judge(kafka)
    run_once(kafka, judging, rows_of("bad"))
    plan = run_once(kafka, judging, rows_of("bad"))
    assert plan is not None
    assert plan.batch_limits == {"bad": 100_000, NAMES.ingress: 10_000}


class DefersEach(DeadLetters):
    """Everything is deferred, to a topic that takes batches of 500 bytes."""

    def __init__(self) -> None:
        """Nothing is known."""

    def plan(self, rows: DueRows, ahead: object = None) -> Plan:
        del ahead
        left_ms = np.arange(len(rows)) + LATER_MS
        deferred = Patience(NAMES.ingress, PATIENCE_S).deferred(rows, left_ms, 0, 0, NOW_MS)
        return Plan(rows.take(slice(0)), deferred=deferred, batch_limits={NAMES.ingress: 500})

    def committed(self) -> None:
        """Nothing was tried."""


def test_batches_of_what_is_deferred_are_as_small_as_their_topic_takes(wheels: Wheels) -> None:
    wheels.write(A1, [sent(number, in_ms=-5) for number in range(3)])
    leader = Leader(wheels)
    leader.forwarder._dead_letters = DefersEach()
    batches: list[list[Record]] = [[]]

    def write_own(number: int, records: Iterable[Record]) -> None:
        del number
        batches[-1] += [each for each in records if each.topic == NAMES.ingress]

    def flush(number: int, timeout_ms: int) -> bool:
        del number, timeout_ms
        batches.append([])
        return True

    leader.producers.write_own, leader.producers.flush = write_own, flush  # type: ignore[method-assign]
    list(leader.transactions())
    leader.reader.close()
    assert sum(map(len, batches)) == 3
    assert max(sum(each.batch_bytes for each in batch) for batch in batches) <= 500


def test_messages_with_one_id_and_other_dues_stay_apart_until_patience_ends() -> None:
    """With the same new due they would be copies, of which one is delivered."""
    kafka = Kafka({"bad": BAD, NAMES.ingress: PRESENT})
    judging = judge(kafka)
    rows = keyed(kafka, [None] * 4, [-1] * 4)
    rows.records["due_ms"] -= np.array([3, 2, 1, 0])
    rows.records["id_low"] = [7, 8, 7, 7]
    rows = replace(rows, topics=["bad"])
    run_once(kafka, judging, rows)
    together = judging.plan(rows)
    assert isinstance(together, Plan)
    begin_ms = dues_of(together)[0]
    assert dues_of(together) == [begin_ms, begin_ms, begin_ms + 1, begin_ms + 2]
    headers = [encode_headers(each[-2:]) for each in together.deferred.headers()]
    last_ms: list[int] = []
    for header in headers:  # each in a transaction of its own, for the last time
        kafka.now = BEGIN_S + PATIENCE_S - 10 + len(last_ms) / 100
        again = judging.plan(rows_of("bad", due_ms=now_ms(kafka), headers=header))
        assert isinstance(again, Plan)
        last_ms += dues_of(again)
    assert last_ms[0] == last_ms[1]
    assert len({last_ms[0], *last_ms[2:]}) == 3


def test_brokers_that_are_restarted_in_turn_make_no_message_wait_for_one_another() -> None:
    kafka = Kafka({"half": BAD, NAMES.ingress: PRESENT})
    judging, waits_ms = judge(kafka), list[int]()
    for partition in (0, 1):
        troubled = frozenset({partition})
        kafka.topics["half"] = replace(BAD, partitions=2, troubled=troubled)
        for _ in range(3):
            plan = run_once(kafka, judging, keyed(kafka, [None], [partition]))
            kafka.now += 10
        assert plan is not None
        waits_ms.append(dues_of(plan)[0] - now_ms(kafka) + 10_000)
    assert waits_ms == pytest.approx([10_000, 10_000], abs=200), "not 10 and 25 s"


def test_a_message_is_a_dead_letter_once_its_patience_has_ended() -> None:
    kafka = Kafka({"bad": BAD, "brief": BAD, NAMES.ingress: PRESENT})
    judging = judge(kafka, brief=10)
    run_once(kafka, judging, due_now(kafka, "bad", "brief"))
    kafka.now += 10
    plan = run_once(kafka, judging, due_now(kafka, "bad", "brief", deferred_s=119))
    assert plan is not None
    assert [(each.message.topic, each.reason) for each in plan.dead] == [
        ("brief", DeadReason.TOPIC_UNAVAILABLE)
    ]
    assert dues_of(plan)[0] - now_ms(kafka) < 1_000, "no later than its patience ends"
    plan = run_once(kafka, judging, due_now(kafka, "bad", "brief", deferred_s=121))
    assert plan is not None
    assert len(plan.dead) == 2
    assert not len(plan.deferred)


@pytest.mark.parametrize("ingress", [None, TopicState.MISSING, TopicState.DENIED])
def test_without_an_ingress_topic_messages_wait_as_if_there_were_no_patience(
    ingress: TopicState | None,
) -> None:
    kafka = Kafka({"bad": BAD})
    if ingress is not None:
        kafka.topics[NAMES.ingress] = replace(PRESENT, state=ingress)
    judging, waited_s = judge(kafka), 0.0
    while (plan := run_once(kafka, judging, rows_of("bad"))) is None:
        waited_s += ITERATION_S
    assert 4 < waited_s < 6
    assert [each.reason for each in plan.dead] == [DeadReason.TOPIC_UNAVAILABLE]


def test_a_message_that_the_ingress_topic_does_not_take_is_not_deferred() -> None:
    small = replace(PRESENT, limits=replace(LIMITS, max_message_bytes=100))
    kafka = Kafka({"bad": BAD, NAMES.ingress: small})
    judging = judge(kafka)
    plan = run_once(kafka, judging, rows_of("bad")) or run_once(kafka, judging, rows_of("bad"))
    assert plan is not None
    assert len(plan.dead) == 1


def keyed(kafka: Kafka, keys: list[bytes | None], partitions: list[int]) -> DueRows:
    records = np.zeros(len(keys), RECORD)
    records["value_length"] = records["timestamp_ms"] = -1
    records["key_length"] = [-1 if key is None else len(key) for key in keys]
    records["start"] = np.cumsum([0, *(len(key or b"") for key in keys[:-1])])
    records["partition"], records["due_ms"] = partitions, now_ms(kafka)
    blob = b"".join(key or b"" for key in keys)
    return DueRows(records, ["half"], [WheelId("a", 1)], [memoryview(blob)])


def test_a_transaction_is_given_up_that_went_to_a_partition_which_takes_nothing() -> None:
    """It was planned while all was well; then a broker left."""
    kafka = Kafka({"half": replace(PRESENT, partitions=4), NAMES.ingress: PRESENT})
    judging = judge(kafka)
    keys = [next(b"%d" % n for n in range(99) if partition_of(b"%d" % n, 4) == p) for p in range(4)]
    one_each, anywhere = keyed(kafka, [*keys], [-1] * 4), keyed(kafka, [None], [-1])
    run_once(kafka, judging, one_each)
    assert not judging.are_untaken(one_each)
    assert kafka.asked == ["half"]
    kafka.topics["half"] = replace(BAD, partitions=4, troubled=frozenset({2}))
    untaken = [judging.are_untaken(one_each.take(np.array([number]))) for number in range(4)]
    assert untaken == [False, False, True, False]
    assert judging.are_untaken(anywhere), "it may have gone there"
    assert not judging.are_untaken(keyed(kafka, [None], [1])), "the next plan sends it elsewhere"
    assert not judging.are_untaken(one_each.take(np.array([], int)))
    kafka.topics["half"] = replace(kafka.topics["half"], fewest=3)
    assert not judging.are_untaken(one_each), "another broker comes to lead it, within seconds"
    kafka.answers = False
    kafka.now += 10 * DOUBTED_S
    assert not judging.are_untaken(one_each), "also where it was asked long ago"


def test_a_topic_that_cost_a_transaction_is_not_at_once_believed_to_be_well() -> None:
    """Another broker, asked next, has not heard yet that one has left."""
    kafka = Kafka({"half": replace(PRESENT, partitions=1), NAMES.ingress: PRESENT})
    judging, rows = judge(kafka), keyed(kafka, [b"k"], [-1])
    run_once(kafka, judging, rows)
    kafka.topics["half"] = replace(BAD, partitions=1, troubled=frozenset({0}))
    assert judging.are_untaken(rows)
    kafka.topics["half"] = replace(PRESENT, partitions=1)
    plan = run_once(kafka, judging, rows)
    assert plan is not None
    assert (len(plan.rows), len(plan.deferred)) == (0, 1)
    kafka.now += DOUBTED_S
    plan = run_once(kafka, judging, rows)
    assert plan is not None
    assert (len(plan.rows), len(plan.deferred)) == (1, 0)


def test_with_one_id_left_what_a_broker_may_take_with_it_is_deferred_until_patience_ends() -> None:
    few, many = replace(PRESENT, fewest=1), replace(PRESENT, fewest=3)
    kafka = Kafka({"few": few, "many": many, NAMES.ingress: many})
    judging = judge(kafka)

    def planned(*, deferred_s: float | None = None) -> tuple[set[str], int, bool]:
        rows = due_now(kafka, "few", "many", deferred_s=deferred_s)
        run_once(kafka, judging, rows)  # asks about the ingress topic, too
        plan = run_once(kafka, judging, rows)
        assert plan is not None
        assert not plan.dead
        return plan.rows.topic_names(), len(plan.deferred), plan.is_at_risk

    assert planned() == ({"few", "many"}, 0, True)
    judging.is_careful = True
    assert planned() == ({"many"}, 1, False)
    assert judging.unavailable == ()
    assert planned(deferred_s=PATIENCE_S) == ({"few", "many"}, 0, True)
    kafka.topics["few"] = replace(BAD, fewest=1, partitions=4, troubled=frozenset({0}))
    assert planned() == ({"many"}, 1, False), "its other partitions are no safer"
    kafka.topics["few"] = few
    kafka.now += DOUBTED_S
    kafka.topics[NAMES.ingress] = few
    assert planned() == ({"few", "many"}, 0, False), "no way is safer"


def test_a_transaction_that_went_to_a_partition_which_takes_nothing_by_now_would_stick() -> None:
    kafka = Kafka({"half": replace(PRESENT, partitions=2), NAMES.ingress: PRESENT})
    judging, rows = judge(kafka), keyed(kafka, [None, None], [0, 1])
    run_once(kafka, judging, rows)
    assert not judging.would_stick(rows)
    kafka.topics["half"] = replace(BAD, partitions=2, troubled=frozenset({1}))
    run_once(kafka, judging, rows)
    assert [judging.would_stick(rows.take(np.array([number]))) for number in (0, 1)] == [
        False,
        True,
    ]


def test_partitions_that_a_search_found_silent_are_not_known() -> None:
    kafka = Kafka({"half": replace(PRESENT, partitions=4), NAMES.ingress: PRESENT})
    kafka.silent = {"half"}
    judging, rows = judge(kafka), keyed(kafka, [None], [0])
    judging.failed(rows)
    plan = run_once(kafka, judging, rows) or run_once(kafka, judging, rows)
    assert plan is not None
    assert len(plan.deferred) == 1


def test_the_ingress_topic_is_used_where_it_is_well() -> None:
    partial = replace(BAD, partitions=6, troubled=frozenset({0, 1, 3, 4, 5}))
    kafka = Kafka({"bad": BAD, NAMES.ingress: partial})
    judging = judge(kafka)
    for _ in range(4):
        plan = run_once(kafka, judging, rows_of("bad"))
    assert plan is not None
    assert plan.deferred.partitions.tolist() == [2]


def test_nothing_goes_to_partitions_of_the_ingress_topic_that_are_no_longer_read() -> None:
    """Neither what is deferred nor a half that is due later, whatever partition its key says."""
    ingress = replace(PRESENT, partitions=4)
    kafka = Kafka({"bad": BAD, NAMES.ingress: ingress})
    judging = judge(kafka)
    judging.unread = lambda: frozenset({0, 1, 3})
    halves = replace(keyed(kafka, [b"%d" % n for n in range(9)], [-1] * 9), topics=[NAMES.ingress])
    run_once(kafka, judging, rows_of("bad"))
    for _ in range(4):
        deferring, passing = (run_once(kafka, judging, each) for each in (rows_of("bad"), halves))
        assert deferring is not None
        assert passing is not None
        assert deferring.deferred.partitions.tolist() == [2]
        assert (passing.rows.partitions.tolist(), passing.dead) == ([2] * 9, [])
        assert not judging.are_untaken(passing.rows)
    for unread in (lambda: frozenset(range(4)), lambda: None):
        judging.unread = unread
        assert passing is not None
        assert not judging.are_untaken(passing.rows), "Kafka takes them"
        for rows in (rows_of("bad"), halves):
            plan = run_once(kafka, judging, rows)
            assert plan is not None
            assert {each.reason for each in plan.dead} == {DeadReason.TOPIC_UNAVAILABLE}
            assert not len(plan.rows)
    judging.unread = frozenset
    plan = run_once(kafka, judging, halves)
    assert plan is not None
    assert set(plan.rows.partitions.tolist()) == {-1}, "Kafka's client chooses"


class DefersAll(DeadLetters):
    """No topic takes anything."""

    def __init__(self) -> None:
        self.patience = Patience(NAMES.ingress, PATIENCE_S)
        self.leader: Leader

    def plan(self, rows: DueRows, ahead: object = None) -> Plan | Hold:
        del ahead
        if not len(rows):
            return Plan(rows)
        left_ms = self.patience.left_ms(rows, self.leader.now_ms)
        sent = self.patience.deferred(rows, left_ms, 0, 2, self.leader.now_ms)
        return Plan(rows.take(slice(0)), deferred=sent)

    def committed(self) -> None:
        """Nothing was tried."""


def test_what_comes_back_is_the_same_message_under_another_due(wheels: Wheels) -> None:
    own = (("x", b"1"), ("ttl", b"9"))
    message = sent(1, headers=own, key=b"k", value=b"v", partition=3, timestamp_ms=NOW_MS - 7)
    wheels.write(A1, [message])
    leader = Leader(wheels)
    leader.forwarder._dead_letters = letters = DefersAll()
    letters.leader = leader
    list(leader.transactions(200))
    record, outcome = (r for r in leader.producers.committed if r.topic != NAMES.control)
    assert (record.topic, record.partition) == (NAMES.ingress, 2)
    request = read_again(record)
    next_ms = leader.now_ms + LEAST_WAIT_MS
    assert (request.id, request.due_ms, request.topic) == (message.id, next_ms, "orders")
    assert (request.key, request.value, request.partition, request.timestamp_ms) == (
        *(b"k", b"v", 3, NOW_MS - 7),
    )
    first = (
        ("dw-first-due", b"%d" % message.due_ms),
        ("dw-first-deferred", b"%d" % (next_ms - LEAST_WAIT_MS)),
    )
    assert request.headers == encode_headers([*own, *first])
    told = json.loads(outcome.value or b"")
    assert (told["outcome"], told["id"], told["due_ms"], told["until_ms"], told["topic"]) == (
        *("deferred", message.id.hex(), message.due_ms, next_ms, "orders"),
    )
    assert leader.forwarder.counters["deferred"] == 1
    # Once more: its first due stays, and is there once.
    again = replace(message, due_ms=next_ms, headers=(*own, *first))
    wheels.write(A1, [again])
    before = len(leader.producers.committed)
    list(leader.transactions(2_000))
    record = next(r for r in leader.producers.committed[before:] if r.topic == NAMES.ingress)
    assert read_again(record).headers == request.headers
    leader.reader.close()


def test_what_was_delivered_and_is_sent_again_begins_anew() -> None:
    times = [(f"dw-first-{name}", b"1700000000000") for name in ("due", "deferred")]
    before = [*times, ("dw-id", b"00" * 16), ("dw-wheel", b"a.1")]
    asked = [("dw-topic", b"orders"), ("dw-delay-ms", b"5")]
    record = Record(NAMES.ingress, None, None, [*before, *asked])
    assert read_again(record).headers == b""
    assert read_again(record._replace(headers=[*asked, *times])).headers == encode_headers(times)


def test_a_message_in_no_wheel_has_no_acceptance_that_ends() -> None:
    rows = rows_of("bad")
    direct = replace(rows, wheels=[Direct("in", 1)])
    patience = Patience(NAMES.ingress, PATIENCE_S)
    left = np.array([1])

    def told(some: DueRows) -> dict[str, Any]:
        (record,) = outcomes.deferred(NAMES, patience.deferred(some, left, 0, 0, NOW_MS))
        found: dict[str, Any] = json.loads(record.value or b"")
        return found

    ended, ended_directly = told(rows), told(direct)
    assert (ended["outcome"], ended_directly.pop("outcome")) == ("deferred", "ingress-deferred")
    until_ms = NOW_MS + LEAST_WAIT_MS
    id_ = bytes(16).hex()
    place = {"origin": "in/1/0", "due_ms": 1_000_000, "topic": "bad"}
    assert ended_directly == place | {"id": id_, "until_ms": until_ms}


def test_the_time_to_live_counts_from_the_first_due() -> None:
    headers = encode_headers([("ttl", b"30"), ("dw-first-due", b"1000000")])
    records = np.zeros(1, RECORD)
    records["key_length"] = records["value_length"] = records["timestamp_ms"] = -1
    records["headers_length"], records["due_ms"], records["ttl"] = len(headers), 1_020_000, True
    rows = DueRows(records, ["t"], [WheelId("a", 1)], [memoryview(headers)])
    assert not find_expired(rows, 1_029_999, "ttl")
    assert find_expired(rows, 1_030_000, "ttl")
