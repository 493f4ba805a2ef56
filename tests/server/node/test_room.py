"""What a data folder still accepts as its disk fills, and what is reserved."""

import errno
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from delaywheel.identity import WheelId
from delaywheel.storage.writing.wheel import WheelBroken
from delaywheel_replica.core.node.events import DiskState
from delaywheel_replica.server.node.disk_state import REFUSED_MS, FreeSpace, is_no_room
from sim.machine.disk import SimulatedDisk

DATA = Path("/data")
RESERVE_BYTES = 1_600
BALLAST_BYTES = 500
ROOM, FULL, OUT = DiskState.ROOM, DiskState.DISK_FULL, DiskState.DISK_OUT


class Inodes(SimulatedDisk):
    free: int | None = None

    def free_inodes(self, path: Path) -> int | None:
        del path
        return self.free


@pytest.fixture
def disk() -> Inodes:
    disk = Inodes()
    disk.make_folder(DATA)
    return disk


@pytest.fixture
def room(disk: Inodes) -> FreeSpace:
    """A data folder with its ballast."""
    room = FreeSpace(disk, DATA, reserve_bytes=RESERVE_BYTES, ballast_bytes=BALLAST_BYTES)
    assert room.look(0) is ROOM
    return room


def states(room: FreeSpace, disk: Inodes, *free_bytes: int) -> list[DiskState]:
    seen = []
    with capture_logs():
        for free in free_bytes:
            disk.capacity_bytes = disk.used_bytes + free
            seen.append(room.look(0))
    return seen


def test_first_messages_are_refused_then_frames(room: FreeSpace, disk: Inodes) -> None:
    assert states(room, disk, 1_600, 1_599, 800, 799, 0) == [ROOM, FULL, FULL, OUT, OUT]
    assert room.detail == "free: 0 B; the reserve is 1.60 kB"


def test_room_is_believed_only_with_a_margin(room: FreeSpace, disk: Inodes) -> None:
    assert states(room, disk, 799, 899, 900) == [OUT, OUT, FULL]
    assert states(room, disk, 1_699, 1_700, 1_600) == [FULL, ROOM, ROOM]
    assert states(room, disk, 799, 1_699, 1_700) == [OUT, FULL, ROOM]


@pytest.mark.parametrize(("free", "state"), [(1_000, ROOM), (999, FULL), (499, OUT), (None, ROOM)])
def test_inodes_count_as_bytes_do(
    room: FreeSpace, disk: Inodes, free: int | None, state: DiskState
) -> None:
    disk.free = free
    with capture_logs():
        assert room.look(0) is state


def test_the_ballast_goes_when_a_write_is_refused_and_comes_back_with_room(
    room: FreeSpace, disk: Inodes
) -> None:
    ballast = DATA / "ballast"
    with capture_logs():
        assert len(disk.content(ballast)) == BALLAST_BYTES
        room.refused(1_000)
        assert room.state is OUT
        assert not disk.exists(ballast)
        # Whatever the disk says is free: it did refuse.
        assert room.look(1_000 + REFUSED_MS - 1) is OUT
        assert not disk.exists(ballast)
        assert room.look(1_000 + REFUSED_MS) is ROOM
        assert disk.exists(ballast)


def test_the_room_of_the_ballast_is_not_free(room: FreeSpace, disk: Inodes) -> None:
    with capture_logs():
        disk.capacity_bytes = disk.used_bytes
        room.refused(0)
        disk.capacity_bytes += 799
        assert disk.free_bytes(DATA) == 799 + BALLAST_BYTES
        assert room.look(REFUSED_MS) is OUT


def test_it_is_looked_at_before_what_is_left_can_be_used_up(room: FreeSpace, disk: Inodes) -> None:
    assert states(room, disk, 3_600) == [ROOM]
    disk.capacity_bytes = disk.used_bytes + 100
    with capture_logs():
        room.wrote(1_000, 0)  # half of what was left above the reserve
        assert room.state is ROOM
        room.wrote(1, 0)
    assert room.state is OUT


def test_a_start_makes_room_for_what_it_has_to_save(room: FreeSpace, disk: Inodes) -> None:
    disk.capacity_bytes = disk.used_bytes + BALLAST_BYTES
    room.before_start()
    assert disk.exists(DATA / "ballast")
    disk.capacity_bytes -= 1
    room.before_start()
    assert not disk.exists(DATA / "ballast")


def test_a_failure_for_want_of_room_is_known_whatever_it_became() -> None:
    broken = WheelBroken(WheelId("a", 1), "a write failed")
    assert not is_no_room(broken)
    broken.__cause__ = OSError(errno.ENOSPC, "full")
    assert is_no_room(broken)
    assert is_no_room(OSError(errno.EDQUOT, "quota"))
    assert not is_no_room(OSError(errno.EIO, "error"))
