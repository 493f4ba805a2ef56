"""A second is read completely though rows of the index are wrong."""

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.format import HEADER, Frame
from delaywheel.storage.frames.rows import INDEX_ROW_LENGTH_BYTES
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from sim.machine.disk import SimulatedDisk
from support.wheels.messages import BASE_SLOT, Message, message, messages_of
from support.wheels.wheels import append, new_wheel

DATA = Path("/data")
WHEEL = WheelId("node-1", 1)
SLOT_BIT, OFFSET_BIT = 0, 32


def written(disk: SimulatedDisk, groups: int) -> dict[int, list[Message]]:
    """Frames for two slots, taking turns; seq -> content."""
    wheel = new_wheel(disk, DATA)
    for number in range(groups):
        append(wheel, [message(number, slot=BASE_SLOT + number % 2)])
    wheel.close()
    return {seq: [message(seq - 1, slot=BASE_SLOT + (seq - 1) % 2)] for seq in range(1, groups + 1)}


def flip(disk: SimulatedDisk, seq: int, bit: int) -> None:
    path = layout.index_path(layout.wheel_folder(DATA, WHEEL), 0)
    disk.flip_bit(path, 8 * INDEX_ROW_LENGTH_BYTES * (seq - 1) + bit)


def read(disk: SimulatedDisk, slot: int, up_to_seq: int = 99) -> dict[int, list[Message] | None]:
    """Seq -> content, None if unreadable: here those after the others."""
    reader = WheelReader(disk, DATA, WHEEL)
    found: dict[int, list[Message] | None] = {}
    for frame in reader.slot_frames(slot, up_to_seq):
        assert frame.seq not in found
        found[frame.seq] = messages_of(frame.columns) if isinstance(frame, Frame) else None
    reader.close()
    assert list(found) == sorted(found, key=lambda seq: (found[seq] is None, seq))
    return found


def holes(disk: SimulatedDisk, *, up_to_seq: int = 6, lost: SeqSet = NO_SEQS) -> set[int]:
    """The frames that may belong to any second."""
    reader = WheelReader(disk, DATA, WHEEL)
    found = set(reader.holes(up_to_seq, lost))
    if found:
        assert reader.may_have_holes(up_to_seq, lost)
    reader.close()
    return found


@pytest.mark.parametrize("seqs", [(1,), (3,), (5,), (1, 3), (3, 5), (1, 3, 5)])
@pytest.mark.parametrize("bit", [SLOT_BIT + 5, SLOT_BIT + 31, OFFSET_BIT + 20])
def test_frames_whose_rows_say_another_place_are_read(seqs: tuple[int, ...], bit: int) -> None:
    """In front, between and behind; of another second, of one long past, of another place."""
    disk = SimulatedDisk()
    reported = written(disk, 6)
    for seq in seqs:
        flip(disk, seq, bit)
    assert read(disk, BASE_SLOT) == {seq: reported[seq] for seq in (1, 3, 5)}
    assert read(disk, BASE_SLOT + 1) == {seq: reported[seq] for seq in (2, 4, 6)}


def test_nothing_is_read_where_a_damaged_row_leads() -> None:
    disk = SimulatedDisk()
    written(disk, 6)
    flip(disk, 3, SLOT_BIT + 5)
    assert read(disk, BASE_SLOT ^ 32) == {}


def test_no_later_frame_is_read() -> None:
    disk = SimulatedDisk()
    reported = written(disk, 6)
    flip(disk, 3, SLOT_BIT + 5)
    flip(disk, 5, SLOT_BIT + 5)
    assert read(disk, BASE_SLOT, 4) == {seq: reported[seq] for seq in (1, 3)}
    assert read(disk, BASE_SLOT, 2) == {1: reported[1]}


def test_bytes_without_a_row_at_the_end_are_no_frame_yet() -> None:
    disk = SimulatedDisk()
    reported = written(disk, 6)
    path = layout.index_path(layout.wheel_folder(DATA, WHEEL), 0)
    disk.set_content(path, disk.content(path)[: 4 * INDEX_ROW_LENGTH_BYTES])
    assert read(disk, BASE_SLOT) == {seq: reported[seq] for seq in (1, 3)}


def test_a_frame_that_is_bad_as_well_may_be_of_any_second() -> None:
    disk = SimulatedDisk()
    reported = written(disk, 6)
    flip(disk, 3, SLOT_BIT + 5)
    slot = layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT)
    content = bytearray(disk.content(slot))
    content[len(content) // 2] ^= 1
    disk.set_content(slot, bytes(content))
    assert read(disk, BASE_SLOT) == {1: reported[1], 3: None, 5: reported[5]}
    assert read(disk, BASE_SLOT ^ 32) == {}
    assert holes(disk) == {3}


@pytest.mark.parametrize("rows", [range(1, 7), (4,), ()])
def test_whose_frames_lie_in_a_slot_file_are_no_holes(rows: Sequence[int]) -> None:
    """Anywhere in it: after damage as well."""
    disk = SimulatedDisk()
    written(disk, 6)
    for seq in rows:
        flip(disk, seq, SLOT_BIT + 5)
    slot = layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + 1)
    disk.flip_bit(slot, 0)  # the magic of frame 2
    assert holes(disk) == {2} & set(rows)
    assert holes(disk, lost=SeqSet.of([2])) == set()
    assert holes(disk, up_to_seq=1) == set()
    disk.delete(slot)
    assert holes(disk) == {2, 4, 6} & set(rows)


@pytest.mark.parametrize("rows", [(2, 4, 6), (2, 6)])
def test_frames_of_holes_are_read_behind_what_is_no_frame(rows: Sequence[int]) -> None:
    """A walk from the file's beginning does not arrive there."""
    disk = SimulatedDisk()
    reported = written(disk, 6)
    for seq in rows:
        flip(disk, seq, SLOT_BIT + 5)
    disk.flip_bit(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + 1), 0)
    assert read(disk, BASE_SLOT + 1) == {2: None, 4: reported[4], 6: reported[6]}
    assert holes(disk) == {2}


@pytest.mark.parametrize("bit", range(8))
def test_frames_of_holes_are_read_behind_one_that_states_a_wrong_length(bit: int) -> None:
    """Whether that leads to an odd place, or over the next frame."""
    disk = SimulatedDisk()
    reported = written(disk, 6)
    for seq in (2, 4, 6):
        flip(disk, seq, SLOT_BIT + 5)
    slot = layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + 1)
    assert HEADER.fields is not None
    disk.flip_bit(slot, 8 * HEADER.fields["length_bytes"][1] + bit)
    assert holes(disk) == {2}
    assert read(disk, BASE_SLOT + 1) == {2: None, 4: reported[4], 6: reported[6]}


@pytest.mark.parametrize("is_deleted", [True, False])
def test_the_frame_of_a_hole_that_goes_bad_after_it_was_found_is_missing(
    *, is_deleted: bool
) -> None:
    disk = SimulatedDisk()
    written(disk, 6)
    for seq in (2, 4, 6):
        flip(disk, seq, SLOT_BIT + 5)
    reader = WheelReader(disk, DATA, WHEEL)
    assert not reader.holes(6, NO_SEQS)
    slot = layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + 1)
    if is_deleted:
        disk.delete(slot)
    else:
        disk.set_content(slot, bytes(len(disk.content(slot))))
    found = list(reader.slot_frames(BASE_SLOT + 1, 6))
    assert [(type(frame), frame.seq) for frame in found] == [(DamagedFrame, n) for n in (2, 4, 6)]
    assert set(reader.holes(6, NO_SEQS)) == {2, 4, 6}
    reader.close()


def test_rows_that_were_written_again_are_no_holes_any_more() -> None:
    disk = SimulatedDisk()
    written(disk, 6)
    disk.delete(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + 1))
    flip(disk, 4, SLOT_BIT + 5)
    reader = WheelReader(disk, DATA, WHEEL)
    assert reader.may_have_holes(9, NO_SEQS)
    assert set(reader.holes(6, NO_SEQS)) == {4}
    flip(disk, 4, SLOT_BIT + 5)
    assert set(reader.holes(6, NO_SEQS)) == set()
    assert not reader.may_have_holes(6, NO_SEQS)
    reader.close()


def test_rows_that_came_back_after_a_second_was_read_are_told_of_once() -> None:
    disk = SimulatedDisk()
    written(disk, 6)
    slot = layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + 1)
    disk.delete(slot)
    reader = WheelReader(disk, DATA, WHEEL)
    disk.failing_reads = "index.", errno.EIO
    assert not list(reader.slot_frames(BASE_SLOT + 1, 6))
    disk.failing_reads = None
    assert reader.holes_when_read(6, NO_SEQS) == SeqSet([(1, 6)])
    assert not reader.holes_when_read(6, NO_SEQS)
    assert [frame.seq for frame in reader.slot_frames(BASE_SLOT + 1, 6)] == [2, 4, 6]
    reader.close()


def test_frames_that_no_table_has_counted_are_missed_once_their_rows_are_back() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    for number in range(6):
        append(wheel, [message(number, slot=BASE_SLOT + number % 2)])
    disk.failing_reads = "index.", errno.EIO
    wheel.checkpoint()
    disk.failing_reads = None
    slot = layout.slot_path(layout.wheel_folder(DATA, wheel.wheel), BASE_SLOT + 1)
    disk.set_content(slot, bytes(len(disk.content(slot))))
    reader = WheelReader(disk, DATA, wheel.wheel)
    assert [frame.seq for frame in reader.slot_frames(BASE_SLOT + 1, 6)] == [2, 4, 6]
    assert reader.indexed_slots(0, 1 << 40).tolist() == [BASE_SLOT, BASE_SLOT + 1]
    reader.close()


def test_a_table_that_is_far_behind_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delaywheel.storage.reading.places._ROWS_BEHIND_AT_MOST", 3)
    disk = SimulatedDisk()
    written(disk, 6)
    disk.delete(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT + 1))
    for seq in (2, 4):
        flip(disk, seq, SLOT_BIT + 5)
    assert holes(disk) == {2, 4}
    assert read(disk, BASE_SLOT) == {
        **{seq: [message(seq - 1, slot=BASE_SLOT)] for seq in (1, 3, 5)},
        **dict.fromkeys((2, 4)),
    }


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 127)), max_size=4))
def test_whatever_is_flipped_nothing_wrong_is_read(flips: list[tuple[int, int]]) -> None:
    disk = SimulatedDisk()
    reported = written(disk, 8)
    for seq, bit in flips:
        flip(disk, seq, bit)
    good = reported.keys() - {seq for seq, _ in flips}
    for slot in (BASE_SLOT, BASE_SLOT + 1):
        own = {seq for seq, content in reported.items() if content[0].due_ms // 1000 == slot}
        found = read(disk, slot)
        assert {seq for seq in own & good if found.get(seq) != reported[seq]} == set()
        for seq, content in found.items():
            assert content is None or content == reported[seq]


def test_a_damaged_frame_is_reported_as_such() -> None:
    disk = SimulatedDisk()
    written(disk, 2)
    disk.flip_bit(layout.slot_path(layout.wheel_folder(DATA, WHEEL), BASE_SLOT), 8 * 100)
    reader = WheelReader(disk, DATA, WHEEL)
    assert [type(frame) for frame in reader.slot_frames(BASE_SLOT, 9)] == [DamagedFrame]
    reader.close()
