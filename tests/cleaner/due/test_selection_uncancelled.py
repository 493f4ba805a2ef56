"""Whether a cancel of a message is admitted: no cancelled message gets another due."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.rows import HOLE_ROW, INDEX_ROW_LENGTH_BYTES
from delaywheel.storage.reading import cancels
from delaywheel.storage.reading.cancels import BEGIN_BYTES, Budget, CancelLook
from support.due.leader import EMPTY, START_MS, Leader, message
from support.due.wheels import Sent, Wheels, wheels_in_memory

A1, B1 = WheelId("a", 1), WheelId("b", 1)
SENT = message(START_MS + 60_500, 7)


@pytest.fixture
def wheels() -> Iterator[Wheels]:
    with wheels_in_memory() as made:
        made.write(A1, [message(SENT.due_ms, 1), SENT])
        yield made


def look_of(sent: Sent) -> CancelLook:
    return CancelLook(sent.due_ms // 1000, [sent.id[:BEGIN_BYTES]])


def is_uncancelled(
    leader: Leader, sent: Sent = SENT, look: CancelLook | None = None, *, forward: bool = True
) -> bool:
    """The answer once everything readable is admitted."""
    if forward:
        leader.forward(START_MS + 1_000)
    look = look or look_of(sent)
    is_whole = leader.reader.look_for_cancels(look, Budget(1_000, 1 << 20))
    return is_whole and (sent.id, sent.due_ms) not in {(row.id, row.due_ms) for row in look.rows}


@pytest.mark.parametrize("wheel", [A1, B1], ids=["same wheel", "another wheel"])
def test_a_cancel_is_found_in_whichever_wheel_and_row_it_lies(
    wheels: Wheels, wheel: WheelId
) -> None:
    with Leader(wheels) as leader:
        assert is_uncancelled(leader)
        wheels.cancel(wheel, [message(SENT.due_ms, 1), SENT])
        assert not is_uncancelled(leader)
        assert not is_uncancelled(leader, message(SENT.due_ms, 1))


@pytest.mark.parametrize(
    "other",
    [
        message(SENT.due_ms, 8),
        replace(SENT, due_ms=SENT.due_ms + 1),
        replace(SENT, due_ms=SENT.due_ms + 1_000),
    ],
    ids=["another id", "another due of its second", "another second"],
)
def test_a_cancel_of_another_message_is_none(wheels: Wheels, other: Sent) -> None:
    wheels.cancel(A1, [other])
    with Leader(wheels) as leader:
        assert is_uncancelled(leader)
        assert not is_uncancelled(leader, other)


def test_a_cancel_counts_from_when_it_is_admitted(wheels: Wheels) -> None:
    with Leader(wheels) as leader:
        assert is_uncancelled(leader)
        wheels.cancel(A1, [SENT])
        assert is_uncancelled(leader, forward=False)
        assert not is_uncancelled(leader)


def test_what_cannot_be_read_may_be_a_cancel_until_it_is_lost(wheels: Wheels) -> None:
    (cancel,) = wheels.cancel(A1, [message(SENT.due_ms, 8)])
    with Leader(wheels) as leader:
        assert is_uncancelled(leader)
        wheels.damage(cancel)
        assert not is_uncancelled(leader, forward=False)
        leader.forward(START_MS + 61_000)
        leader.lose()
        assert is_uncancelled(leader)


def test_a_frame_of_which_the_place_is_lost_may_be_a_cancel(wheels: Wheels) -> None:
    (cancel,) = wheels.cancel(A1, [message(START_MS + 90_000, 8)])
    wheels.damage(cancel)
    index = layout.index_path(layout.wheel_folder(wheels.data, A1), 0)
    with index.open("r+b") as file:
        file.seek((cancel.seq - 1) * INDEX_ROW_LENGTH_BYTES)
        file.write(HOLE_ROW)
    # Another leader took it into V.
    with Leader(wheels, replace(EMPTY, seqs={A1: cancel.seq})) as leader:
        assert not is_uncancelled(leader)


def test_a_look_goes_on_where_it_stopped(wheels: Wheels) -> None:
    look = look_of(SENT)
    for number in range(20, 30):
        wheels.cancel(B1, [message(SENT.due_ms, number)])
    with Leader(wheels) as leader:
        leader.forward(START_MS + 1_000)
        pieces = 0
        while not leader.reader.look_for_cancels(look, Budget(3, 1 << 20)):
            pieces += 1
        assert pieces >= 3
        assert SENT.id not in {row.id for row in look.rows}
        # From now on only what is added is read, wherever it is added.
        wheels.write(A1, [message(START_MS + 61_000, 2), SENT])
        wheels.cancel(A1, [message(SENT.due_ms, 40)])
        assert is_uncancelled(leader, look=look)
        (cancel,) = wheels.cancel(B1, [message(SENT.due_ms, 41), SENT])
        assert not is_uncancelled(leader, look=look)
        places = {(row.wheel, row.seq, row.row) for row in look.rows if row.id == SENT.id}
        assert places == {(B1, cancel.seq, 1)}


@pytest.mark.parametrize("few_rows", [True, False], ids=["by rows", "by the second's file"])
def test_a_look_waits_for_what_cannot_be_read_and_reads_it_then(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch, *, few_rows: bool
) -> None:
    if not few_rows:
        monkeypatch.setattr(cancels, "_NEW_ROWS_AT_MOST", 0)
    look = look_of(SENT)
    with Leader(wheels) as leader:
        assert is_uncancelled(leader, look=look)
        (cancel,) = wheels.cancel(A1, [SENT])
        wheels.cancel(A1, [message(SENT.due_ms, 9)])
        leader.forward(START_MS + 1_000)
        wheels.damage(cancel)
        assert not is_uncancelled(leader, look=look, forward=False)
        assert not look.rows
        wheels.repair(cancel)
        assert not is_uncancelled(leader, look=look, forward=False)
        assert look.rows
