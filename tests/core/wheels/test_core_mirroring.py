"""How a member handles frames of a wheel that it does not write."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.folder.node_state import NodeState
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel_replica.core.node.events import HeldWheel
from delaywheel_replica.core.protocol.messages import Frames, WheelCard
from delaywheel_replica.core.wheels.fencing import Fencing
from delaywheel_replica.core.wheels.mirrors import MirrorVerdict, judge
from support.wheels.copies import bundled, copy_of

A2 = WheelId("a", 2)
CARD = WheelCard(A2, {"a": "disk-a", "b": "disk-b"}, 2, 7200)
PUSHED, FETCHED = 0, 9


def frames_of(seqs: Sequence[int], request: int) -> Frames:
    return Frames(CARD, bundled([copy_of(seq, b"%d" % seq) for seq in seqs]), request)


def judged(
    seqs: Sequence[int],
    request: int = PUSHED,
    *,
    applied: int | None = 0,
    missing: tuple[int, ...] = (),
    storage: str = "disk-b",
    node: str = "b",
    own_open: WheelId | None = None,
    fenced_upto: int = 0,
    limit: int | None = None,
    closed_at: int | None = None,
) -> MirrorVerdict:
    held = None if applied is None else HeldWheel(CARD, applied, 0, SeqSet.of(missing))
    promises = Fencing()
    promises.limited({} if limit is None else {CARD.wheel: limit})
    state = NodeState(node, "test", storage, "boot", fenced={A2.node: fenced_upto})
    return judge(
        frames_of(seqs, request),
        held,
        is_holder=CARD.members.get(node) == storage,
        own_open=own_open,
        limit=promises.limit(CARD.wheel, state),
        closed_at=closed_at,
    )


def seqs_of(frames: FrameBundle) -> list[int]:
    return frames.seqs.tolist()  # type: ignore[no-any-return]  # numpy's stubs


@pytest.mark.parametrize("applied", [None, 0])
@pytest.mark.parametrize("request_number", [PUSHED, FETCHED])
def test_the_first_frames_are_taken_as_they_are(applied: int | None, request_number: int) -> None:
    verdict = judged([1, 2], request_number, applied=applied)
    assert verdict == MirrorVerdict(mirror=frames_of([1, 2], PUSHED).frames)


def test_what_is_held_is_passed_over_and_what_follows_is_taken() -> None:
    assert judged([2, 3, 4, 5], applied=3) == MirrorVerdict(mirror=frames_of([4, 5], PUSHED).frames)


@pytest.mark.parametrize(("request_number", "answer"), [(PUSHED, True), (FETCHED, False)])
@pytest.mark.parametrize("seqs", [[5, 6], [1, 2], []])
def test_an_origin_that_pushes_for_nothing_hears_what_is_held(
    seqs: list[int], request_number: int, answer: bool
) -> None:
    """Frames after a gap, held already, or none."""
    assert judged(seqs, request_number, applied=3) == MirrorVerdict(answer=answer)


def test_what_comes_behind_a_gap_within_a_message_is_dropped() -> None:
    assert seqs_of(judged([4, 6, 7], applied=3).mirror) == [4]


def test_missing_frames_are_put_in_their_places() -> None:
    verdict = judged([1, 2, 3, 4, 5], applied=4, missing=(2, 4))
    assert seqs_of(verdict.repair) == [2, 4]
    assert seqs_of(verdict.mirror) == [5]


# --- nodes that may not take


@pytest.mark.parametrize("request_number", [PUSHED, FETCHED])
def test_the_wheel_in_hand_takes_nothing(request_number: int) -> None:
    assert judged([1], request_number, node="a", storage="disk-a", own_open=A2) == MirrorVerdict()


def test_an_own_wheel_that_was_left_takes_what_it_lacks() -> None:
    own = judged(
        [3, 4],
        FETCHED,
        node="a",
        storage="disk-a",
        own_open=WheelId("a", 3),
        applied=3,
        missing=(3,),
    )
    assert (seqs_of(own.repair), seqs_of(own.mirror)) == ([3], [4])


@pytest.mark.parametrize(("node", "storage"), [("b", "new"), ("c", "disk-c"), ("c", "disk-b")])
def test_who_is_no_member_takes_nothing_and_says_nothing(node: str, storage: str) -> None:
    assert judged([1], node=node, storage=storage) == MirrorVerdict()


# --- promises and ends


@pytest.mark.parametrize("fenced_upto", [2, 3])
@pytest.mark.parametrize(("request_number", "refused"), [(PUSHED, True), (FETCHED, False)])
def test_what_is_promised_away_is_taken_from_nobody(
    fenced_upto: int, request_number: int, refused: bool
) -> None:
    verdict = judged([4, 5], request_number, applied=3, fenced_upto=fenced_upto)
    assert verdict == MirrorVerdict(refused=refused)


def test_a_promise_about_an_earlier_wheel_is_none_about_this_one() -> None:
    assert seqs_of(judged([4], applied=3, fenced_upto=1).mirror) == [4]


@pytest.mark.parametrize(("request_number", "refused"), [(PUSHED, True), (FETCHED, False)])
def test_a_fill_is_taken_and_no_more(request_number: int, refused: bool) -> None:
    verdict = judged([4, 5, 6], request_number, applied=3, fenced_upto=2, limit=5)
    assert verdict == MirrorVerdict(mirror=frames_of([4, 5], PUSHED).frames, refused=refused)


def test_a_fill_within_what_is_promised_away_is_not_refused() -> None:
    assert not judged([4, 5], applied=3, fenced_upto=2, limit=5).refused


def test_a_fill_of_a_wheel_that_is_not_promised_away_limits_nothing() -> None:
    assert seqs_of(judged([4, 5], applied=3, limit=4).mirror) == [4, 5]


@pytest.mark.parametrize("fenced_upto", [0, 2])
@pytest.mark.parametrize(("request_number", "refused"), [(PUSHED, True), (FETCHED, False)])
def test_a_closed_wheel_is_taken_to_its_end(
    fenced_upto: int, request_number: int, refused: bool
) -> None:
    """Whatever was promised, and whatever a leader requested before."""
    verdict = judged(
        [4, 5, 6], request_number, applied=3, fenced_upto=fenced_upto, limit=9, closed_at=5
    )
    assert verdict == MirrorVerdict(mirror=frames_of([4, 5], PUSHED).frames, refused=refused)


def test_what_was_held_before_the_promise_may_be_repaired() -> None:
    verdict = judged([2, 4], FETCHED, applied=3, missing=(2,), fenced_upto=2)
    assert verdict == MirrorVerdict(repair=frames_of([2], FETCHED).frames)


def test_nothing_beyond_the_end_is_repaired() -> None:
    verdict = judged([2, 3], FETCHED, applied=3, missing=(2, 3), closed_at=2)
    assert seqs_of(verdict.repair) == [2]


# --- against a member that looks at one frame at a time

seq_sets = st.sets(st.integers(1, 9))


@given(
    seqs=seq_sets,
    applied=st.integers(0, 7),
    missing=seq_sets,
    fenced=st.booleans(),
    limit=st.none() | st.integers(0, 9),
    closed_at=st.none() | st.integers(0, 9),
    pushed=st.booleans(),
)
def test_frames_one_by_one(
    seqs: set[int],
    applied: int,
    missing: set[int],
    fenced: bool,
    limit: int | None,
    closed_at: int | None,
    pushed: bool,
) -> None:
    missing = {seq for seq in missing if seq <= applied}
    verdict = judged(
        sorted(seqs),
        PUSHED if pushed else FETCHED,
        applied=applied,
        missing=tuple(sorted(missing)),
        fenced_upto=2 if fenced else 1,
        limit=limit,
        closed_at=closed_at,
    )
    rows, held, refused = applied, set(range(1, applied + 1)) - missing, False
    for seq in sorted(seqs):
        is_free = closed_at is None and not fenced
        is_allowed = is_free or seq <= (limit or 0 if closed_at is None else closed_at)
        refused |= pushed and not is_allowed
        is_hole = seq in missing and (closed_at is None or seq <= closed_at)
        if is_hole or (is_allowed and seq == rows + 1):
            held.add(seq)
            rows = max(rows, seq)
    before = set(range(1, applied + 1)) - missing
    taken = seqs_of(verdict.mirror) + seqs_of(verdict.repair)
    assert before.isdisjoint(taken)
    assert before.union(taken) == held
    assert seqs_of(verdict.mirror) == list(range(applied + 1, rows + 1))
    assert verdict.refused == refused
    assert verdict.answer == (pushed and not taken and not refused)
