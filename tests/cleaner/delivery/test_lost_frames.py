"""From an unreadable frame to its record and its outcome: a leader alone, and among others.

The producers keep what they are given; the node's server is what a test says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.dead_letters import DeadLetters, Plan
from delaywheel_replica.cleaner.delivery.forward import Forwarder
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.core.leader.duties import Cluster, Situation
from delaywheel_replica.core.leader.holders import holds_progress, takeable
from delaywheel_replica.core.leader.pacing import CapLimits
from delaywheel_replica.core.protocol.control import (
    ControlState,
    NodeRecord,
    WheelRecord,
    node_record,
    wheel_record,
)
from delaywheel_replica.core.protocol.frames import FrameName
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.kafka_settings import KafkaNames
from support.cleaner.committing import CommittingProducers, no_ingress
from support.core.values import heartbeat, looked_for, wheel_heartbeat, wheel_record_of
from support.due.wheels import Sent, Wheels, wheels_in_memory

A1, A2 = WheelId("a", 1), WheelId("a", 2)
NAMES = KafkaNames("c")
DUE_MS = 1_700_000_000_000


class Producers(CommittingProducers):
    """Producers that remember what they took."""

    def ids(self) -> list[int]:
        """The ids of forwarded messages."""
        forwarded = [record for record in self.committed if record.topic == "orders"]
        return [int(dict(record.headers)["dw-id"] or b"", 16) for record in forwarded]

    def outcomes(self) -> list[dict[str, object]]:
        reported = [record.value for record in self.committed if record.topic == NAMES.outcomes]
        return [json.loads(value or b"") for value in reported]


class Everything(DeadLetters):
    """Everything due can be delivered."""

    def __init__(self) -> None:
        """Nothing is known."""

    def plan(self, rows: DueRows, ahead: object = None) -> Plan:
        del ahead
        return Plan(rows)

    def committed(self) -> None:
        """Nothing was tried."""


class Leader:
    """A forwarder used as leadership.py uses it, on the wheels of its node."""

    def __init__(self, wheels: Wheels, record: WheelRecord, seqs: dict[WheelId, int]) -> None:
        self.wheels = wheels
        self.now_ms = DUE_MS
        self.lacks: dict[FrameName, str] = {}
        self.answers: list[Promise] = []
        self.heartbeats: dict[str, Heartbeat] = {}
        self.producers = Producers()
        self.reader = DueReader(wheels.disk, wheels.data, preload_thread=False)
        progress = Progress(DUE_MS - 5000, None, seqs, DUE_MS // 1000 - 60)
        state = ControlState(progress=progress).apply_all(
            [
                *(node_record(n, NodeRecord(f"disk-{n}", 2)) for n in record.members),
                wheel_record(A1, record),
            ]
        )
        self.forwarder = Forwarder(
            state,
            self.producers,
            self.reader,
            Everything(),
            no_ingress(),
            names=NAMES,
            cluster=Cluster(tuple(record.members), record.min_insync, 60),
            caps=CapLimits(100, 1 << 20, 100, 1 << 20),
        )

    @property
    def state(self) -> ControlState:
        return self.forwarder.state

    def run_once(self) -> None:
        """Runs one transaction."""
        self.now_ms += 100
        own = self.heartbeats["a"]
        if holds_progress(self.state, own):
            self.forwarder.forwards = True
        planned = self.forwarder.next_step(self.now_ms, takeable(self.state, own, self.heartbeats))
        situation = Situation(
            self.now_ms, "a", self.heartbeats, self.answers, *looked_for(self.lacks)
        )
        self.forwarder.transact(planned, situation, 1000)


@pytest.fixture
def wheels() -> Iterator[Wheels]:
    with wheels_in_memory() as made:
        for number in range(1, 5):
            made.write(A1, [Sent(DUE_MS - 1000, number.to_bytes(16, "big"))])
        yield made


def reporting(applied: int, *missing: int, node: str = "a") -> Heartbeat:
    used = {"open_": A1} if node == "a" else {}
    wheels = {A1: wheel_heartbeat(applied, missing=missing)}
    return heartbeat(node, wheels=wheels, last_number=2, **used)  # type: ignore[arg-type]


def test_alone_a_bad_frame_is_given_up_as_soon_as_it_is_found(wheels: Wheels) -> None:
    wheels.damage(wheels.frames[1])
    leader = Leader(wheels, wheel_record_of(), {})
    leader.heartbeats = {"a": reporting(4)}
    for _ in range(5):
        leader.run_once()
        # What the server of a node alone says.
        leader.lacks = dict.fromkeys(leader.forwarder.unreadable, "a")
    assert leader.producers.ids() == [1, 3, 4]
    assert leader.state.lost == {(A1, 2)}
    (outcome,) = leader.producers.outcomes()
    assert outcome == {
        "outcome": "lost",
        "reason": "MAGIC",
        "wheel": "a.1",
        "seq": 2,
        "last_seq": 2,
        "slot": DUE_MS // 1000 - 1,
        "last_slot": DUE_MS // 1000 - 1,
        "messages": 1,
    }
    assert leader.forwarder.counters["lost_frames"] == 1
    assert leader.forwarder.unreadable == set()
    leader.reader.close()


def test_among_others_it_waits_until_all_lack_it_or_it_is_repaired(wheels: Wheels) -> None:
    wheels.damage(wheels.frames[1])
    wheels.damage(wheels.frames[2])
    leader = Leader(wheels, wheel_record_of("a", "b", "c", min_insync=2), {})
    leader.heartbeats = {"a": reporting(4), "b": reporting(4, node="b")}
    for nodes in ("", "a", "ab", "bc"):
        leader.lacks = dict.fromkeys([(A1, 2), (A1, 3)], nodes)
        leader.run_once()
        assert leader.forwarder.unreadable == {(A1, 2), (A1, 3)}
    assert leader.producers.ids() == []  # their second waits for them
    wheels.repair(wheels.frames[1])
    # The last word is older than the repair: what can be read is not given up.
    leader.heartbeats["b"] = reporting(4, 2, 3, node="b")
    leader.lacks = dict.fromkeys([(A1, 2), (A1, 3)], "abc")
    leader.run_once()
    leader.run_once()
    assert leader.state.lost == {(A1, 3)}
    assert leader.producers.ids() == [1, 2, 4]
    leader.reader.close()


def test_what_was_done_is_given_up_without_an_outcome(wheels: Wheels) -> None:
    """Only a retry asks for it: it may be a copy, which cannot be decided."""
    wheels.write(A1, [Sent(DUE_MS - 1000, (1).to_bytes(16, "big"))])
    leader = Leader(wheels, wheel_record_of(), {A1: 4})
    leader.forwarder.state = replace(
        leader.state, progress=Progress(DUE_MS, None, {A1: 4}, DUE_MS // 1000 - 60)
    )
    wheels.damage(wheels.frames[0])
    leader.heartbeats = {"a": reporting(5)}
    for _ in range(3):
        leader.run_once()
        leader.lacks = dict.fromkeys(leader.forwarder.unreadable, "a")
    assert leader.state.lost == {(A1, 1)}
    leader.run_once()
    assert leader.producers.outcomes() == []
    assert leader.producers.ids() == [1]
    leader.reader.close()


def test_frames_that_were_taken_account_of_and_are_gone_end_with_their_wheel(
    wheels: Wheels,
) -> None:
    """The operating system crashed: V = 6, and no row beyond 4 is anywhere."""
    leader = Leader(wheels, wheel_record_of(), {A1: 6})
    left = heartbeat(
        open_=A2, last_number=2, spare=WheelId("a", 3), wheels={A1: wheel_heartbeat(4)}
    )
    leader.heartbeats = {"a": replace(left, last_number=2)}
    leader.answers = [Promise("a", "disk-a", Fence("a", 1), {A1: 4}, all_incomplete=True)]
    assert not holds_progress(leader.state, leader.heartbeats["a"])
    leader.run_once()
    assert leader.forwarder.unreadable == {(A1, 5), (A1, 6)}
    leader.lacks = dict.fromkeys(leader.forwarder.unreadable, "a")
    leader.run_once()
    assert leader.state.wheels[A1].closed_at == 6
    assert leader.state.lost == {(A1, 5), (A1, 6)}
    assert [(o["seq"], o["last_seq"]) for o in leader.producers.outcomes()] == [(5, 6)]
    assert holds_progress(leader.state, leader.heartbeats["a"])
    leader.run_once()
    assert leader.forwarder.forwards
    assert leader.producers.ids() == [1, 2, 3, 4]
    leader.reader.close()
