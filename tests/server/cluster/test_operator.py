"""Replacing and removing nodes at the leader's node, and at others: results and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.control import REMOVED, ROLLED_BACK, NodeRecord, WheelRecord
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, LeaderTerm
from delaywheel_replica.core.protocol.progress import MOST_AHEAD, Progress
from delaywheel_replica.core.protocol.status_files import (
    CleanerStatus,
    KnownPeer,
    Role,
    ServerStatus,
)
from delaywheel_replica.link import NodeStorage, SetBack
from delaywheel_replica.peers.states import Connection, PeerState
from delaywheel_replica.server.access.callers import ANYBODY, Access, CallContext
from delaywheel_replica.server.cluster.operator import (
    Operator,
    wheel_refusal,
)
from delaywheel_replica.server.intake.admission import Admission
from delaywheel_replica.server.intake.calls import AnswerBounds, GrpcHandlers
from delaywheel_replica.server.intake.reception import Reception
from delaywheel_replica.server.node.calls_to_nodes import CallsToNodes
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import CleanerView, monotonic_ms, wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError
from support.core.values import heartbeat, wheel_heartbeat
from support.server.server_process import config_for
from support.server.views import node_view

A1, B1 = WheelId("a", 1), WheelId("b", 1)
CALLED = CallContext(ANYBODY, "")
THREE = {node: f"disk-{node}" for node in "abc"}


def control_of(**storages: str) -> CleanerStatus:
    """The report of node a's cleaner: wheels of members a, b and c."""
    nodes = {node: NodeRecord(storage, 5) for node, storage in {**THREE, **storages}.items()}
    return CleanerStatus(
        node="a",
        boot="boot",
        pid=1,
        monotonic_ms=monotonic_ms() + 60_000,  # it stays fresh
        wall_ms=0,
        role=Role.LEADING,
        progress=Progress(0, None, {A1: 7, B1: 9}, 0),
        wheels=dict.fromkeys((A1, B1), WheelRecord(THREE, 2, 0)),
        nodes=nodes,
    )


@dataclass
class Place:
    """Node a, which hears b and c; b runs on a new folder.

    Attributes:
        reported: what its cleaner was sent.
        deaf: so many messages its cleaner does not hear.
        secret: what the nodes at these addresses believe other nodes by.
    """

    cleaner: CleanerView = field(default_factory=lambda: CleanerView(control_of()))
    peers: dict[str, Heartbeat] = field(
        default_factory=lambda: {
            "b": heartbeat("b", storage="new"),
            "c": heartbeat("c", wheels={A1: wheel_heartbeat(7), B1: wheel_heartbeat(6)}),
        }
    )
    members: tuple[str, ...] = ("a", "b", "c")
    heard_ago_ms: int = 100
    addresses: dict[str, str] = field(default_factory=dict)
    secret: bytes = b""
    reported: list[NodeStorage | SetBack] = field(default_factory=list)
    deaf: int = 0
    counted: list[tuple[dict[WheelId, tuple[int, int]], int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        view = node_view(self.status, peers=self.states, cleaner=self.cleaner)
        self.other_nodes = CallsToNodes(view)
        self.operator = Operator(
            view,
            self.other_nodes,
            members=self.members,
            send=self.report,
            pending=self.pending,
        )

    def pending(
        self, frames: Mapping[WheelId, tuple[int, int]], done_slot: int
    ) -> dict[WheelId, int]:
        """Counts ten messages in each frame."""
        self.counted.append((dict(frames), done_slot))
        return {wheel: 10 * (last - first + 1) for wheel, (first, last) in frames.items()}

    @property
    def control(self) -> CleanerStatus:
        assert self.cleaner.status is not None
        return self.cleaner.status

    def status(self) -> ServerStatus:
        peers = {
            node: KnownPeer(reported, 50_000 - self.heard_ago_ms)
            for node, reported in self.peers.items()
        }
        return ServerStatus(heartbeat("a", wheels={A1: wheel_heartbeat(7)}), 1, 50_000, peers=peers)

    def states(self) -> dict[str, PeerState]:
        return {
            node: PeerState(
                *(Connection.CONNECTED, 0, "127.0.0.1:1"),
                client_address=address,
                call_secret=self.secret,
            )
            for node, address in self.addresses.items()
        }

    def report(self, message: NodeStorage | SetBack) -> None:
        """The cleaner commits it, unless it is deaf."""
        self.reported.append(message)
        if len(self.reported) <= self.deaf:
            return
        if isinstance(message, SetBack):
            assert self.control.progress is not None
            after = self.control.progress.set_back(wall_ms())
            assert isinstance(after, Progress)
            self.cleaner.status = replace(self.control, progress=after)
        else:
            known = self.control.nodes[message.node]
            record = known.on(message.storage)
            nodes = {**self.control.nodes, message.node: record}
            self.cleaner.status = replace(self.control, nodes=nodes)

    async def replace(
        self, node: str, *, storage: str = "", dry_run: bool = False
    ) -> pb.NodeChange:
        request = pb.ReplaceNodeRequest(node=node, storage=storage, dry_run=dry_run)
        return (await self.operator.ReplaceNode(request, CALLED)).change

    async def set_back(self, set_backs: int, *, dry_run: bool = False) -> pb.SetBackResponse:
        request = pb.SetBackRequest(set_backs=set_backs, dry_run=dry_run)
        return await self.operator.SetBack(request, CALLED)

    async def remove(self, node: str, *, dry_run: bool = False) -> pb.NodeChange:
        request = pb.RemoveNodeRequest(node=node, dry_run=dry_run)
        return (await self.operator.RemoveNode(request, CALLED)).change


def without_b() -> Place:
    """Node b was removed from all nodes' members."""
    place = Place(members=("a", "c"))
    del place.peers["b"]
    return place


REPLACED = pb.NodeChange(
    node="b",
    storage_before="disk-b",
    storage="new",
    wheels=[pb.WheelAtRisk(wheel="a.1", frames=0), pb.WheelAtRisk(wheel="b.1", frames=3)],
)


async def test_a_node_is_replaced_by_the_folder_that_is_heard() -> None:
    place = Place()
    assert await place.replace("b") == REPLACED
    assert place.reported == [NodeStorage("b", "new")]
    assert place.control.nodes["b"] == NodeRecord("new", 5)


async def test_what_is_on_one_node_only_then_is_counted() -> None:
    """Wheel a.1 is closed, and c has not copied it yet."""
    place = Place()
    place.peers["c"] = heartbeat("c")
    closed = WheelRecord({**THREE, "c": "before"}, 2, 0, closed_at=7)
    place.cleaner.status = replace(
        control_of(), wheels={A1: closed}, progress=Progress(5_000, None, {A1: 7}, 0)
    )
    change = await place.replace("b", dry_run=True)
    (row,) = change.wheels
    assert (row.frames, row.alone_messages, row.alone_on) == (0, 70, "a")
    assert place.counted == [({A1: (1, 7)}, 5)]


async def test_it_is_repeated_until_it_is_committed() -> None:
    place = Place(deaf=2)
    assert await place.replace("b", storage="new") == REPLACED
    assert place.reported == [NodeStorage("b", "new")] * 3


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaywheel_replica.server.cluster.operator._WAIT_S", 0.3)


@pytest.mark.usefixtures("_hasty")
async def test_what_is_not_committed_in_time_is_unknown() -> None:
    place = Place(deaf=100)
    assert await refusal_of(place.replace("b")) == Reason.NODE_CHANGE_UNKNOWN


async def test_a_dry_run_reports_the_same_and_changes_nothing() -> None:
    place = Place()
    assert await place.replace("b", dry_run=True) == REPLACED
    assert place.reported == []


async def test_a_leader_that_rests_is_reported_as_well() -> None:
    """It may rest because its own folder is gone."""
    place = Place()
    place.cleaner.status = replace(control_of(a="before"), role=Role.RESTING)
    assert (await place.replace("a")).storage == "disk-a"


async def test_a_node_that_was_taken_out_comes_back() -> None:
    place = Place()
    place.cleaner.status = control_of(b=REMOVED)
    change = await place.replace("b")
    assert (change.storage_before, change.storage, list(change.wheels)) == ("", "new", [])


async def test_a_node_is_removed() -> None:
    place = without_b()
    change = await place.remove("b")
    assert change == pb.NodeChange(node="b", storage_before="disk-b", wheels=REPLACED.wheels)
    assert place.reported == [NodeStorage("b", REMOVED)]


async def test_a_node_that_is_removed_already_stays_so() -> None:
    place = without_b()
    await place.remove("b")
    assert await place.remove("b") == pb.NodeChange(node="b")
    assert len(place.reported) == 1


async def refusal_of(work: object) -> Reason:
    with pytest.raises(RequestRefusedError) as caught:
        await work  # type: ignore[misc]
    return caught.value.refusal.reason


@pytest.mark.parametrize(
    ("made", "node", "storage", "reason"),
    [
        (Place, "d", "", Reason.NODE_UNKNOWN),
        (Place, "c", "", Reason.NOTHING_TO_REPLACE),
        (Place, "a", "", Reason.NOTHING_TO_REPLACE),
        (Place, "b", "newer", Reason.NODE_NOT_HEARD),
        (lambda: Place(heard_ago_ms=5_000), "b", "new", Reason.NODE_NOT_HEARD),
        (without_b, "b", "new", Reason.NODE_NOT_HEARD),
        (lambda: Place(members=("a", "b", "c", "d")), "d", "", Reason.NOTHING_TO_REPLACE),
        (
            lambda: Place(peers={"b": heartbeat("b", storage=ROLLED_BACK)}),
            "b",
            "",
            Reason.STORAGE_ROLLED_BACK,
        ),
    ],
    ids=["unknown", "same", "own", "another", "silent", "no member", "never registered", "older"],
)
async def test_replacing_is_refused(
    made: Callable[[], Place], node: str, storage: str, reason: Reason
) -> None:
    place = made()
    assert await refusal_of(place.replace(node, storage=storage)) == reason
    assert place.reported == []


@pytest.mark.parametrize(
    ("made", "node", "reason"),
    [
        (without_b, "d", Reason.NODE_UNKNOWN),
        (without_b, "a", Reason.NODE_LEADS),
        (Place, "b", Reason.NODE_IN_USE),
        (lambda: Place(heard_ago_ms=5_000), "b", Reason.NODE_IN_USE),
    ],
    ids=["unknown", "leader", "member", "silent member"],
)
async def test_removing_is_refused(made: Callable[[], Place], node: str, reason: Reason) -> None:
    place = made()
    assert await refusal_of(place.remove(node, dry_run=True)) == reason
    assert await refusal_of(place.remove(node)) == reason
    assert place.reported == []


async def test_two_words_about_one_node_wait_for_each_other() -> None:
    place = Place(deaf=3)
    first = asyncio.create_task(place.replace("b"))
    second = asyncio.create_task(place.replace("b"))
    assert await first == REPLACED
    assert await refusal_of(second) == Reason.NOTHING_TO_REPLACE


# --- a clock that was ahead

HOUR_MS = 3_600_000


def ahead(set_backs: int = 0, ahead_ms: int = HOUR_MS, **place: Any) -> Place:
    """The leader rests: w is that far ahead of its clock, and was set back before."""
    progress = Progress(wall_ms() + ahead_ms, None, {A1: 7}, floor=40, set_backs=set_backs)
    status = replace(control_of(), role=Role.RESTING, progress=progress)
    return Place(cleaner=CleanerView(status), **place)


async def test_w_is_set_back_to_the_clock() -> None:
    place = ahead()
    before = place.control.progress
    assert before is not None
    reported = await place.set_back(0)
    assert place.reported == [SetBack(0)]
    after = place.control.progress
    assert after is not None
    assert after.set_backs == 1
    assert reported == pb.SetBackResponse(
        node="a",
        set_backs=0,
        forwarded_to_ms=before.due_ms,
        goes_on_from_ms=after.due_ms,
        floor=40,
    )
    assert abs(reported.goes_on_from_ms - wall_ms()) < 60_000


async def test_a_dry_run_reports_what_setting_back_would_mean() -> None:
    place = ahead(set_backs=3)
    reported = await place.set_back(0, dry_run=True)
    assert (reported.set_backs, reported.floor) == (3, 40)
    assert HOUR_MS - 60_000 < reported.forwarded_to_ms - reported.goes_on_from_ms <= HOUR_MS
    assert place.reported == []


async def test_setting_back_is_repeated_until_it_is_committed() -> None:
    place = ahead(deaf=2)
    await place.set_back(0)
    assert place.reported == [SetBack(0)] * 3


async def test_who_repeats_the_call_gets_the_same_answer() -> None:
    place = ahead(set_backs=3)
    assert await place.set_back(3) == await place.set_back(3)
    assert place.reported == [SetBack(3)]


async def test_of_two_calls_at_once_one_is_carried_out() -> None:
    place = ahead(deaf=3)
    first, second = await asyncio.gather(place.set_back(0), place.set_back(0))
    assert first == second
    assert place.reported == [SetBack(0)] * 4


@pytest.mark.parametrize(
    ("made", "set_backs", "reason"),
    [
        (Place, 0, Reason.NOTHING_TO_SET_BACK),
        (lambda: ahead(ahead_ms=-1), 0, Reason.NOTHING_TO_SET_BACK),
        (ahead, 1, Reason.NOTHING_TO_SET_BACK),
        (lambda: ahead(ahead_ms=700, deaf=100), 0, Reason.NOTHING_TO_SET_BACK),
    ],
    ids=["long past", "just past", "never so often", "past meanwhile"],
)
async def test_setting_back_is_refused(
    made: Callable[[], Place], set_backs: int, reason: Reason
) -> None:
    assert await refusal_of(made().set_back(set_backs)) == reason


@pytest.mark.usefixtures("_hasty")
async def test_what_is_not_set_back_in_time_is_unknown() -> None:
    assert await refusal_of(ahead(deaf=100).set_back(0)) == Reason.SET_BACK_UNKNOWN


async def test_it_is_not_set_back_without_end() -> None:
    place = ahead()
    for set_backs in range(MOST_AHEAD):
        await place.set_back(set_backs)
        assert place.control.progress is not None
        progress = replace(place.control.progress, due_ms=wall_ms() + 600_000 - set_backs)
        place.cleaner.status = replace(place.control, progress=progress)
    assert await refusal_of(place.set_back(MOST_AHEAD)) == Reason.SET_BACK_TOO_OFTEN


def why_no_wheel(
    cleaner: CleanerStatus | None, node: str, storage: str, *, heard: str = "abc"
) -> str:
    return wheel_refusal(cleaner, node, storage, members="abc", heard=heard)


def test_a_node_says_itself_that_its_folder_is_not_the_one() -> None:
    assert why_no_wheel(None, "b", "new") == ""
    assert why_no_wheel(control_of(), "b", "disk-b") == ""
    assert why_no_wheel(control_of(), "d", "disk-d") == ""
    assert why_no_wheel(None, "b", ROLLED_BACK).startswith("STORAGE_ROLLED_BACK: ")
    reported = why_no_wheel(control_of(), "b", "new")
    assert reported.startswith(
        "STORAGE_REPLACED: node b runs on storage new, but is registered with"
    )
    assert "disk-b" in reported
    assert "delaywheel node replace b" in reported
    assert "taken out" in why_no_wheel(control_of(b=REMOVED), "b", "disk-b")


def test_a_node_says_itself_which_one_was_never_heard() -> None:
    first = replace(control_of(), nodes={}, wheels={}, control_offset=4)
    assert why_no_wheel(first, "b", "disk-b", heard="ab").startswith(
        "NEVER_HEARD: no node gets a wheel until each was heard once, and c never was."
    )
    assert why_no_wheel(first, "b", "disk-b", heard="abc") == ""
    assert why_no_wheel(replace(first, control_offset=-1), "b", "disk-b", heard="b") == ""
    # One that is away is waited for no more: its folder is known.
    assert why_no_wheel(replace(control_of(), control_offset=4), "b", "disk-b", heard="ab") == ""


def test_a_node_says_itself_that_it_has_too_many_wheels() -> None:
    record = WheelRecord({"b": "disk-b"}, 1, 0)
    for count, starts in ((299, ""), (300, "TOO_MANY_WHEELS: node b has 300 wheels")):
        wheels = {WheelId("b", number): record for number in range(1, count + 1)}
        reported = why_no_wheel(replace(control_of(), wheels=wheels), "b", "disk-b")
        assert reported.startswith(starts)
        assert bool(reported) == bool(starts)


# --- at another node


@dataclass
class Site:
    """Node b, the leader's, with its port; and node a, which hears it."""

    leader: Place
    place: Place
    counts: NodeCounts


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    leader, counts = Place(), NodeCounts()
    server = grpc.aio.server()
    answers = AnswerBounds(Admission(max_bytes=1 << 20, max_caller_bytes=1 << 20), lambda _: 1)
    access = Access(config_for(tmp_path))
    calls = GrpcHandlers(Reception(), counts, answers, access)
    described = pb.DESCRIPTOR.services_by_name["DelayWheelAdmin"]
    handlers = calls.of_service(described, leader.operator, {})
    server.add_registered_method_handlers(described.full_name, handlers)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    place = Place(addresses={"b": address}, secret=access.call_secret)
    place.peers["b"] = replace(place.peers["b"], term=LeaderTerm(7))
    place.cleaner.status = replace(control_of(), role=Role.STANDBY)
    yield Site(leader, place, counts)
    await place.other_nodes.close()
    await server.stop(0)


async def test_a_call_is_passed_on_to_the_leaders_node(site: Site) -> None:
    assert await site.place.replace("b", dry_run=True) == REPLACED
    assert await site.place.replace("b", storage="new") == REPLACED
    assert site.leader.reported == [NodeStorage("b", "new")]
    assert site.place.reported == []


async def test_setting_back_is_passed_on_to_the_leaders_node(site: Site) -> None:
    site.leader.cleaner.status = ahead().control
    assert (await site.place.set_back(0)).node == "a"
    assert site.leader.reported == [SetBack(0)]
    assert site.place.reported == []
    site.place.addresses["b"] = "127.0.0.1:1"
    assert await refusal_of(site.place.set_back(0)) == Reason.SET_BACK_UNKNOWN


async def test_the_leaders_words_are_the_answer(site: Site) -> None:
    with pytest.raises(RequestRefusedError) as caught:
        await site.place.remove("c")
    assert caught.value.refusal == Refusal(
        Reason.NODE_IN_USE, "The leader's node: Node c is among the leader's members"
    )
    assert site.counts.refused_calls["RemoveNode", Reason.NODE_IN_USE] == 1


async def test_it_is_passed_on_once(site: Site) -> None:
    site.leader.cleaner.status = replace(control_of(), role=Role.STANDBY)
    site.leader.addresses = site.place.addresses
    site.leader.peers = site.place.peers
    assert await refusal_of(site.place.remove("c")) == Reason.NO_LEADER
    assert site.counts.refused_calls["RemoveNode", Reason.NO_LEADER] == 1


async def test_without_a_leader_it_is_refused(site: Site) -> None:
    site.place.peers["b"] = heartbeat("b", storage="new")
    assert await refusal_of(site.place.replace("b")) == Reason.NO_LEADER


async def test_an_answer_that_was_lost_may_have_been_done(site: Site) -> None:
    site.place.addresses["b"] = "127.0.0.1:1"
    assert await refusal_of(site.place.replace("b")) == Reason.NODE_CHANGE_UNKNOWN
