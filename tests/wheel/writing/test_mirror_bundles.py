"""What a mirror takes of a bundle that differs from its origin's; and that each check matters.

No network and no disk of the simulation makes such bundles: their holders check what they read. So
errors of these checks are put in here, one at a time, and each has to be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import make_wheel
from delaywheel.storage.frames import checking
from delaywheel.storage.frames.bundle import FrameBundle, FrameCopy
from delaywheel.storage.frames.format import HEADER_LENGTH_BYTES, decode_frame, index_row_of
from sim.machine.disk import SimulatedDisk
from sim.mutants.mutant import Patch, instead
from support.wheels.copies import copies_of, open_copy, rows_of, slots_of
from support.wheels.messages import BASE_SLOT, message
from support.wheels.wheels import append, new_wheel

DATA = Path("/data")
WHEEL, OTHER = WheelId("node-1", 1), WheelId("node-1", 7)

Change = Callable[[list[FrameCopy]], list[FrameCopy]]


def _written(wheel: WheelId) -> list[FrameCopy]:
    """Six frames of one message, for two seconds alternately, all of equal length."""
    disk = SimulatedDisk()
    origin = new_wheel(disk, DATA, wheel.number)
    for number in range(6):
        append(origin, [message(number, slot=BASE_SLOT + number % 2)])
    return copies_of(disk, DATA, wheel)


def _foreign(copies: list[FrameCopy]) -> list[FrameCopy]:
    return [*copies[:2], _written(OTHER)[2], *copies[3:]]


def _of_another_seq(copies: list[FrameCopy]) -> list[FrameCopy]:
    """The bytes of the previous frame of its second, under its own seq."""
    first = copies[0]
    third = decode_frame(first.content, wheel=WHEEL, slot=BASE_SLOT, seq=1)
    return [*copies[:2], FrameCopy(3, index_row_of(third, 2 * len(first.content)), first.content)]


def _torn(copies: list[FrameCopy]) -> list[FrameCopy]:
    """Zeros where a write did not get through, after a header that did."""
    third = copies[2]
    kept = third.content[:HEADER_LENGTH_BYTES]
    torn = third._replace(content=kept.ljust(len(third.content), b"\0"))
    return [*copies[:2], torn, *copies[3:]]


def _turned(copies: list[FrameCopy]) -> list[FrameCopy]:
    """Two frames swapped, as from a holder that mixes up what it has read."""
    third, fourth = copies[2], copies[3]
    return [*copies[:2], fourth._replace(seq=3), third._replace(seq=4), *copies[4:]]


CASES: dict[str, tuple[Change, int]] = {
    "as they were written": (lambda copies: copies, 6),
    "a gap": (lambda copies: [*copies[:2], *copies[3:]], 2),
    "a gap in front": (lambda copies: copies[1:], 0),
    "out of order": (lambda copies: [*copies[:2], copies[3], copies[2], *copies[4:]], 2),
    "two in each other's places": (_turned, 2),
    "another wheel's frame in the middle": (_foreign, 2),
    "another frame of the wheel in the middle": (_of_another_seq, 2),
    "a torn end": (lambda copies: _torn(copies)[:3], 2),
    "torn in the middle": (_torn, 2),
}


def took(change: Change) -> tuple[int, bool]:
    """How many frames of a changed bundle a mirror takes, and whether these are its origin's."""
    good, disk = _written(WHEEL), SimulatedDisk()
    meta = new_wheel(SimulatedDisk(), DATA, WHEEL.number).meta
    make_wheel(disk, DATA, meta)
    mirror = open_copy(disk, DATA, WHEEL, HandleCache(disk, 2))
    mirror.append(FrameBundle.of_copies(change(good)))
    taken = mirror.last_seq
    rows = [copy.row for copy in good[:taken]]
    slots = {
        BASE_SLOT + ahead: b"".join(copy.content for copy in good[:taken][ahead::2])
        for ahead in (0, 1)
    }
    is_same = rows_of(disk, DATA, WHEEL) == rows
    is_same &= slots_of(disk, DATA, WHEEL) == {slot: all_ for slot, all_ in slots.items() if all_}
    mirror.close()
    return taken, is_same


@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("case", CASES)
def test_what_is_right_is_taken_up_to_the_first_that_is_not(case: str, few: int) -> None:
    change, frames = CASES[case]
    with instead(checking, "FEW_FRAMES", few):
        assert took(change) == (frames, True)


def _no_gaps_are_seen() -> Patch:
    def following(self: FrameBundle, next_seq: int, limit: int | None) -> FrameBundle:
        del limit
        return self.part(int(self.seqs.searchsorted(next_seq)), len(self))

    return instead(FrameBundle, "following", following)


def _places_are_not_compared() -> Patch:
    def is_misplaced(headers: np.ndarray, *_: object) -> np.ndarray:
        return np.zeros(len(headers), np.bool_)

    return instead(checking, "is_misplaced", is_misplaced)


def _checksums_are_not_compared() -> Patch:
    return instead(checking, "_right_checksums", lambda _bundle, frames, _headers: len(frames))


ERRORS: dict[str, tuple[Callable[[], Patch], tuple[str, ...]]] = {
    "a gap is no end": (_no_gaps_are_seen, ("a gap", "a gap in front", "out of order")),
    "whose frame it is does not matter": (
        _places_are_not_compared,
        (
            "two in each other's places",
            "another wheel's frame in the middle",
            "another frame of the wheel in the middle",
        ),
    ),
    "checksums do not matter": (_checksums_are_not_compared, ("a torn end", "torn in the middle")),
}


@pytest.mark.parametrize("error", ERRORS)
def test_each_check_is_needed(error: str) -> None:
    patch, cases = ERRORS[error]
    for case in cases:
        change, frames = CASES[case]
        with ExitStack() as stack:
            # As many frames are checked; that few are checked alike, test_checking.py shows.
            stack.enter_context(instead(checking, "FEW_FRAMES", 0))
            stack.enter_context(patch())
            assert took(change) != (frames, True), case
