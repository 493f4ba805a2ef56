# ruff: noqa: ARG002 - the producers ignore most of their arguments
"""What a transaction's end tells: how late its messages were, and how much goes into the next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.dead_letters import Condemned, DeadLetters, Plan
from delaywheel_replica.cleaner.delivery.forward import Forwarder, Planned, _OwnRecords
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.due.rows import ABSENT, RECORD, DroppedRows, DueRows
from delaywheel_replica.cleaner.due.steps import Step
from delaywheel_replica.cleaner.ingress.taken import NOTHING, Taken
from delaywheel_replica.cleaner.outside.ports import UNTAKEN, KafkaCallEnd, Record, RefusedRecord
from delaywheel_replica.cleaner.tallies import add_lateness
from delaywheel_replica.core.leader.duties import Cluster, Situation
from delaywheel_replica.core.leader.pacing import CapLimits
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.histogram import LATENESS_BOUNDS_US, Tally
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames
from support.cleaner.committing import no_ingress

DUE_MS = 1_700_000_000_000
PROGRESS = Progress(DUE_MS - 500, None, {}, 0)


@given(st.lists(st.lists(st.integers(-100, 4_000_000))))
def test_columns_are_counted_as_single_messages_are(transactions: list[list[int]]) -> None:
    lateness, expected = Tally(LATENESS_BOUNDS_US), Tally(LATENESS_BOUNDS_US)
    for late_ms in transactions:
        add_lateness(lateness, DUE_MS - np.array(late_ms, np.int64), DUE_MS)
        for late in late_ms:
            expected.add(late * 1_000)
    assert lateness.read() == expected.read()


class Refusing:
    """Producers that do not take some records."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self.throttled_until_ms = None
        self.ended = KafkaCallEnd(TransactionState.COMMITTED)
        self.now_s = 0.0
        self.commit_s = 0.0

    def begin(self, number: int) -> None:
        """Begins nothing."""

    def commit(self, number: int, last: Record, timeout_ms: int) -> KafkaCallEnd:
        """Takes as long as it is to."""
        self.now_s += self.commit_s
        return self.ended

    def write(self, number: int, records: Iterable[Record]) -> list[RefusedRecord]:
        written = len(list(records))
        refused = [n for n in self._numbers if n < written]
        return [RefusedRecord(n, DeadReason.MESSAGE_TOO_LARGE) for n in refused]

    def write_own(self, number: int, records: Iterable[Record]) -> None:
        """Takes all of our own records."""

    def flush(self, number: int, timeout_ms: int) -> bool:
        return True


def rows_due(*dues_ms: int) -> DueRows:
    records = np.zeros(len(dues_ms), RECORD)
    records["due_ms"] = dues_ms
    return DueRows(records, ["orders"], [WheelId("a", 1)], [memoryview(b"")])


def forwarder_to(producers: Refusing, letters: DeadLetters | None = None) -> Forwarder:
    return Forwarder(
        ControlState(progress=PROGRESS),
        cast("Any", producers),
        Mock(spec=DueReader),
        letters or Mock(spec=DeadLetters),
        no_ingress(),
        names=KafkaNames("c"),
        cluster=Cluster(("a",), 1, 60),
        caps=CapLimits(100, 1 << 20, 1_000, 1 << 20),
        monotonic=lambda: producers.now_s,
    )


def step_of(rows: DueRows, *, behind: bool = False) -> Step:
    nothing = DroppedRows(rows_due(), np.empty(0, np.uint8), np.empty(0, np.bool_))
    return Step(PROGRESS, PROGRESS, rows, nothing, behind=behind)


def written(producers: Refusing, rows: DueRows) -> tuple[list[int], dict[str, int]]:
    """Dues and counters of a step of these rows."""
    forwarder, step = forwarder_to(producers), step_of(rows)
    own = _OwnRecords(cast("Any", producers), 0, 1_000_000, 1_000)
    plan = Plan(rows)
    forwarded, _, counted = forwarder._write(0, step, plan, Situation(DUE_MS, "a", {}), own)
    return [due for each in forwarded for due in each.dues_ms.tolist()], dict(counted)


def test_all_of_a_step_went_out() -> None:
    dues_ms, counted = written(Refusing(), rows_due(DUE_MS, DUE_MS + 1))
    assert dues_ms == [DUE_MS, DUE_MS + 1]
    assert counted["forwarded"] == 2


def test_what_the_client_refuses_is_no_lateness() -> None:
    dues_ms, counted = written(Refusing(0, 2), rows_due(DUE_MS, DUE_MS + 1, DUE_MS + 2, DUE_MS + 3))
    assert dues_ms == [DUE_MS + 1, DUE_MS + 3]
    assert (counted["forwarded"], counted["dead_lettered"]) == (2, 2)


def test_of_nothing_nothing_is_counted() -> None:
    dues_ms, counted = written(Refusing(), rows_due())
    assert dues_ms == []
    assert not counted["forwarded"]


def cap_after(producers: Refusing, rows: DueRows, plan: Plan, taken: Taken = NOTHING) -> int:
    """The cap, first 100, after a commit that took as long as the producers say."""
    forwarder = forwarder_to(producers)
    planned = Planned(step_of(rows, behind=True), plan, taken, rows)
    forwarder.transact(planned, Situation(DUE_MS, "a", {}), 1_000)
    return forwarder._pace.cap_messages


def test_a_slow_commit_is_judged_by_the_partitions_of_its_messages() -> None:
    """A hundred messages that took 0.9 s: for two partitions, or each for another one."""
    rows = rows_due(*[DUE_MS] * 100)
    rows.records["partition"], rows.records["key_length"] = ABSENT, 1
    slow = Refusing()
    slow.commit_s = 0.9
    caps = [
        cap_after(slow, rows, Plan(rows, partitions={"orders": partitions}))
        for partitions in (2, 1_000)
    ]
    assert caps == [200, 100]


def test_records_that_are_only_handed_over_and_dead_letters_do_not_slow_a_leader_down() -> None:
    """They go to one partition each time, however many they are."""
    slow, nothing, rows = Refusing(), rows_due(), rows_due(*[DUE_MS] * 100)
    slow.commit_s = 0.9
    assert cap_after(slow, nothing, Plan(nothing), replace(NOTHING, is_full=True)) == 200
    dead = [Condemned(message, DeadReason.TOPIC_MISSING) for message in rows]
    assert cap_after(slow, rows, Plan(nothing, dead)) == 200


def test_what_is_known_to_take_nothing_is_not_searched_for() -> None:
    for cause, is_searched in ((f"{UNTAKEN}: no answer", False), ("no answer to 1 records", True)):
        producers, rows = Refusing(), rows_due(DUE_MS)
        producers.ended = KafkaCallEnd(TransactionState.ABANDONED, cause)
        letters = Mock(spec=DeadLetters)
        forwarder = forwarder_to(producers, letters)
        planned = Planned(step_of(rows), Plan(rows), NOTHING, rows)
        forwarder.transact(planned, Situation(DUE_MS, "a", {}), 1_000)
        assert letters.failed.called is is_searched
