"""One node of three: its leadership on a simulated Kafka, beside a fake server.

The pretended server says whatever a test wants of this node's peers. What is tested is how that
comes to the election machine and the duties, and what comes of it: the machine itself, the rules
of closing, and Kafka's own are tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner import candidacy
from delaywheel_replica.cleaner.delivery.dead_letters import Plan
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.cleaner.leadership import LED_TICK_S, TICK_S, Leadership
from delaywheel_replica.cleaner.outside.ports import (
    ANSWER_MS,
    IDS,
    Checked,
    KafkaCallEnd,
    LeadingRefused,
    Record,
)
from delaywheel_replica.core.election.id_turns import RESERVED
from delaywheel_replica.core.leader.failure_detector import SILENT_MS
from delaywheel_replica.core.protocol.control import (
    REMOVED,
    ControlRecord,
    leader_record,
    progress_record,
)
from delaywheel_replica.core.protocol.heartbeat import Fence, Promise
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import (
    MessageKey,
    RescheduleProposal,
    RescheduleWritten,
)
from delaywheel_replica.core.protocol.status_files import Role
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from sim.kafka.ports import SimKafkaClient
from sim.kafka.producers import SimProducers
from support.cleaner.committing import AllGoes
from support.cleaner.place import NAMES, Place
from support.core.values import heartbeat

A1, B1 = WheelId("a", 1), WheelId("b", 1)
SOON_S = 20.0


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Any two of the three are enough."""
    made = Place(tmp_path, required=2)
    with made.scheduler:
        yield made


# --- standing


def test_a_standby_turns_less_often_while_a_leader_is_heard(place: Place) -> None:
    place.hears_leader = True
    waits = place.heartbeats["a"]
    place.heartbeats["a"] = heartbeat("a", draining=True, open_=A1)
    place.never(place.in_term, for_s=1)

    def iterations() -> int:
        before = len(place.iterations_us)
        place.never(place.in_term, for_s=0.8)
        return len(place.iterations_us) - before

    assert iterations() <= 0.8 / LED_TICK_S + 1
    place.heartbeats["a"] = waits  # for a wheel
    place.never(place.in_term, for_s=LED_TICK_S)  # the rest that has begun
    assert iterations() >= 0.8 / TICK_S - 1
    place.heartbeats["a"] = heartbeat("a", draining=True, open_=A1)
    place.hears_leader = False
    place.never(place.in_term, for_s=LED_TICK_S)
    assert iterations() >= 0.8 / TICK_S - 1


def test_a_pause_is_the_leaders_alone(place: Place) -> None:
    assert place.leadership.pause_s == 0
    place.lead()
    place.until(lambda: place.leadership.pause_s > 0)
    place.until(lambda: place.leadership.pause_s == 0)


def test_no_turn_waits_while_kafka_is_away(place: Place) -> None:
    place.kafka.stop()
    place.agrees = {"b"}
    place.until(lambda: place.view.role is Role.CANDIDATE)
    place.never(place.in_term, for_s=10)
    assert place.view.kafka_error is not None
    assert set(place.iterations_us) == {0}
    place.kafka.start()
    place.until(place.in_term)


def test_a_leader_whose_records_are_being_answered_counts_for_longer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.lead()
    place.kafka.faults.commit_us = (900_000, 900_000)
    place.until(lambda: place.leadership.waiting is not None)
    waiting = place.leadership.waiting
    assert waiting is not None
    monkeypatch.setattr(SimProducers, "answered_ms", waiting.until_ms - 300)
    longer = place.leadership.waiting
    assert longer == replace(waiting, until_ms=waiting.until_ms - 300 + ANSWER_MS)
    monkeypatch.setattr(SimProducers, "answered_ms", waiting.until_ms - ANSWER_MS - 1)
    assert place.leadership.waiting == waiting


def test_a_leader_that_reads_for_long_is_heard_and_stays(place: Place) -> None:
    place.lead()
    place.reads_s = 3.0
    place.until(lambda: place.leadership.waiting is not None and place.reading)
    waiting = place.leadership.waiting
    assert waiting is not None
    assert waiting.since_ms is None
    assert waiting.until_ms > place.clock.monotonic_ms() + 3_000
    before = place.view.epoch
    place.never(lambda: not place.in_term(), for_s=30)
    assert place.view.epoch == before


# --- leaving


def test_what_it_committed_is_still_reported_though_kafka_is_away(place: Place) -> None:
    """It has not read that back: while it led, no other node could commit."""
    place.lead()
    place.give_wheel("b")
    state = place.view.state
    place.kafka.cut("a")
    place.until(lambda: not place.in_term())
    assert place.view.state == state
    place.never(lambda: place.view.state != state, for_s=20)


def test_who_has_lost_all_ids_leads_again_without_those_that_kafka_keeps(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing had said that these are left out: a transaction was abandoned with each."""
    place.lead()
    init, commit, kept = SimProducers.init, SimProducers.commit, {1, 2}

    def keeping(self: SimProducers, number: int, timeout_ms: int) -> KafkaCallEnd:
        if number in kept:
            return KafkaCallEnd(TransactionState.UNKNOWN, "CONCURRENT_TRANSACTIONS")
        return init(self, number, timeout_ms)

    def abandoning(*_: object) -> KafkaCallEnd:
        return KafkaCallEnd(TransactionState.ABANDONED)

    monkeypatch.setattr(SimProducers, "init", keeping)
    monkeypatch.setattr(SimProducers, "commit", abandoning)
    place.until(lambda: not place.in_term())
    monkeypatch.setattr(SimProducers, "commit", commit)
    place.until(place.in_term, within_s=SOON_S)
    place.until(lambda: place.view.state.left_out.ids == kept)
    assert any("Kafka keeps 2 of 3" in warning for warning in place.view.kafka_warnings)
    kept.clear()
    place.until(lambda: not place.view.state.left_out.ids)
    assert not place.view.kafka_warnings
    place.never(lambda: not place.in_term(), for_s=5)


def test_an_id_that_is_left_alone_and_may_carry_nothing_ends_the_term(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka keeps the others, and a copy of its last end may be under way."""
    place.lead()
    epoch, ends = place.view.epoch, list[int]()
    init, commit = SimProducers.init, SimProducers.commit

    def keeping(self: SimProducers, number: int, timeout_ms: int) -> KafkaCallEnd:
        if number != RESERVED:
            return KafkaCallEnd(TransactionState.UNKNOWN, "CONCURRENT_TRANSACTIONS")
        return init(self, number, timeout_ms)

    def ending(self: SimProducers, number: int, last: Record, timeout_ms: int) -> KafkaCallEnd:
        if number in ends:
            return commit(self, number, last, timeout_ms)
        ends.append(number)
        if number != RESERVED:
            return KafkaCallEnd(TransactionState.ABANDONED)
        commit(self, number, last, timeout_ms)
        return KafkaCallEnd(TransactionState.COMMITTED_LOOSE)

    monkeypatch.setattr(SimProducers, "init", keeping)
    monkeypatch.setattr(SimProducers, "commit", ending)
    place.until(lambda: place.view.epoch != epoch)
    place.until(lambda: place.view.role is Role.LEADING, within_s=SOON_S)
    place.never(lambda: place.view.role is not Role.LEADING, for_s=5)
    assert place.view.state.left_out.ids == {1, 2}


def test_what_a_broker_that_leaves_may_keep_goes_with_another_id_than_the_reserved(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.lead()
    begin, numbers = SimProducers.begin, list[int]()

    def noting(self: SimProducers, number: int) -> None:
        numbers.append(number)
        begin(self, number)

    monkeypatch.setattr(SimProducers, "begin", noting)
    monkeypatch.setattr(AllGoes, "plan", lambda _, rows, __: Plan(rows, is_at_risk=True))
    place.until(lambda: len(numbers) > 6)
    assert set(numbers) == set(range(IDS)) - {RESERVED}
    forwarder = place.leadership._forwarder
    assert forwarder is not None

    def renewing_others(_: AllGoes, rows: DueRows, __: object) -> Plan:
        if not numbers:
            forwarder.ids = (
                forwarder.ids.renewing(1).renewing(2).renewed(1, TransactionState.CONTINUE)
            )
        return Plan(rows, is_at_risk=True)

    numbers.clear()
    monkeypatch.setattr(AllGoes, "plan", renewing_others)
    place.until(lambda: len(numbers) > 3)
    assert numbers[:3] == [RESERVED, 1, 1]


def test_what_ended_a_term_is_history_once_another_leads(place: Place) -> None:
    place.lead()
    place.agrees = set()
    client = place.client("b")
    rival = client.producers()

    def commit(index: int, key: str, value: bytes | None) -> None:
        rival.begin(index)
        record = Record(NAMES.control, key.encode(), value, [], partition=0)
        assert rival.commit(index, record, 2_000).verdict is TransactionState.COMMITTED

    def stand() -> None:
        for index in range(IDS):
            rival.init(index, 5_000)
            commit(index, *leader_record(index, "b", "its own"))

    place.scheduler.spawn("b", stand)
    place.until(lambda: not place.in_term())
    assert "EPOCH" in str(place.view.kafka_error)
    place.until(lambda: place.view.leader is not None and place.view.leader.node == "b")
    progress = place.view.state.progress
    assert progress is not None
    place.scheduler.spawn("b", lambda: commit(0, *progress_record(progress)))
    place.until(lambda: place.view.kafka_error is None)


def test_a_leader_that_hears_of_a_rivals_progress_takes_nothing_for_lost(place: Place) -> None:
    """Its own status shows it before its next transaction is fenced, or while it stands again."""
    place.lead()
    progress = place.view.state.progress
    assert progress is not None
    newest = replace(progress, due_ms=progress.due_ms + 60_000)
    client = place.client("b")
    rival = client.producers()

    def commit(index: int, record: ControlRecord) -> None:
        rival.begin(index)
        key, value = record
        reported = Record(NAMES.control, key.encode(), value, [], partition=0)
        assert rival.commit(index, reported, 2_000).verdict is TransactionState.COMMITTED

    def lead() -> None:
        for index in range(IDS):
            rival.init(index, 5_000)
        for index in range(IDS):
            commit(index, leader_record(index, "b", "its own"))
        commit(0, progress_record(newest))
        place.heartbeats["b"] = replace(place.heartbeats["b"], reached=newest.reached)

    place.scheduler.spawn("b", lead)
    errors = set[str]()

    def stands_again() -> bool:
        errors.add(str(place.view.kafka_error))
        return place.in_term() and place.view.state.progress != progress

    place.until(lambda: not place.in_term())
    place.until(stands_again, within_s=20)
    assert place.view.state.progress is not None
    assert place.view.state.progress.reached.order >= newest.reached.order
    assert not any("lost" in error for error in errors)


def test_a_leader_looks_at_kafka_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidacy, "LOOK_AGAIN_S", SOON_S)
    place.lead()
    found: list[Checked | LeadingRefused] = [
        Checked(("one copy",), "grant Create"),
        LeadingRefused("not compacted"),
        Checked(),
    ]

    def check(_self: object, **_: object) -> Checked:
        reported = found.pop(0)
        if isinstance(reported, LeadingRefused):
            raise reported
        return reported

    monkeypatch.setattr(SimKafkaClient, "check", check)
    refused = "half messages are refused: grant Create"
    place.until(lambda: place.view.kafka_warnings == ("one copy", refused), within_s=SOON_S)
    assert (place.view.kafka_error, place.view.halves_objection) == (None, "grant Create")
    place.until(lambda: place.view.kafka_error == "not compacted", within_s=SOON_S + 1)
    assert place.in_term(), "messages go out meanwhile"
    place.until(lambda: place.view.kafka_error is None, within_s=SOON_S + 1)
    assert place.view.kafka_warnings == ()


def test_all_nodes_hear_that_answers_about_halves_are_not_heard(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.lead()
    said = SimpleNamespace(answers_objection="answers about them are not heard: grant Read")
    monkeypatch.setattr(Leadership, "ingress", property(lambda _: said))
    assert place.view.halves_objection == said.answers_objection
    assert place.view.kafka_warnings == (f"half messages are refused: {said.answers_objection}",)


# --- what a leader wants of the others


def test_what_was_wanted_in_term_is_wanted_no_more_when_it_is_left(place: Place) -> None:
    place.lead()
    place.give_wheel("a")
    place.heartbeats["a"] = heartbeat("a", draining=True, last_number=1)
    place.until(lambda: bool(place.view.fences))
    place.heard = set()
    place.until(lambda: not place.in_term())
    assert place.view.fences == ()


def test_a_node_that_is_silent_is_fenced(place: Place) -> None:
    place.lead()
    place.give_wheel("c")
    place.heard.remove("c")
    took_s = place.until(lambda: place.view.fences == (Fence("c", 1),), within_s=12)
    assert SILENT_MS / 1000 <= took_s < SILENT_MS / 1000 + 0.5


def test_a_new_leader_first_listens_for_as_long_as_a_node_has_to_be_silent(place: Place) -> None:
    """It has just started, and has heard no node for that reason."""
    place.lead()
    place.give_wheel("c")
    place.heard = set()
    place.until(lambda: not place.in_term())
    place.never(place.in_term, for_s=SILENT_MS / 1000)
    place.heard = {"b"}
    place.until(place.in_term)
    place.never(lambda: bool(place.view.fences), for_s=SILENT_MS / 1000 - 0.5)
    place.until(lambda: place.view.fences == (Fence("c", 1),))


def test_a_node_has_the_storage_that_the_operator_gives_it_or_none(place: Place) -> None:
    place.lead()
    place.give_wheel("c")
    assert place.view.state.nodes["c"].storage == "disk-c"
    for storage in ("new disk", REMOVED):
        place.leadership.replace("c", storage)
        place.until(lambda to=storage: place.view.state.nodes["c"].storage == to, within_s=0.2)  # type: ignore[misc]


def test_what_the_operator_said_goes_with_the_term(place: Place) -> None:
    """Another caller may have got something newer meanwhile."""
    place.leadership.replace("c", "too early")
    place.lead()
    place.give_wheel("c")
    place.never(lambda: place.view.state.nodes["c"].storage == "too early", for_s=1.0)
    place.kafka.cut("a")
    place.leadership.replace("c", "old")
    place.until(lambda: not place.in_term())
    place.kafka.mend("a")
    place.until(place.in_term)
    place.never(lambda: place.view.state.nodes["c"].storage == "old", for_s=1.0)


# --- what callers wait for

MESSAGE = MessageKey(bytes(16), 1, "orders")


@pytest.mark.parametrize(
    "ask",
    [
        Leadership.commit_soon,
        lambda each: each.reschedule(RescheduleProposal(MESSAGE, 2, Position(A1, 1, 0))),
        lambda each: each.rescheduled(RescheduleWritten(MESSAGE, 2, (A1, 1), None)),
    ],
    ids=["commit soon", "reschedule", "rescheduled"],
)
def test_each_request_is_an_ask_for_a_commit(
    place: Place, ask: Callable[[Leadership], None]
) -> None:
    assert place.leadership.asked_s == float("-inf")
    ask(place.leadership)
    assert place.leadership.asked_s == place.clock.monotonic()


def answer(node: str, seq: int) -> Promise:
    return Promise(node, f"disk-{node}", Fence("a", 1), {A1: seq})
