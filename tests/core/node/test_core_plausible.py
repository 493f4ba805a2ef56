"""Implausible messages of peers raise only their name, and delete nothing."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.frames.bundle import FrameCopy
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import GONE_ROW, HOLE_ROW
from delaywheel.storage.frames.rows import index_row as row_of
from delaywheel_replica.core.node.events import (
    CloseWheel,
    DeleteWheel,
    LeaveWheel,
    Mirror,
    Send,
    Sweep,
)
from delaywheel_replica.core.node.plausible import check, tempered
from delaywheel_replica.core.protocol.codec import MOST, MalformedError, to_json
from delaywheel_replica.core.protocol.heartbeat import (
    Fence,
    Heard,
    Heartbeat,
    LeaderTerm,
    Promise,
    WheelHeartbeat,
)
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Fetch,
    Frames,
    Gossip,
    Lacks,
    PeerMessage,
    PrevoteRequest,
    Refused,
    Vote,
    WheelCard,
)
from delaywheel_replica.core.protocol.progress import Position, Reached
from delaywheel_replica.peers.encoding import AccessDigest, decode, encode
from support.core.member_talk import heartbeat_of, wheel_heartbeat
from support.core.member_world import (
    WALL_MS,
    FakeCluster,
    FakeNode,
    disk_of,
    held_of,
    record_of,
)
from support.wheels.copies import bundled, copy_of

A1, B1, B2, X1 = WheelId("a", 1), WheelId("b", 1), WheelId("b", 2), WheelId("x", 1)
CARD = held_of(B1, 0).card
FIRST = {WheelId(node, number): record_of() for node in "abc" for number in (1, 2)}
LATE_WINDOW_S = 120
NOW_SLOT = WALL_MS // 1000
HUGE = 1 << 62


def index_row(slot: int) -> bytes:
    return row_of(slot, 0, 8, 1, kind=Kind.MESSAGES)


def of_b(**values: Any) -> Gossip:
    return Gossip(heartbeat_of("b", **values))


def heard(sender: str, message: PeerMessage) -> PeerMessage:
    """What another node hears of it, if anything."""
    read = decode(encode(message))
    assert not isinstance(read, AccessDigest)
    check(sender, read)
    return read


def frames_with(
    card: WheelCard = CARD, *, request: int = 0, seqs: tuple[int, ...] = (1,)
) -> Frames:
    return Frames(card, bundled([copy_of(seq, b"x") for seq in seqs]), request)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (Gossip(heartbeat_of("c")), "as b's own"),
        (of_b(control_version=0), "control_version"),
        (of_b(last_number=10**18), "last_number"),
        (of_b(open=B2, last_number=1), "was given 1"),
        (of_b(open=A1), "names a.1"),
        (of_b(wall_ms=-1), "wall_ms"),
        (of_b(floor=HUGE), "floor"),
        (of_b(reached=Reached(HUGE, 0, None)), "reached: set_backs"),
        (of_b(reached=Reached(0, HUGE, None)), "reached: due_ms"),
        (of_b(reached=Reached(0, 0, Position(B1, HUGE, 1))), "position: seq"),
        (of_b(reached=Reached(0, 0, Position(B1, 1, HUGE))), "position: row"),
        (of_b(storage="x" * 300), "storage"),
        (of_b(heard={"": Heard("boot", 0)}), "node id"),
        (of_b(wheels={B1: wheel_heartbeat(HUGE)}), "numbers that no wheel has"),
        (of_b(wheels={B1: wheel_heartbeat(1, top_slot=1 << 32)}), "numbers that no wheel has"),
        (of_b(wheels={B1: wheel_heartbeat(1, missing=SeqSet.of([2]))}), "missing"),
        (of_b(wheels={B1: wheel_heartbeat(9, missing=SeqSet.of([0, 3]))}), "missing"),
        (of_b(wheels={B1: wheel_heartbeat(999, missing=SeqSet.of(range(1, 200, 2)))}), "missing"),
        (of_b(term=LeaderTerm(1, (Fence("b", 10**18),))), "fences: upto"),
        (of_b(term=LeaderTerm(1, (), {B1: HUGE})), "limits"),
        (Gossip(heartbeat_of("b"), (heartbeat_of("c", floor=HUGE),)), "floor"),
        (frames_with(replace(CARD, wheel=X1)), "not its own"),
        (frames_with(replace(CARD, min_insync=4)), "4 of 3 members"),
        (frames_with(replace(CARD, min_insync=0)), "min_insync"),
        (frames_with(replace(CARD, members={})), "0 members"),
        (frames_with(replace(CARD, members={"NO": "disk"})), "node id"),
        (frames_with(replace(CARD, span_seconds=0)), "span"),
        (frames_with(replace(CARD, span_seconds=HUGE)), "span"),
        (frames_with(seqs=(0,)), "do not ascend"),
        (frames_with(seqs=(2, 2)), "do not ascend"),
        (frames_with(seqs=(HUGE,)), "do not ascend"),
        (Fetch(0, B1, 1, 9), "request"),
        (Fetch(1, B1, 0, 9), "first_seq"),
        (Fetch(1, B1, 9, 8), "from 9 to 8"),
        (Lacks(1, B1, "disk-b", 0, 9), "first_seq"),
        (Lacks(1, B1, "disk-b", 9, 8), "from 9 to 8"),
        (Lacks(1, B1, "disk-b", 9, HUGE), "last_seq"),
        (Refused("a", 0), "upto"),
        (Applied(B1, "disk-b", "x" * 300, 1), "boot"),
        (Applied(B1, "disk-b", "boot-b", HUGE), "prefix"),
        (Promise("c", "disk-c", Fence("b", 1)), "as b's own"),
        (Promise("b", "disk-b", Fence("a", 1), {B1: 4}), "of others' wheels"),
        (Promise("b", "disk-b", Fence("a", 1), {A1: HUGE}), "applied"),
        (PrevoteRequest(1, HUGE), "silence"),
        (Vote(HUGE), "round"),
    ],
)
def test_what_no_node_can_mean_is_named(message: PeerMessage, named: str) -> None:
    with pytest.raises(MalformedError, match=named):
        heard("b", message)


def test_what_nodes_say_passes() -> None:
    world = FakeCluster()
    world.run(200)
    world.register(FIRST)
    for name in "abc":
        world[name].write(3)
    seen = set()
    for _ in range(5):
        for node in world.nodes.values():
            node.tick()
        world.collect()
        while world.messages:
            sender, _, message = world.messages[0]
            assert heard(sender, message) == message
            seen.add(type(message))
            world.deliver()
    assert {Gossip, Frames, Applied} <= seen


def test_a_seal_or_floor_from_the_future_says_what_can_be_said_by_now() -> None:
    seal = wheel_heartbeat(7, seal_slot=10_000, seal_seq=5)
    heartbeat = heartbeat_of(
        "b", floor=20_000, wheels={B1: seal, B2: wheel_heartbeat(1, seal_slot=8)}
    )
    assert tempered(heartbeat, 9_000) == replace(
        heartbeat, floor=9_000, wheels={**heartbeat.wheels, B1: replace(seal, seal_slot=9_000)}
    )
    assert tempered(heartbeat, 20_000) is heartbeat


def registered() -> FakeNode:
    """A node among three, with wheels of all and frames of b's."""
    world = FakeCluster()
    world.run(200)
    world.register(FIRST)
    world.run(200)
    for name in "abc":
        world[name].write(3)
    world.run(300)
    node = world["a"]
    assert node.store.frames[B1].keys() == {1, 2, 3}
    node.take_sent()
    node.done.clear()
    return node


@pytest.mark.parametrize("floor", [MOST, NOW_SLOT - LATE_WINDOW_S, 1])
def test_no_floor_that_a_peer_reports_deletes_anything(floor: int) -> None:
    node = registered()
    for name, others in (("b", "c"), ("c", "b")):
        heartbeats = (heartbeat_of(others, count=1_000, floor=floor),)
        node.receive(name, Gossip(heartbeat_of(name, count=2_000, floor=floor), heartbeats))
    node.tick()
    assert not [effect for effect in node.done if isinstance(effect, Sweep | DeleteWheel)]
    status = node.status()
    assert status.heartbeat.floor is None
    now_slot = node.wall_ms // 1000
    assert all((known.heartbeat.floor or 0) < now_slot for known in status.peers.values())


def test_fences_for_wheels_that_nobody_knows_are_not_promised() -> None:
    node = registered()
    fences = tuple(Fence(origin, 1_000) for origin in ("a", "b", "x"))
    node.receive("c", Gossip(heartbeat_of("c", count=2_000, term=LeaderTerm(9, fences))))
    node.tick()
    assert node.store.state.fenced == {}
    assert not [effect for effect in node.done if isinstance(effect, LeaveWheel)]


def test_a_refusal_binds_the_wheels_that_this_node_was_given_and_no_later_ones() -> None:
    node = registered()
    node.receive("b", Refused("a", 1_000))
    assert node.store.state.fenced == {"a": 2}
    assert node.store.state.last_number == 2


def test_a_wheel_of_an_unknown_node_is_not_taken_as_the_answer_to_a_fetch() -> None:
    node = registered()
    card = replace(CARD, wheel=X1)
    effects = node.receive("b", frames_with(card, request=1))
    assert effects == []
    assert X1 not in node.store.frames


@pytest.mark.parametrize(
    "changes",
    [
        {"members": {"a": disk_of("a"), "b": disk_of("b")}},
        {"min_insync": 1},
    ],
)
@pytest.mark.parametrize("request_number", [0, 1])
def test_frames_with_a_card_that_is_not_the_wheels_are_not_taken(
    changes: dict[str, Any], request_number: int
) -> None:
    node = registered()
    card = replace(CARD, **changes)
    effects = node.receive("b", frames_with(card, request=request_number, seqs=(4,)))
    assert not [effect for effect in effects if isinstance(effect, Mirror | Send)]


@pytest.mark.parametrize(
    ("slot", "content", "is_taken"),
    [
        (NOW_SLOT, b"8 bytes.", True),
        (NOW_SLOT, b"", False),
        (NOW_SLOT - LATE_WINDOW_S - 1, b"", False),
        (NOW_SLOT + 7_200 + 80_000, b"8 bytes.", True),
        (NOW_SLOT + 7_200 + 90_000, b"8 bytes.", False),
        (0xFFFF_FFFF, b"", False),
    ],
)
def test_frames_of_seconds_that_cannot_be_are_not_taken(
    slot: int, content: bytes, *, is_taken: bool
) -> None:
    node = registered()
    frame = FrameCopy(4, index_row(slot), content)
    effects = node.receive("b", Frames(CARD, bundled([frame])))
    assert is_taken == any(isinstance(effect, Mirror) for effect in effects)


def test_holes_and_rows_of_deleted_segments_have_no_second() -> None:
    node = registered()
    frames = bundled([FrameCopy(4, HOLE_ROW, b""), FrameCopy(5, GONE_ROW, b"")])
    (mirror, *_) = (e for e in node.receive("b", Frames(CARD, frames)) if isinstance(e, Mirror))
    assert mirror.frames == frames


def test_what_is_finished_here_may_come_without_content_whatever_the_clock() -> None:
    node = registered()
    node.cleaner_reports(node.cleaner(FIRST, floor=NOW_SLOT + 50))
    frame = FrameCopy(4, index_row(NOW_SLOT + 49), b"")
    assert any(isinstance(e, Mirror) for e in node.receive("b", Frames(CARD, bundled([frame]))))


# --- any message: of each field mostly what a node says, and now and then what none can mean


def mostly(*usual: Any, odd: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from([*usual * (1 + 4 * len(odd) // len(usual)), *odd])


numbers = mostly(1, 2, 3, 4, odd=(0, 5, 9, NOW_SLOT, MOST, HUGE))
slots = mostly(0, 1, NOW_SLOT - 999, odd=(-1, NOW_SLOT, (1 << 32) - 1, 1 << 32, MOST, HUGE))
nodes = mostly("a", "b", "c", odd=("x", "", "NO"))
wheels = st.builds(WheelId, mostly("b", odd=("a", "c", "x")), mostly(1, 2, odd=(3, 10**17)))
disks = mostly(disk_of("a"), disk_of("b"), disk_of("c"), odd=("other",))
boots = mostly("boot-a", "boot-b", "boot-c", odd=("other",))
wheel_beats = st.builds(
    WheelHeartbeat,
    numbers,
    numbers,
    slots,
    numbers,
    numbers,
    slots,
    mostly(NO_SEQS, odd=(SeqSet.of([2]), SeqSet([(1, HUGE)]))),
)
fences = st.builds(Fence, nodes, numbers)
terms = st.builds(
    LeaderTerm,
    numbers,
    st.lists(fences, max_size=2).map(tuple),
    st.dictionaries(wheels, numbers, max_size=2),
)


def heartbeats_of(node: str) -> st.SearchStrategy[Heartbeat]:
    own = st.builds(WheelId, st.just(node), mostly(1, 2, odd=(3,)))
    return st.builds(
        Heartbeat,
        node=mostly(node, odd=("a", "x")),
        storage=disks,
        boot=boots,
        wall_ms=mostly(WALL_MS, odd=(-1, 0, HUGE)),
        open=st.none() | own,
        spare=st.none() | own,
        last_number=mostly(2, odd=(0, 3, HUGE)),
        draining=st.booleans(),
        complete=st.booleans(),
        wheels=st.dictionaries(wheels, wheel_beats, max_size=2),
        start=numbers,
        count=mostly(1_000, 2_000, odd=(0, HUGE)),
        floor=st.none() | slots,
        term=st.none() | terms,
        heard=st.dictionaries(nodes, st.builds(Heard, boots, numbers), max_size=1),
    )


cards = st.builds(
    WheelCard,
    wheels,
    mostly(CARD.members, odd=({}, {"a": disk_of("a")}, {"x": "disk", "a": disk_of("a")})),
    mostly(2, odd=(0, 1, 3)),
    mostly(7_200, odd=(0, HUGE)),
)
filled = st.builds(
    FrameCopy,
    seq=mostly(1, 4, 5, odd=(0, HUGE)),
    row=st.sampled_from([index_row(1), index_row(NOW_SLOT), index_row(0xFFFF_FFFF)]),
    content=st.sampled_from([b"", b"8 bytes."]),
)
holes = st.builds(
    FrameCopy, seq=mostly(1, 4, 5, odd=(0,)), row=st.just(HOLE_ROW), content=st.just(b"")
)
lists = st.lists(filled | holes, max_size=3, unique_by=lambda copy: copy.seq).map(
    lambda found: bundled(sorted(found))
)


def of_peer(name: str) -> st.SearchStrategy[tuple[str, PeerMessage]]:
    others = heartbeats_of("c" if name == "b" else "b")
    gossips = st.builds(Gossip, heartbeats_of(name), st.lists(others, max_size=1).map(tuple))
    return st.tuples(st.just(name), st.one_of(gossips, gossips, hostile))


hostile: st.SearchStrategy[PeerMessage] = st.one_of(
    st.builds(Frames, cards, lists, mostly(0, 1, odd=(HUGE,))),
    st.builds(Applied, wheels, disks, boots, numbers),
    st.builds(Refused, nodes, numbers),
    st.builds(Fetch, numbers, wheels, numbers, numbers),
    st.builds(Lacks, numbers, wheels, disks, numbers, numbers),
    st.builds(
        Promise,
        nodes,
        disks,
        fences,
        st.dictionaries(wheels, numbers, max_size=2),
        st.frozensets(wheels, max_size=2),
        st.booleans(),
    ),
    st.builds(PrevoteRequest, numbers, numbers),
    st.builds(Vote, numbers),
)


@given(st.lists(of_peer("b") | of_peer("c"), min_size=1, max_size=8))
def test_whatever_peers_say_nothing_is_raised_nor_deleted_nor_sent_to_strangers(
    reported: list[tuple[str, PeerMessage]],
) -> None:
    node = registered()
    before = {wheel: dict(frames) for wheel, frames in node.store.frames.items()}
    for sender, message in reported:
        try:
            read = heard(sender, message)
        except ValueError:  # malformed, or with a number that cannot even be sent
            continue
        node.receive(sender, read)
        node.tick()
    node.tick(1_000)
    assert not [e for e in node.done if isinstance(e, Sweep | DeleteWheel | CloseWheel)]
    for wheel, frames in before.items():
        assert frames.items() <= node.store.frames[wheel].items()
    assert {effect.peer for effect in node.done if isinstance(effect, Send)} <= {"b", "c"}
    assert to_json(node.status())
