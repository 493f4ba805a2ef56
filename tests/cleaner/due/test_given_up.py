"""Frames to be given up, in any number."""

import errno
from pathlib import Path

import pytest
from crc32c import crc32c

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import PosixFile
from delaywheel.storage.frames.rows import HOLE_ROW
from delaywheel.storage.reading.reader import UNREADABLE_WAIT_MS
from delaywheel.storage.reading.unreadable_rows import UnreadableRows
from delaywheel_replica.cleaner.due.given_up import (
    FRAMES_AT_ONCE,
    ROWS_AT_ONCE,
    Looked,
    LostFrames,
    joined,
    look_at,
)
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameRange, FrameSet
from support.due.wheels import Sent, Wheels

A1, A2 = WheelId("a", 1), WheelId("a", 2)
SECOND = 1_700_000_000
MILLION = 1_000_000
NOW_MS = SECOND * 1000


def write(wheels: Wheels, count: int, *, seconds: int = 1) -> None:
    for number in range(count):
        due_ms = (SECOND + number % seconds) * 1000
        wheels.write(A1, [Sent(due_ms, number.to_bytes(16, "big"))])


def punch_holes(wheels: Wheels, first_seq: int, count: int) -> None:
    folder = layout.wheel_folder(wheels.data, A1)
    rows = (folder / "index.0").read_bytes()[: (first_seq - 1) * len(HOLE_ROW)] + HOLE_ROW * count
    length = ROWS_PER_SEGMENT * len(HOLE_ROW)
    for segment in range(-(-len(rows) // length)):
        part = rows[segment * length : (segment + 1) * length]
        Path(layout.index_path(folder, segment)).write_bytes(part)


def of_a1(first_seq: int, last_seq: int) -> FrameSet:
    return FrameSet([FrameRange(A1, first_seq, last_seq)])


def looked_at(wheels: Wheels, frames: FrameSet, now_ms: int = NOW_MS) -> Looked:
    return look_at(wheels.disk, wheels.data, frames, now_ms, UnreadableRows(), floor=0)


def hole(first_seq: int, last_seq: int, reason: str = "HOLE") -> LostFrames:
    return LostFrames(A1, first_seq, last_seq, reason)


def test_a_million_holes_are_looked_at_in_a_few_transactions(wheels: Wheels) -> None:
    write(wheels, 1)
    punch_holes(wheels, 2, MILLION)
    left, found = of_a1(2, MILLION + 1), list[LostFrames]()
    for _ in range(-(-MILLION // ROWS_AT_ONCE)):
        looked = looked_at(wheels, left)
        assert len(list(joined(looked.lost))) == 1
        found += looked.lost
        left = looked.kept
    assert left == NO_FRAMES
    assert list(joined(found)) == [hole(2, MILLION + 1)]


def test_what_has_no_row_here_is_looked_at_at_once(wheels: Wheels) -> None:
    write(wheels, 3)
    looked = looked_at(wheels, of_a1(4, 1 << 53) | FrameSet.of([(A2, 5)]))
    gone = LostFrames(A2, 5, 5, "GONE")
    assert (looked.lost, looked.kept) == ([hole(4, 1 << 53, "GONE"), gone], NO_FRAMES)


def test_so_many_that_have_a_place_are_read_and_then_the_next(wheels: Wheels) -> None:
    write(wheels, FRAMES_AT_ONCE + 5, seconds=2)
    for slot in (SECOND, SECOND + 1):
        layout.slot_path(layout.wheel_folder(wheels.data, A1), slot).unlink()
    frames = of_a1(1, FRAMES_AT_ONCE + 5)
    looked = looked_at(wheels, frames)
    assert looked.kept == of_a1(FRAMES_AT_ONCE + 1, FRAMES_AT_ONCE + 5)
    (run,) = joined(looked.lost)
    assert run == LostFrames(A1, 1, FRAMES_AT_ONCE, "GONE", SECOND, SECOND + 1, FRAMES_AT_ONCE)
    assert looked_at(wheels, looked.kept).kept == NO_FRAMES


def test_what_can_be_read_is_kept_and_parts_the_others(wheels: Wheels) -> None:
    write(wheels, 5)
    for number in (1, 2, 4):
        wheels.damage(wheels.frames[number])
    looked = looked_at(wheels, of_a1(2, 6))
    assert looked.kept == FrameSet.of([(A1, 4)])
    assert [(run.seq, run.last_seq, run.messages, run.reason) for run in joined(looked.lost)] == [
        (2, 3, 2, "MAGIC"),
        (5, 5, 1, "MAGIC"),
        (6, 6, 0, "GONE"),
    ]


def test_what_only_cannot_be_read_is_waited_for_until_a_minute_after_its_second(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(wheels, 1)
    frame = of_a1(1, 1)
    open_read = wheels.disk.open_read

    def failing(path: Path) -> PosixFile:
        if path.suffix == ".slot":
            raise OSError(errno.EIO, "bad sector", str(path))
        return open_read(path)

    monkeypatch.setattr(wheels.disk, "open_read", failing)
    over_ms = NOW_MS + UNREADABLE_WAIT_MS
    for now_ms in (0, NOW_MS, over_ms - 1):
        looked = looked_at(wheels, frame, now_ms)
        assert (looked.lost, looked.kept) == ([], frame)
    (lost,) = looked_at(wheels, frame, over_ms).lost
    assert lost.reason == "UNREADABLE"
    punch_holes(wheels, 1, 1)
    assert looked_at(wheels, frame).kept == frame, "it may lie there"
    assert looked_at(wheels, frame, over_ms).kept == NO_FRAMES


def test_a_row_that_cannot_be_read_is_waited_for_since_it_was_first_found(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(wheels, 3)
    layout.slot_path(layout.wheel_folder(wheels.data, A1), SECOND).unlink()
    rows, finished = UnreadableRows(), of_a1(1, 3)
    later_ms = NOW_MS + 3_600_000  # all of it is long done, and its slot file deleted
    read_at = PosixFile.read_at

    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(PosixFile, "read_at", failing)
    for now_ms in (later_ms, later_ms + UNREADABLE_WAIT_MS - 1):
        looked = look_at(wheels.disk, wheels.data, finished, now_ms, rows, floor=0)
        assert (looked.lost, looked.kept) == ([], finished)
    monkeypatch.setattr(PosixFile, "read_at", read_at)
    assert not look_at(wheels.disk, wheels.data, NO_FRAMES, later_ms, rows, floor=0).lost
    monkeypatch.setattr(PosixFile, "read_at", failing)
    over_ms = later_ms + UNREADABLE_WAIT_MS
    assert look_at(wheels.disk, wheels.data, finished, over_ms, rows, floor=0).lost == [hole(1, 3)]


def test_what_is_finished_is_not_lost(wheels: Wheels) -> None:
    write(wheels, 4, seconds=2)
    for slot in (SECOND, SECOND + 1):
        layout.slot_path(layout.wheel_folder(wheels.data, A1), slot).unlink()
    arguments = wheels.disk, wheels.data, of_a1(1, 4), NOW_MS, UnreadableRows()
    looked = look_at(*arguments, floor=SECOND + 1)
    assert [lost.seq for lost in looked.lost] == [2, 4]
    assert looked.kept == FrameSet.of([(A1, 1), (A1, 3)])


def test_a_row_that_could_be_read_meanwhile_is_waited_for_again() -> None:
    rows, three, one = UnreadableRows(), SeqSet([(1, 3)]), SeqSet.of([2])
    assert rows.waited_for(A1, three, three, NOW_MS) == three
    assert rows.waited_for(A1, three, three - one, NOW_MS + 1) == three - one
    over_ms = NOW_MS + UNREADABLE_WAIT_MS
    assert rows.waited_for(A1, three, three, over_ms) == one
    assert rows.waited_for(A1, three, three, 5_000) == three, "the clock was set back"
    assert rows.waited_for(A1, three, three, 5_000 + UNREADABLE_WAIT_MS) == NO_SEQS


def test_a_hole_whose_frame_lies_in_its_slot_file_is_not_given_up(wheels: Wheels) -> None:
    write(wheels, 3)
    punch_holes(wheels, 2, 2)
    looked = looked_at(wheels, of_a1(2, 5))
    assert looked.kept == of_a1(2, 3)
    assert [(lost.seq, lost.last_seq) for lost in looked.lost] == [(4, 5)]


def test_a_frame_of_a_newer_format_is_never_given_up(wheels: Wheels) -> None:
    write(wheels, 2)
    path = layout.slot_path(layout.wheel_folder(wheels.data, A1), SECOND)
    content = bytearray(path.read_bytes())
    length = len(content) // 2
    content[8] = content[length + 8] = 99
    content[4:8] = crc32c(content[8:length]).to_bytes(4, "little")
    path.write_bytes(bytes(content))
    looked = looked_at(wheels, of_a1(1, 2), NOW_MS + 86_400_000)
    assert looked.kept == of_a1(1, 1)
    (lost,) = looked.lost
    assert (lost.seq, lost.reason) == (2, "CHECKSUM"), "a byte of it is wrong, that is all"
