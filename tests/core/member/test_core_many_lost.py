"""A million unreadable frames in a row: reports, requests and records stay small."""

import json
from dataclasses import replace

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel_replica.core.leader.duties import Cluster, Situation, duties
from delaywheel_replica.core.leader.floor import FloorWatch
from delaywheel_replica.core.leader.holders import holds_progress
from delaywheel_replica.core.member.member import Member
from delaywheel_replica.core.node.events import (
    CleanerReported,
    Effect,
    ForgetLost,
    HeldWheel,
    MemberConfig,
    Received,
    Send,
    Started,
    Tick,
)
from delaywheel_replica.core.protocol.codec import MOST, from_json, to_json
from delaywheel_replica.core.protocol.control import ControlState, NodeRecord
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameRange, FrameSet
from delaywheel_replica.core.protocol.messages import Fetch, Gossip, Lacks, PeerMessage
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.peers.encoding import encode
from support.core.member_talk import heartbeat_of, wheel_heartbeat
from support.core.member_world import START_MS, WALL_MS, disk_of, held_of, record_of, state_of

B1 = WheelId("b", 1)
MILLION = 1_000_000
RECORD = record_of()
LOST = FrameSet([FrameRange(B1, 1, MILLION)])
NONE_HELD = wheel_heartbeat(MILLION, missing=SeqSet([(1, MILLION)]))


class Node:
    """The machine of node a, whose store is what `held` says."""

    def __init__(self, held: dict[WheelId, HeldWheel]) -> None:
        self.now_ms, self.wall_ms = START_MS, WALL_MS
        config = MemberConfig("a", tuple("abc"), 2, 120)
        self.machine = Member(config, Started(state_of("a"), held, self.now_ms))
        self.largest_bytes = 0

    def tick(self) -> list[tuple[str, PeerMessage]]:
        self.now_ms, self.wall_ms = self.now_ms + 100, self.wall_ms + 100
        return self._sent(self.machine.step(Tick(self.now_ms, self.wall_ms)))

    def receive(self, sender: str, message: PeerMessage) -> list[tuple[str, PeerMessage]]:
        received = Received(sender, message, self.now_ms, self.wall_ms)
        return self._sent(self.machine.step(received))

    def cleaner_reports(
        self,
        role: Role,
        progress: Progress,
        lost: FrameSet = NO_FRAMES,
        missing: FrameSet = NO_FRAMES,
    ) -> list[Effect]:
        status = CleanerStatus(
            node="a",
            boot=state_of("a").boot_id,
            pid=2,
            monotonic_ms=self.now_ms,
            wall_ms=self.wall_ms,
            role=role,
            epoch=7,
            progress=progress,
            control_offset=1,
            wheels={B1: RECORD},
            unreadable=missing,
            lost=lost,
        )
        assert len(json.dumps(to_json(status))) < 2_000
        status = from_json(CleanerStatus, json.loads(json.dumps(to_json(status))))
        return self.machine.step(CleanerReported(status, self.now_ms, self.wall_ms))

    def _sent(self, effects: list[Effect]) -> list[tuple[str, PeerMessage]]:
        sent = [(each.peer, each.message) for each in effects if isinstance(each, Send)]
        self.largest_bytes = max(
            [self.largest_bytes, *(len(encode(reported)) for _, reported in sent)]
        )
        return sent

    def look_for_all(self) -> int:
        """The others answer every request with missing frames; returns how many were requested."""
        asked = 0
        waiting = [*self.tick()]
        while waiting:
            peer, message = waiting.pop()
            if isinstance(message, Fetch):
                asked += 1
                answer = Lacks(
                    message.request, B1, disk_of(peer), message.first_seq, message.last_seq
                )
                waiting += self.receive(peer, answer)
        return asked


def state(progress: Progress) -> ControlState:
    nodes = {node: NodeRecord(disk_of(node), 9) for node in "abc"}
    return ControlState(progress=progress, nodes=nodes, wheels={B1: RECORD})


def given_up(node: Node, progress: Progress) -> ControlState:
    """The control records after the next transaction of the leader at this node."""
    row = node.machine.status(node.now_ms, node.wall_ms, 1)
    assert len(json.dumps(to_json(row))) < 3_000
    heartbeats = {
        "a": row.heartbeat,
        **{peer: known.heartbeat for peer, known in row.peers.items()},
    }
    situation = Situation(
        node.wall_ms, "a", heartbeats, row.answers, row.looked_for, row.lacks, in_term_ms=0
    )
    before = state(progress)
    todo = duties(before, progress, FloorWatch(), Cluster(tuple("abc"), 2, 120), situation)
    assert todo.lost == LOST
    assert [key for key, _ in todo.records if key.startswith("lost/")] == ["lost/b.1/1"]
    return before.apply_all(todo.records)


def test_frames_that_are_held_as_holes_are_given_up_at_once() -> None:
    node = Node({B1: held_of(B1, MILLION, missing=SeqSet([(1, MILLION)]))})
    progress = Progress(node.wall_ms, None, {}, 0)
    node.cleaner_reports(Role.LEADING, progress)
    for peer in "bc":
        node.receive(peer, Gossip(heartbeat_of(peer, wheels={B1: NONE_HELD})))
    assert node.look_for_all() == 2
    after = given_up(node, progress)
    assert node.largest_bytes < 2_500
    assert ForgetLost(LOST) in [
        *node.cleaner_reports(Role.LEADING, progress, after.lost),
        *node.machine.step(Tick(node.now_ms, node.wall_ms)),
    ]
    row = node.machine.status(node.now_ms, node.wall_ms, 1)
    assert (row.heartbeat.wheels[B1].missing.spans, row.looked_for) == ((), NO_FRAMES)
    assert holds_progress(after, replace(row.heartbeat, wheels={B1: wheel_heartbeat(MILLION)}))


def test_frames_of_which_no_member_has_a_row_are_given_up_at_once() -> None:
    """The operating systems of all nodes have crashed, and taken frames are gone."""
    node = Node({})
    progress = Progress(node.wall_ms, None, {B1: MILLION}, 0)
    for peer in "bc":
        node.receive(peer, Gossip(heartbeat_of(peer)))
    node.cleaner_reports(Role.LEADING, progress, missing=LOST)
    assert node.look_for_all() == 2
    after = given_up(node, progress)
    assert node.largest_bytes < 2_500
    assert holds_progress(after, heartbeat_of("a"))


def test_an_enormous_number_of_frames_takes_no_more() -> None:
    node = Node({})
    progress = Progress(node.wall_ms, None, {}, 0)
    for peer in "bc":
        wheels = {B1: wheel_heartbeat(MOST, missing=SeqSet([(1, MOST)]))}
        node.receive(peer, Gossip(heartbeat_of(peer, wheels=wheels)))
    node.cleaner_reports(Role.LEADING, progress)
    node.tick()
    assert node.look_for_all() == 2
    # What it is reported to lack beyond what was asked for does not count, and costs nothing.
    node.receive("b", Lacks(2, B1, disk_of("b"), 1, MOST))
    row = node.machine.status(node.now_ms, node.wall_ms, 1)
    assert len(json.dumps(to_json(row))) < 3_000
    assert node.largest_bytes < 5_000
