"""Unreadable frames: which work waits for them, which does not, and what is reported."""

import errno
import os
from dataclasses import replace
from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.record_headers import HALF_GROUP
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import PosixDisk, PosixFile
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import HOLE_ROW, INDEX_ROW_LENGTH_BYTES
from delaywheel_replica.cleaner.due.given_up import LostFrames
from delaywheel_replica.core.protocol.frames import FrameSet
from support.due.leader import EMPTY, SECOND, START_MS, Leader, message, numbers
from support.due.wheels import Wheels

A1, A2, B1 = WheelId("a", 1), WheelId("a", 2), WheelId("b", 1)


def punch_hole(wheels: Wheels, wheel: WheelId, seq: int) -> None:
    index = layout.index_path(layout.wheel_folder(wheels.data, wheel), 0)
    with index.open("r+b") as file:
        file.seek((seq - 1) * INDEX_ROW_LENGTH_BYTES)
        file.write(HOLE_ROW)


LATER_MS = 1 << 50


def lost(seq: int, slot: int, messages: int, reason: str, wheel: WheelId = A1) -> LostFrames:
    return LostFrames(wheel, seq, seq, reason, slot, slot, messages)


def look_at_lost(leader: Leader, wheel: WheelId, seq: int) -> LostFrames | None:
    """What is known of a frame; None: it can be read."""
    looked = leader.reader.look_at_lost(FrameSet.of([(wheel, seq)]), LATER_MS, floor=0)
    assert len(looked.lost) + len(looked.kept) == 1
    return looked.lost[0] if looked.lost else None


def test_v_rests_in_front_of_a_hole_until_it_is_lost(wheels: Wheels) -> None:
    wheels.write(A1, [message(START_MS + 1, 1)])
    wheels.write(A1, [message(START_MS + 2, 2)])
    wheels.write(A1, [message(START_MS + 9000, 3)])
    wheels.write(B1, [message(START_MS + 3, 4)])
    punch_hole(wheels, A1, 2)
    with Leader(wheels) as leader:
        assert leader.reader.unreadable == set()
        leader.forward(START_MS + 10_000)
        assert leader.progress.seqs == {A1: 1, B1: 1}
        assert leader.progress.due_ms == START_MS + 10_000
        assert leader.reader.unreadable == {(A1, 2)}
        assert look_at_lost(leader, A1, 2) is None, "it lies in its slot file"
        slot_path(wheels, A1, SECOND).unlink()
        assert look_at_lost(leader, A1, 2) == lost(2, 0, 0, "HOLE")
        leader.lose()
        leader.forward(START_MS + 10_000)
        assert numbers(leader.messages) == [1, 4, 3]


def test_a_repaired_hole_of_a_second_that_waits_is_read_by_its_new_row(wheels: Wheels) -> None:
    """Another leader took the frame; here its row was lost and returns."""
    wheels.write(A1, [message(START_MS + 100, 1)])
    wheels.write(A1, [message(START_MS + 200, 2)])
    index = layout.index_path(layout.wheel_folder(wheels.data, A1), 0)
    rows = index.read_bytes()
    wheels.damage(wheels.frames[0])
    with Leader(wheels, replace(EMPTY, seqs={A1: 2})) as leader:
        punch_hole(wheels, A1, 2)
        leader.forward(START_MS + 900)
        assert leader.reader.unreadable == {(A1, 1)}
        index.write_bytes(rows)
        wheels.repair(wheels.frames[0])
        leader.forward(START_MS + 1000)
        assert numbers(leader.messages) == [1, 2]


def test_a_second_below_the_floor_is_waited_for_no_more(wheels: Wheels) -> None:
    first = message(START_MS + 100, 1)
    wheels.write(A1, [first])
    progress = replace(EMPTY, due_ms=START_MS + 5000, seqs={A1: 1})
    wheels.damage(wheels.frames[0])
    wheels.write(B1, [first])
    with Leader(wheels, progress) as leader:
        step = leader.look(START_MS + 6000)
        assert leader.reader.unreadable == {(A1, 1)}
        leader.reader.done(step, replace(step.after, floor=SECOND + 1))
        assert leader.reader.unreadable == set()


def test_a_bounded_number_of_bad_frames_is_reported_and_then_the_next(wheels: Wheels) -> None:
    for number in range(500):
        wheels.write(A1, [message(START_MS + 100, number)])
        if number % 2:
            wheels.damage(wheels.frames[-1])
    with Leader(wheels) as leader:
        seen = []
        for _ in range(4):
            leader.forward(START_MS + 500)
            seen.append(len(leader.reader.unreadable))
            leader.lose()
        assert seen == [100, 100, 50, 0]
        assert leader.progress.seqs == {A1: 500}


def test_what_is_lost_is_passed_whether_it_has_a_row_here_or_not(wheels: Wheels) -> None:
    wheels.write(A1, [message(START_MS + 1, 1)])
    wheels.write(A1, [message(START_MS + 4001, 2)])
    with Leader(wheels) as leader:
        gone = FrameSet.of((A1, seq) for seq in (1, 2, 3, 5))
        leader.reader.update({A1: 5}, gone)
        step = leader.reader.next_step(START_MS + 10_000, 10, 10)
        assert not step
        assert step.after.seqs == {A1: 3}
        assert look_at_lost(leader, A1, 3) == lost(3, 0, 0, "GONE")
        assert look_at_lost(leader, A2, 1) == lost(1, 0, 0, "GONE", A2)


def test_a_slot_file_that_is_gone_is_missed_by_the_next_leader_too(wheels: Wheels) -> None:
    """Another leader took it; only the index still refers to it."""
    wheels.write(A1, [message(START_MS + 5100, 1), message(START_MS + 6100, 2)])
    wheels.write(B1, [message(START_MS + 6200, 3)])
    slot_path(wheels, A1, SECOND + 5).unlink()
    with Leader(wheels, replace(EMPTY, seqs={A1: 2, B1: 1})) as leader:
        leader.forward(START_MS + 9000)
        assert leader.progress.due_ms == START_MS + 4999
        assert leader.reader.unreadable == {(A1, 1)}
        assert look_at_lost(leader, A1, 1) == LostFrames(
            A1, 1, 1, "GONE", SECOND + 5, SECOND + 5, 1
        )
        leader.lose()
        leader.forward(START_MS + 9000)
        assert numbers(leader.messages) == [2, 3]


class Refusing(PosixDisk):
    """Makes files whose paths contain this part impossible to open."""

    part = "none"

    def open_read(self, path: Path) -> PosixFile:
        if self.part in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return super().open_read(path)


def test_a_wheel_whose_index_cannot_be_opened_waits_and_no_other_does(wheels: Wheels) -> None:
    wheels.write(A1, [message(START_MS + 5100, 1)])
    wheels.write(B1, [message(START_MS + 5200, 2)])
    wheels.disk = disk = Refusing()
    with Leader(wheels, replace(EMPTY, seqs={A1: 1, B1: 1})) as leader:
        wheels.write(A1, [message(START_MS + 5300, 3)])
        wheels.write(B1, [message(START_MS + 5400, 4)])
        disk.part = f"{A1}/index"
        leader.forward(START_MS + 6000)
        assert numbers(leader.messages) == [1, 2, 4], "what is admitted is found in its slot file"
        assert leader.progress.seqs == {A1: 1, B1: 2}
        assert leader.reader.unreadable == {(A1, 2)}
        disk.part = "none"
        leader.forward(START_MS + 6100)
        assert numbers(leader.messages) == [1, 2, 4, 3]
        assert leader.reader.unreadable == set()


def slot_path(wheels: Wheels, wheel: WheelId, slot: int) -> Path:
    return layout.slot_path(layout.wheel_folder(wheels.data, wheel), slot)


def test_no_timer_runs_for_what_cannot_be_taken_at_its_due(wheels: Wheels) -> None:
    """The leader would look a thousand times a second, for as long as a medium returns nothing."""
    wheels.write(A1, [message(START_MS + 100, 1), message(START_MS + 900, 2)])
    with Leader(wheels) as leader:
        leader.forward(START_MS + 500)
        assert leader.reader.next_due_ms() == START_MS + 900
        leader.reader.update({A1: 0})  # its frame was lost here, or cannot be read
        assert not leader.reader.next_step(START_MS + 950, 1_000, 1 << 20)
        assert leader.reader.next_due_ms() is None
        leader.forward(START_MS + 960)
        assert numbers(leader.messages) == [1, 2]


def test_no_timer_runs_for_what_lies_behind_a_bad_frame(wheels: Wheels) -> None:
    """A later second may be in memory early, for a half that is let go."""
    half = message(START_MS + 9_100, 1, headers=((HALF_GROUP, b"shop"),))
    wheels.write(A1, [half, message(START_MS + 9_200, 2)])
    wheels.write(B1, [message(START_MS + 5_100, 3)])
    with Leader(wheels) as leader:
        leader.forward(START_MS + 1_000)
        wheels.cancel(A1, [half], kind=Kind.RELEASES)
        leader.forward(START_MS + 1_000)
        assert numbers(leader.messages) == [1]
        wheels.damage(wheels.frames[1])
        leader.forward(START_MS + 9_500)
        assert leader.progress.due_ms == START_MS + 4_999
        assert leader.reader.next_due_ms() is None
        leader.lose()
        leader.forward(START_MS + 9_500)
        assert numbers(leader.messages) == [1, 2]
