"""An index row is gone, or a slot file, or both: no second passes before the frame is found.

| its row | its slot file | the slot table | the frame is |
|---|---|---|---|
| good | whole | any | read |
| good | torn, or gone | any | waited for |
| damaged, or not to be read | whole | any | read where it lies |
| damaged, or not to be read | torn, or gone | behind, or counted it before or after | waited for |

Awaited frames are reported, so they are fetched from another member; lost ones are passed.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.rows import HOLE_ROW, INDEX_ROW_LENGTH_BYTES
from delaywheel.storage.writing.table_writer import SlotTable
from support.due.leader import EMPTY, SECOND, START_MS, Leader, message, numbers, until
from support.due.wheels import Wheels

A1, B1 = WheelId("a", 1), WheelId("b", 1)
BAD_SEQ = 2
BAD_SLOT = SECOND + 5


def index_of(wheels: Wheels) -> Path:
    return layout.index_path(layout.wheel_folder(wheels.data, A1), 0)


def slot_of(wheels: Wheels) -> Path:
    return layout.slot_path(layout.wheel_folder(wheels.data, A1), BAD_SLOT)


def count(wheels: Wheels) -> None:
    """Makes the slot table count every row."""
    table = SlotTable(wheels.disk, layout.wheel_folder(wheels.data, A1), refresh_rows=1)
    table.refresh(wheels.last_seqs()[A1], floor=0)


def write_row(wheels: Wheels, row: bytes) -> None:
    with index_of(wheels).open("r+b") as file:
        file.seek((BAD_SEQ - 1) * INDEX_ROW_LENGTH_BYTES)
        file.write(row)


def row_of(wheels: Wheels) -> bytes:
    end = BAD_SEQ * INDEX_ROW_LENGTH_BYTES
    return index_of(wheels).read_bytes()[end - INDEX_ROW_LENGTH_BYTES : end]


def flip(row: bytes, byte: int) -> bytes:
    return row[:byte] + bytes([row[byte] ^ 16]) + row[byte + 1 :]


ROWS: dict[str, Callable[[bytes], bytes]] = {
    "good row": lambda row: row,
    "another slot": lambda row: flip(row, 0),
    "another length": lambda row: flip(row, 9),
    "hole": lambda _: HOLE_ROW,
}


def harm_file(wheels: Wheels, file: str) -> None:
    if file == "torn file":
        content = slot_of(wheels).read_bytes()
        slot_of(wheels).write_bytes(content[: len(content) // 2])
    elif file == "damaged file":
        wheels.damage(wheels.frames[BAD_SEQ - 1])
    elif file == "no file":
        slot_of(wheels).unlink()


def write_frames(wheels: Wheels) -> None:
    for number, due_ms in enumerate((2_100, 5_100, 7_100), 1):
        wheels.write(A1, [message(START_MS + due_ms, number)])
    wheels.write(B1, [message(START_MS + 9_000, 4)])


def assert_is_waited_for(wheels: Wheels, leader: Leader, row: bytes, content: bytes) -> None:
    until(lambda: leader.forward(START_MS + 9_500) > 0 and bool(leader.reader.unreadable))
    assert leader.reader.unreadable == {(A1, BAD_SEQ)}
    assert leader.progress.due_ms < START_MS + 5_100
    # Put back from another member.
    slot_of(wheels).write_bytes(content)
    write_row(wheels, row)
    until(lambda: leader.forward(START_MS + 9_700) > 0 and not leader.reader.unreadable)
    leader.forward(START_MS + 9_800)
    assert numbers(leader.messages) == [1, 2, 3, 4]


@pytest.mark.parametrize("table", ["no table", "counted before", "counted after"])
@pytest.mark.parametrize("file", ["whole file", "torn file", "damaged file", "no file"])
@pytest.mark.parametrize("row", ROWS)
def test_a_frame_of_v_is_read_or_waited_for(
    wheels: Wheels, row: str, file: str, table: str
) -> None:
    """Another leader took it; this leader finds it damaged."""
    write_frames(wheels)
    good_row, content = row_of(wheels), slot_of(wheels).read_bytes()
    if table == "counted before":
        count(wheels)
    harm_file(wheels, file)
    write_row(wheels, ROWS[row](good_row))
    if table == "counted after":
        count(wheels)
    with Leader(wheels, replace(EMPTY, seqs={A1: 3, B1: 1})) as leader:
        if file == "whole file":
            leader.forward(START_MS + 9_500)
            assert numbers(leader.messages) == [1, 2, 3, 4]
            assert leader.reader.unreadable == set()
        else:
            assert_is_waited_for(wheels, leader, good_row, content)


@pytest.mark.parametrize("table", ["no table", "counted before", "counted after"])
@pytest.mark.parametrize("file", ["whole file", "torn file", "no file"])
@pytest.mark.parametrize("row", ROWS)
def test_a_frame_that_was_admitted_is_read_or_waited_for(
    wheels: Wheels, row: str, file: str, table: str
) -> None:
    """This leader itself has read its row, long before its second."""
    write_frames(wheels)
    good_row, content = row_of(wheels), slot_of(wheels).read_bytes()
    with Leader(wheels) as leader:
        leader.forward(START_MS + 2_500)
        assert leader.progress.seqs == {A1: 3, B1: 1}
        if table == "counted before":
            count(wheels)
        harm_file(wheels, file)
        write_row(wheels, ROWS[row](good_row))
        if table == "counted after":
            count(wheels)
        if file == "whole file":
            leader.forward(START_MS + 9_500)
            assert numbers(leader.messages) == [1, 2, 3, 4]
        else:
            assert_is_waited_for(wheels, leader, good_row, content)


def test_a_row_that_turns_out_to_be_of_a_finished_second_is_waited_for_no_more(
    wheels: Wheels,
) -> None:
    """Another member knows its row, but has deleted its content, as all members have."""
    write_frames(wheels)
    good_row = row_of(wheels)
    write_row(wheels, HOLE_ROW)
    slot_of(wheels).unlink()
    start = Leader(
        wheels,
        replace(EMPTY, due_ms=START_MS + 6_500, seqs={A1: 3, B1: 1}, floor=BAD_SLOT + 1),
    )
    with start as leader:
        leader.forward(START_MS + 9_500)
        assert leader.reader.unreadable == {(A1, BAD_SEQ)}
        write_row(wheels, good_row)
        leader.forward(START_MS + 9_700)
        leader.forward(START_MS + 9_800)
        assert numbers(leader.messages) == [3, 4]


def test_a_retry_waits_for_the_hole_that_it_may_repeat(wheels: Wheels) -> None:
    write_frames(wheels)
    good_row, content = row_of(wheels), slot_of(wheels).read_bytes()
    with Leader(wheels) as leader:
        leader.forward(START_MS + 6_000)
    write_row(wheels, HOLE_ROW)
    slot_of(wheels).unlink()
    wheels.write(B1, [message(START_MS + 5_100, 2)])
    with Leader(wheels, leader.progress) as following:
        following.forward(START_MS + 6_500)
        assert following.reader.unreadable == {(A1, BAD_SEQ)}
        assert following.messages == []
        slot_of(wheels).write_bytes(content)
        write_row(wheels, good_row)
        following.forward(START_MS + 6_700)
        following.forward(START_MS + 6_800)
        assert numbers(following.dropped) == [2]
        assert following.messages == []


def test_other_wheels_frames_that_lie_in_their_files_hold_up_nothing(wheels: Wheels) -> None:
    """Its row stays damaged, since no other member could repair it."""
    write_frames(wheels)
    write_row(wheels, HOLE_ROW)
    with Leader(wheels, replace(EMPTY, seqs={A1: 3, B1: 1})) as leader:
        for now_ms in range(START_MS + 1_000, START_MS + 9_500, 250):
            leader.forward(now_ms)
            assert leader.progress.due_ms == now_ms
        assert numbers(leader.messages) == [1, 2, 3, 4]
