"""Whether a cancel of a message is admitted: nothing that is cancelled gets another due."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.rows import HOLE_ROW, INDEX_ROW_LENGTH_BYTES
from support.due.leader import EMPTY, START_MS, Leader, message
from support.due.wheels import Sent, Wheels, wheels_in_memory

A1, B1 = WheelId("a", 1), WheelId("b", 1)
SENT = message(START_MS + 60_500, 7)


@pytest.fixture
def wheels() -> Iterator[Wheels]:
    with wheels_in_memory() as made:
        made.write(A1, [message(SENT.due_ms, 1), SENT])
        yield made


def is_uncancelled(leader: Leader, sent: Sent = SENT) -> bool:
    """What is said once everything that can be read is admitted."""
    leader.forward(START_MS + 1_000)
    return leader.reader.is_uncancelled(sent.id, sent.due_ms)


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
        assert leader.reader.is_uncancelled(SENT.id, SENT.due_ms)
        assert not is_uncancelled(leader)


def test_what_cannot_be_read_may_be_a_cancel_until_it_is_lost(wheels: Wheels) -> None:
    (cancel,) = wheels.cancel(A1, [message(SENT.due_ms, 8)])
    with Leader(wheels) as leader:
        assert is_uncancelled(leader)
        wheels.damage(cancel)
        assert not leader.reader.is_uncancelled(SENT.id, SENT.due_ms)
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
