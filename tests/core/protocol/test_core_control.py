import json
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.codec import to_json
from delaywheel_replica.core.protocol.control import (
    CONTROL_VERSION,
    NEEDS_KEY,
    OPENING,
    ControlRecord,
    ControlRecordMalformedError,
    ControlState,
    Leader,
    NodeRecord,
    WheelRecord,
    leader_record,
    lost_record,
    lost_records,
    needs_record,
    node_record,
    progress_record,
    required_answers,
    reschedule_record,
    unregister_records,
    wheel_record,
)
from delaywheel_replica.core.protocol.frames import FrameRange, FrameSet
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule
from support.core.values import (
    node_ids,
    progresses,
    seqs,
    wheel_ids,
    wheel_record_of,
    wheel_records,
)

A1 = WheelId("a", 1)


@given(progresses, node_ids, wheel_ids, wheel_records, seqs)
def test_every_record_is_read_back(
    progress: Progress, node: str, wheel: WheelId, record: WheelRecord, number: int
) -> None:
    records: list[ControlRecord] = [
        leader_record(0, node, "token"),
        node_record(node, NodeRecord("disk", number)),
        wheel_record(wheel, record),
        lost_record(FrameRange(wheel, 3, 5)),
        progress_record(progress),
    ]
    state = ControlState().apply_all(records)
    assert state.progress == progress
    assert state.nodes == {node: NodeRecord("disk", number)}
    assert state.wheels == {wheel: record}
    assert state.lost == {(wheel, 3), (wheel, 4), (wheel, 5)}


@given(st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(1, 9))), wheel_ids)
def test_of_many_records_of_a_message_the_last_one_stands(
    history: list[tuple[int, int | None]], wheel: WheelId
) -> None:
    records: list[ControlRecord] = []
    standing: dict[MessageKey, Reschedule] = {}
    for number, to_ms in history:
        key = MessageKey(bytes([number] * 16), 100, "orders")
        if number == 3:  # between them
            records.append(OPENING)
            continue
        standing.pop(key, None)
        if to_ms is not None:
            standing[key] = Reschedule(to_ms, Position(wheel, 1, 0))
        records.append(reschedule_record(key, standing.get(key)))
    assert [*ControlState().apply_all(records).reschedules.items()] == [*standing.items()]


def test_the_first_close_counts() -> None:
    state = ControlState().apply_all(
        [
            wheel_record(A1, wheel_record_of(closed_at=7)),
            wheel_record(A1, wheel_record_of(closed_at=9)),
            wheel_record(A1, wheel_record_of()),
        ]
    )
    assert state.wheels[A1].closed_at == 7


def test_unregistering_removes_the_wheel_and_its_lost_frames() -> None:
    other = WheelId("b", 1)
    state = ControlState().apply_all(
        [
            wheel_record(A1, wheel_record_of()),
            wheel_record(other, wheel_record_of()),
            *(lost_record(FrameRange(w, seq, seq)) for w in (A1, other) for seq in (2, 3)),
        ]
    )
    after = state.apply_all(unregister_records(state, A1))
    assert set(after.wheels) == {other}
    assert after.lost == {(other, 2), (other, 3)}


def test_what_is_lost_in_a_row_is_one_record_however_it_comes_to_be_known() -> None:
    state = ControlState().apply_all([lost_record(FrameRange(A1, seq, seq)) for seq in (7, 8)])
    for first, last in ((3, 3), (4, 6), (9, 10_000_000), (20_000_000, 20_000_001)):
        state = state.apply_all(lost_records(state, FrameSet([FrameRange(A1, first, last)])))
    assert dict(state.lost_records) == {(A1, 3): 10_000_000, (A1, 20_000_000): 20_000_001}
    assert [*state.lost.ranges()] == [
        FrameRange(A1, 3, 10_000_000),
        FrameRange(A1, 20_000_000, 20_000_001),
    ]
    assert state.apply_all(unregister_records(state, A1)).lost_records == {}


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), max_size=8))
def test_the_records_of_lost_frames_are_the_ranges_they_make(found: list[tuple[int, int]]) -> None:
    state = ControlState()
    lost: set[tuple[WheelId, int]] = set()
    for first, more in found:
        new = FrameSet([FrameRange(A1, first, first + more)]) - state.lost
        state = state.apply_all(lost_records(state, new))
        lost |= set(new)
    assert state.lost == lost
    assert {FrameRange(*first, last) for first, last in state.lost_records.items()} == {
        *state.lost.ranges()
    }


def test_a_leader_has_its_token_with_every_id() -> None:
    state = ControlState().apply(*leader_record(0, "a", "t1"), 10)
    assert state.leader(2) is None
    state = state.apply(*leader_record(1, "a", "t1"), 12)
    assert state.leader(2) == Leader("a", 12)
    state = state.apply(*leader_record(0, "b", "t2"), 14)
    assert state.leader(2) is None


@pytest.mark.parametrize(
    "key",
    [None, b"", b"progress/1", b"leader/x", b"lost/a.1/0", b"wheel/", b"node/", b"\xff", b"new/x"],
)
def test_unknown_keys_are_left_alone(key: bytes | None) -> None:
    assert ControlState().apply(key, b"anything", 1) == ControlState()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"progress", None),
        (b"progress", b"{"),
        (b"progress", b"[]"),
        (b"progress", b"\xff"),
        (b"progress", b'{"due_ms": 1, "position": null, "seqs": {}}'),
        (b"progress", b'{"due_ms": true, "position": null, "seqs": {}, "floor": 0}'),
        (b"progress", b'{"due_ms": 1, "position": "x", "seqs": {}, "floor": 0}'),
        (b"progress", b'{"due_ms": 1, "position": null, "seqs": {"a": 1}, "floor": 0}'),
        (b"progress", b'{"due_ms": 1, "position": null, "seqs": {"a.1": -1}, "floor": 0}'),
        (b"leader/0", b'{"node": "a"}'),
        (b"leader/0", None),
        (b"node/a", b'{"storage": 1, "last_number": 1}'),
        (b"node/a", None),
        (b"wheel/a", b"{}"),
        (
            b"wheel/a.1",
            b'{"members": {"a": "x"}, "min_insync": 2, "seal_slot": 0, "closed_at": null}',
        ),
        (b"lost/x/1", b"{}"),
        (b"lost/a.1/1", b"{}"),
        (NEEDS_KEY.encode(), b"{}"),
        (NEEDS_KEY.encode(), None),
    ],
)
def test_a_malformed_record_is_named(key: bytes, value: bytes | None) -> None:
    with pytest.raises(ControlRecordMalformedError, match="at offset 42") as caught:
        ControlState().apply(key, value, 42)
    assert str(caught.value).startswith(f"control record {key.decode()!r} at offset 42: ")


def test_records_of_a_later_release_are_refused_by_name() -> None:
    known, later = needs_record(CONTROL_VERSION), needs_record(CONTROL_VERSION + 1)
    assert ControlState().apply_all([known]).needs == CONTROL_VERSION
    with pytest.raises(ControlRecordMalformedError, match="start the later one"):
        ControlState().apply_all([later])


def test_what_opens_a_transaction_says_nothing() -> None:
    assert ControlState().apply_all([OPENING]) == ControlState()


@given(progresses)
def test_equal_states_are_equal_bytes(progress: Progress) -> None:
    reversed_seqs = dict(reversed(list(progress.seqs.items())))
    again = replace(progress, seqs=reversed_seqs)
    assert progress_record(progress) == progress_record(again)
    assert json.loads(progress_record(progress)[1] or b"") == to_json(progress)


@given(st.lists(st.tuples(wheel_ids, st.none() | wheel_records), max_size=9))
def test_compaction_changes_nothing(history: list[tuple[WheelId, WheelRecord | None]]) -> None:
    """Applying only the newest record of each key gives the same, as leaders write them."""
    state = ControlState()
    written: dict[str, bytes | None] = {}
    for wheel, record in history:
        known = state.wheels.get(wheel)
        if known is not None and known.closed_at is not None:
            continue  # no leader writes over a close that it knows of
        key, value = wheel_record(wheel, record) if record else (f"wheel/{wheel}", None)
        state = state.apply(key, value, 0)
        written[key] = value
    assert ControlState().apply_all(list(written.items())).wheels == state.wheels


SIZES = [(members, w) for members in range(1, 6) for w in range(1, members + 1)]


@pytest.mark.parametrize(("members", "min_insync"), SIZES)
def test_required_answers_is_the_least_that_meets_every_set_of_holders(
    members: int, min_insync: int
) -> None:
    everyone = range(members)
    holders = [set(chosen) for chosen in combinations(everyone, min_insync)]

    def always_meets(answers: int) -> bool:
        return all(
            set(asked) & held for asked in combinations(everyone, answers) for held in holders
        )

    assert required_answers(members, min_insync) == next(
        answers for answers in range(1, members + 1) if always_meets(answers)
    )


@pytest.mark.parametrize(("members", "min_insync"), [(1, 0), (1, 2), (3, 4), (0, 1)])
def test_impossible_sizes_are_refused(members: int, min_insync: int) -> None:
    with pytest.raises(ValueError, match="min_insync"):
        required_answers(members, min_insync)
