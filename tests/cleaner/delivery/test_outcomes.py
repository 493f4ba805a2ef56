"""Every accepted message has one fate, and the written records show which; costs 1 s.

The forwarder works on wheels in memory; of what it commits, and of the progress that goes with it,
an account is made after every transaction: accepted = forwarded + cancelled + duplicates + dead +
lost + pending.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.cleaner.delivery.dead_letters import Condemned, DeadLetters, Plan
from delaywheel_replica.cleaner.delivery.forward import Forwarder
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason, topic_asked_for
from delaywheel_replica.cleaner.delivery.outcomes import dead_letter as dead_letter_of
from delaywheel_replica.cleaner.delivery.outcomes import forwarded as forwarded_of
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.due.rows import DueMessage, DueRows
from delaywheel_replica.cleaner.outside.ports import Record
from delaywheel_replica.core.leader.duties import Cluster, Situation
from delaywheel_replica.core.leader.pacing import CapLimits
from delaywheel_replica.core.protocol.codec import from_json
from delaywheel_replica.core.protocol.control import (
    OPENING,
    ControlState,
    NodeRecord,
    lost_record,
    node_record,
    wheel_record,
)
from delaywheel_replica.core.protocol.frames import FrameRange, FrameSet
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.kafka_settings import FORWARD_ROOM_BYTES, KafkaNames
from support.cleaner.committing import CommittingProducers, no_ingress
from support.core.values import heartbeat, looked_for, wheel_heartbeat, wheel_record_of
from support.due.rows import due_rows
from support.due.wheels import Sent, Wheels

A1, A2, B1 = WheelId("a", 1), WheelId("a", 2), WheelId("b", 1)
NAMES = KafkaNames("c")
NOW_MS = 1_700_000_000_000
LATER_MS = 3_000
BAD = "bad"

_Key: TypeAlias = tuple[str, bytes, int]


class OneBadTopic(DeadLetters):
    """Everything can be delivered except messages for `BAD`."""

    def __init__(self) -> None:
        """Nothing is known."""

    def plan(self, rows: DueRows, ahead: object = None) -> Plan:
        del ahead
        is_bad = np.isin(
            rows.topic_numbers, [n for n, topic in enumerate(rows.topics) if topic == BAD]
        )
        dead = [Condemned(message, DeadReason.REFUSED) for message in rows.take(is_bad)]
        return Plan(rows.take(~is_bad), dead)

    def committed(self) -> None:
        """Nothing was tried."""


class Account:
    """The fate of every ledger row, from Kafka and the ledger alone."""

    def __init__(self, wheels: Wheels, producers: CommittingProducers) -> None:
        self.rows = Counter(
            (row.topic, row.id, row.due_ms)
            for frame in wheels.frames
            if frame.kind is Kind.MESSAGES
            for row in frame.rows
        )
        self._of_frames = [
            (frame.wheel, frame.seq, number, (row.topic, row.id, row.due_ms))
            for frame in wheels.frames
            if frame.kind is Kind.MESSAGES
            for number, row in enumerate(frame.rows)
        ]
        records = producers.committed
        self.forwarded = Counter(
            _key_of(record)
            for record in records
            if record.topic not in {NAMES.control, NAMES.outcomes, NAMES.dead}
        )
        self.from_wheels = Counter(
            (_key_of(record), dict(record.headers)["dw-wheel"])
            for record in records
            if record.topic not in {NAMES.control, NAMES.outcomes, NAMES.dead}
        )
        self.reported = [json.loads(r.value or b"") for r in records if r.topic == NAMES.outcomes]
        self.letters = Counter(_key_of(r) for r in records if r.topic == NAMES.dead)
        progress = [r.value for r in records if r.key == b"progress"]
        self.progress = from_json(Progress, json.loads(progress[-1] or b""))

    def count(self, outcome: str) -> Counter[_Key]:
        """Outcomes of single messages."""
        reported = (each for each in self.reported if each["outcome"] == outcome)
        return Counter(
            (each["topic"], bytes.fromhex(each["id"]), each["due_ms"]) for each in reported
        )

    def check(self) -> None:
        """The equation, for every key."""
        frames = {
            (each["wheel"], seq)
            for each in self.reported
            if each["outcome"] == "lost"
            for seq in range(each["seq"], each["last_seq"] + 1)
        }
        single = [self.count(outcome) for outcome in ("cancelled", "duplicate", "dead-lettered")]
        open_rows: Counter[_Key] = Counter()
        lost: Counter[_Key] = Counter()
        for wheel, seq, number, key in self._of_frames:
            if (str(wheel), seq) in frames:
                lost[key] += 1
            elif not self.progress.covers(key[2], Position(wheel, seq, number)):
                open_rows[key] += 1
        for key, accepted in self.rows.items():
            reported = self.forwarded[key] + sum(counts[key] for counts in single) + open_rows[key]
            # Of a lost frame that is lost which was not done before.
            assert reported <= accepted <= reported + lost[key], (key, self)
        assert self.letters == self.count("dead-lettered")
        assert all(number == 1 for number in self.forwarded.values())

    def totals(self) -> dict[str, int]:
        """Counts over all keys; pending and lost messages are the rest."""
        return {
            "accepted": sum(self.rows.values()),
            "forwarded": sum(self.forwarded.values()),
            "cancelled": sum(self.count("cancelled").values()),
            "duplicates": sum(self.count("duplicate").values()),
            "dead": sum(self.count("dead-lettered").values()),
        }


def _key_of(record: Record) -> _Key:
    headers: dict[str, Any] = dict(record.headers)
    topic = headers["dw-dead-topic"].decode() if record.topic == NAMES.dead else record.topic
    return topic, bytes.fromhex(headers["dw-id"].decode()), int(headers["dw-due"])


class Leader:
    """A forwarder on wheels a.1 and b.1, which the node holds; account is kept each time."""

    def __init__(self, wheels: Wheels) -> None:
        self.wheels = wheels
        self.now_ms = NOW_MS
        self.halves_objection: str | None = None
        self.producers = CommittingProducers()
        self.reader = DueReader(wheels.disk, wheels.data, preload_thread=False)
        progress = Progress(NOW_MS - LATER_MS, None, {}, NOW_MS // 1000 - 60)
        self.state = ControlState(progress=progress).apply_all(
            [
                node_record("a", NodeRecord("disk-a", 2)),
                node_record("b", NodeRecord("disk-b", 1)),
                wheel_record(A1, wheel_record_of("a")),
                wheel_record(B1, wheel_record_of("b")),
            ]
        )
        self.forwarder = Forwarder(
            self.state,
            self.producers,
            self.reader,
            OneBadTopic(),
            no_ingress(),
            names=NAMES,
            cluster=Cluster(("a", "b"), 1, 60),
            caps=CapLimits(3, 1 << 20, 3, 1 << 20),
        )
        self.forwarder.forwards = True

    def run_once(self, pass_ms: int = 0) -> Account:
        """One transaction after another, until nothing is due."""
        for _ in self.transactions(pass_ms):
            Account(self.wheels, self.producers).check()
        return Account(self.wheels, self.producers)

    def transactions(self, pass_ms: int = 0) -> Iterator[object]:
        """Yields after each transaction, until nothing is due."""
        self.now_ms += pass_ms
        behind = True
        while behind:
            limits = self.wheels.last_seqs()
            planned = self.forwarder.next_step(self.now_ms, limits)
            reported = {wheel: wheel_heartbeat(seq) for wheel, seq in limits.items()}
            own = heartbeat("a", wheels=reported, open_=A1, spare=A2, last_number=2)
            situation = Situation(
                *(self.now_ms, "a", {"a": own}, (), *self.lacks()),
                halves_objection=self.halves_objection,
            )
            behind = self.forwarder.transact(planned, situation, 1000).behind
            yield behind

    def lacks(self) -> tuple[FrameSet, dict[str, FrameSet]]:
        """No node has what cannot be read here."""
        return looked_for(dict.fromkeys(self.forwarder.unreadable, "ab"))


@pytest.fixture
def leader(wheels: Wheels) -> Iterator[Leader]:
    made = Leader(wheels)
    yield made
    made.reader.close()


def sent(number: int, *, in_ms: int = 100, **content: Any) -> Sent:
    return Sent(NOW_MS + in_ms, number.to_bytes(16, "big"), **content)


def test_a_transaction_with_messages_joins_the_control_topic_first(
    wheels: Wheels, leader: Leader
) -> None:
    key = OPENING[0].encode()
    leader.run_once()
    assert all(record.key != key for record in leader.producers.committed), "an idle commit"
    before = len(leader.producers.committed)
    wheels.write(A1, [sent(1)])
    leader.run_once(200)
    written = leader.producers.committed[before:]
    assert (written[0].topic, written[0].key) == (NAMES.control, key)
    assert [record.topic for record in written].count(NAMES.control) >= 2, "it has progress, too"


def test_retries_have_one_fate_each_wherever_and_whenever_they_come(
    wheels: Wheels, leader: Leader
) -> None:
    first, other, late = sent(1), sent(2), sent(3, in_ms=-500)
    wheels.write(A1, [first, first, other])  # twice in one frame
    wheels.write(B1, [first, sent(2, value=b"something else")])
    wheels.write(A1, [late])
    leader.run_once()
    account = leader.run_once(1_000)
    assert account.totals() == {
        "accepted": 6,
        "forwarded": 3,
        "cancelled": 0,
        "duplicates": 3,
        "dead": 0,
    }
    # After the slot was done, in the late window.
    wheels.write(B1, [late, first])
    wheels.write(A1, [sent(2, topic="elsewhere")])
    account = leader.run_once(1_000)
    assert (account.totals()["accepted"], account.totals()["duplicates"]) == (9, 5)
    reported = [each for each in account.reported if each["id"] == other.id.hex()]
    assert [(each["content_differs"], each["topic"]) for each in reported] == [(True, "orders")]
    assert account.forwarded["elsewhere", other.id, other.due_ms] == 1


def test_a_cancel_counts_once_however_often_message_and_cancel_came(
    wheels: Wheels, leader: Leader
) -> None:
    gone, kept = sent(1, in_ms=1_500), sent(2, in_ms=1_500)
    wheels.write(A1, [gone, kept])
    wheels.write(B1, [gone])
    wheels.cancel(A1, [gone])
    wheels.cancel(B1, [gone, gone])
    leader.run_once()
    account = leader.run_once(2_000)
    assert account.totals() == {
        "accepted": 3,
        "forwarded": 1,
        "cancelled": 1,
        "duplicates": 1,
        "dead": 0,
    }
    # A cancel and a retry that come too late change nothing.
    wheels.cancel(A1, [kept])
    wheels.write(B1, [kept, gone])
    account = leader.run_once(500)
    assert account.totals() == {
        "accepted": 5,
        "forwarded": 1,
        "cancelled": 1,
        "duplicates": 3,
        "dead": 0,
    }


def test_a_retry_of_what_was_dead_lettered_is_a_duplicate(wheels: Wheels, leader: Leader) -> None:
    wheels.write(A1, [sent(1, topic=BAD), sent(2)])
    leader.run_once(1_000)
    wheels.write(B1, [sent(1, topic=BAD)])
    account = leader.run_once(1_000)
    assert account.totals() == {
        "accepted": 3,
        "forwarded": 1,
        "cancelled": 0,
        "duplicates": 1,
        "dead": 1,
    }


def test_a_frame_that_is_lost_in_part_is_reported_and_what_was_done_of_it_is_not(
    wheels: Wheels, leader: Leader
) -> None:
    """Two of its messages are done, the third is not; a copy of that one is in another wheel."""
    rows = [sent(1, in_ms=100), sent(2, in_ms=200), sent(3, in_ms=700), sent(4, in_ms=800)]
    (frame,) = wheels.write(A1, rows)
    leader.run_once()
    assert leader.run_once(250).totals()["forwarded"] == 2
    # The leader changes: only the next one cannot read it.
    wheels.damage(frame)
    after = Leader(wheels)
    after.forwarder.state, after.now_ms = leader.forwarder.state, leader.now_ms
    after.producers.committed = leader.producers.committed
    wheels.write(B1, [rows[2]])
    for _ in range(4):
        account = after.run_once(300)
    after.reader.close()
    (lost,) = [each for each in account.reported if each["outcome"] == "lost"]
    assert (lost["wheel"], lost["seq"], lost["messages"]) == ("a.1", 1, 4)
    # Of five rows three are forwarded, the third as the copy; two of the lost frame have no fate.
    assert account.totals()["forwarded"] == 3
    assert account.from_wheels[("orders", rows[2].id, rows[2].due_ms), b"c/b.1"] == 1
    assert account.totals()["accepted"] == 5


def test_a_millisecond_that_is_split_is_accounted_for_at_each_of_its_parts(
    wheels: Wheels, leader: Leader
) -> None:
    """Three messages go into a transaction, and ten are due at once; two are retries of others."""
    rows = [sent(number) for number in range(8)]
    wheels.write(A1, rows)
    wheels.write(B1, [rows[0], rows[7]])
    account = leader.run_once(1_000)
    assert account.totals()["forwarded"] == 8
    assert account.totals()["duplicates"] == 2
    assert sum(record.key == b"progress" for record in leader.producers.committed) >= 4


def test_what_is_committed_as_lost_names_the_frame(wheels: Wheels, leader: Leader) -> None:
    (frame,) = wheels.write(A1, [sent(1), sent(2)])
    wheels.damage(frame)
    leader.run_once()
    leader.run_once(1_000)
    account = leader.run_once(1_000)
    keys = [record.key for record in leader.producers.committed if record.topic == NAMES.control]
    assert lost_record(FrameRange(A1, 1, 1))[0].encode() in keys
    assert account.totals()["forwarded"] == 0
    assert [each["messages"] for each in account.reported] == [2]


def due_message(timestamp_ms: int, *headers: tuple[str, bytes | None]) -> DueMessage:
    own = [*headers] or [("own", b"1")]
    return DueMessage("orders", -1, b"k", b"v", own, timestamp_ms, NOW_MS, bytes(16), 1, A1, 2, 3)


def test_only_a_message_with_a_time_of_its_own_says_when_it_was_forwarded() -> None:
    plain, dated = forwarded_of(NAMES, due_rows([due_message(-1), due_message(5)]), NOW_MS + 7)
    assert [name for name, _ in plain.headers] == [
        "own",
        "dw-id",
        "dw-due",
        "dw-accepted",
        "dw-wheel",
    ]
    assert plain.headers[1:] == [
        ("dw-id", b"0" * 32),
        ("dw-due", b"%d" % NOW_MS),
        ("dw-accepted", b"1"),
        ("dw-wheel", b"c/a.1"),
    ]
    assert dated.headers[:-1] == plain.headers
    assert dated.headers[-1] == ("dw-forwarded", b"1700000000007")
    assert dated.timestamp_ms == 5
    # The time of a dead letter is that of now.
    letter, _ = dead_letter_of(NAMES, due_message(5), DeadReason.REFUSED, None)
    assert "dw-forwarded" not in dict(letter.headers)


def test_a_half_that_was_to_wait_in_the_ingress_topic_is_asked_for_by_its_own_topic() -> None:
    """Not so a letter, with which its group may be asked again."""
    passed_on = due_message(1)._replace(topic=NAMES.ingress, headers=[("dw-topic", b"bills")])
    letter = due_message(1)._replace(topic=NAMES.halves, headers=[("dw-half-topic", b"bills")])
    assert topic_asked_for(passed_on) == "bills"
    assert topic_asked_for(letter) == NAMES.halves


def test_the_room_of_a_message_is_enough_for_all_headers() -> None:
    wheel = WheelId("n" * 31, 10**18 - 1)
    longest = due_message(1)._replace(
        headers=[], due_ms=1 << 62, accepted_at_ms=1 << 62, wheel=wheel, timestamp_ms=5
    )
    (record,) = forwarded_of(KafkaNames("c" * 31), due_rows([longest]), 1 << 62)
    assert record.batch_bytes - len(b"kv") <= FORWARD_ROOM_BYTES
