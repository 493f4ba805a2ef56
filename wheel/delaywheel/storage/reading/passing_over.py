"""Passes over slot files whose bytes cannot hold what is sought, many of them at once.

A file is passed over if its frames are those that table and rows say (see places.py), each with the
right checksum, and nothing sought is among its bytes. Any other file is left to the code that reads
its second: that shows what the file holds, or what is wrong with it.

A numpy call costs as much for the frames of fifty files as for those of one. So what a file costs
is that it is opened and read; what a frame costs, that its checksum is computed.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.checking import are_foreign, headers_at
from delaywheel.storage.frames.format import (
    CHECKED_FROM,
    HEADER,
    HEADER_LENGTH_BYTES,
    MAGIC_NUMBER,
)
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.places import Stated

# So many files are checked together, of so many bytes. A longer file is not passed over.
_FILES_AT_ONCE: Final = 64
_BYTES_AT_ONCE: Final = 2 << 20
_FILE_BYTES: Final = 4 << 20

_LENGTH_WORD: Final = HEADER.fields["length_bytes"][1] // 4  # type: ignore[index]  # has fields


class PassedSecond(NamedTuple):
    """What a second holds that was passed over: messages, and the length of their frames."""

    messages: int
    length_bytes: int


def passing_over(
    disk: Disk,
    folder: Path,
    wheel: WheelId,
    slots: NDArray[np.int64],
    stated: Callable[[NDArray[np.int64]], Stated],
    *,
    up_to_seq: int,
    may_hold: Callable[[bytes], bool],
) -> Iterator[PassedSecond | None]:
    """Yields for each of some slots, ascending, what its file holds; None: it must be read.

    Files are read ahead of what is yielded: more and more of them, for as long as all are passed
    over. `stated` returns what table and rows say of some slots of one hour.
    """
    begin, at_once = 0, 1
    while begin < len(slots):
        part = slots[begin : begin + at_once]
        hour = part // layout.SECONDS_PER_HOUR
        said = stated(part[hour == hour[0]])
        said = said.first(max(1, int((np.cumsum(said.ends) <= _BYTES_AT_ONCE).sum())))
        passed = _passed(disk, folder, wheel, said, up_to_seq, may_hold)
        yield from passed
        begin += len(passed)
        at_once = 1 if None in passed else min(2 * at_once, _FILES_AT_ONCE)


def _passed(
    disk: Disk,
    folder: Path,
    wheel: WheelId,
    said: Stated,
    up_to_seq: int,
    may_hold: Callable[[bytes], bool],
) -> list[PassedSecond | None]:
    contents = [b""] * len(said.slots)
    is_good = said.is_known & (said.ends <= _FILE_BYTES) & (said.ends & 7 == 0)
    for number in np.flatnonzero(is_good).tolist():
        content = _whole_file(disk, folder, wheel, said, number)
        if content is None or may_hold(content):
            is_good[number] = False
        else:
            contents[number] = content
    files = _Files(contents)
    files.check(wheel, said, is_good)
    each = zip(is_good.tolist(), files.passed(up_to_seq), strict=True)
    return [passed if good else None for good, passed in each]


def _whole_file(
    disk: Disk, folder: Path, wheel: WheelId, said: Stated, number: int
) -> bytes | None:
    """Returns the frames of a slot's file; None if it holds less, or something else behind them.

    What has a later seq may be there: it is being written.
    """
    slot, end = int(said.slots[number]), int(said.ends[number])
    try:
        with closing(disk.open_read(layout.slot_path(folder, slot))) as file:
            content = file.read_at(end + HEADER_LENGTH_BYTES, 0)
    except FileNotFoundError:
        content = b""
    except OSError:
        return None
    if len(content) == end:
        return content
    if len(content) < end + HEADER_LENGTH_BYTES:
        return None
    behind = np.frombuffer(content, HEADER, 1, end)
    is_later = ~are_foreign(behind, wheel, slot) & (behind["seq"] > said.last_seqs[number])
    return content[:end] if is_later.all() else None


class _Files:
    """The frames of some files, file after file; none of a file with anything but frames.

    They are found by their magic, at multiples of 8 bytes. If a message has it in such a place, the
    file seems to have something else.

    Attributes:
        counts: How many each file has.
        numbers: For each frame, the number of its file.
        ends: Where each ends in its file.
        headers: ``format.HEADER``.
        are_right: Those with the right checksum.
    """

    def __init__(self, contents: list[bytes]) -> None:
        content = b"".join(contents)
        edges = np.cumsum([0, *map(len, contents)])
        words = np.frombuffer(content, "<u4")
        begins = np.flatnonzero(words[::2] == MAGIC_NUMBER) * 8
        begins = begins[begins <= len(content) - HEADER_LENGTH_BYTES]
        numbers = edges.searchsorted(begins, side="right") - 1
        ends = begins + words[begins // 4 + _LENGTH_WORD]
        is_first = np.diff(numbers, prepend=-1) > 0
        apart = begins != np.where(is_first, edges[numbers], np.roll(ends, 1))
        is_whole = ~np.isin(numbers, numbers[apart])
        begins, ends, self.numbers = begins[is_whole], ends[is_whole], numbers[is_whole]
        self.counts = np.bincount(self.numbers, minlength=len(contents))
        self.ends = ends - edges[self.numbers]
        self.headers = headers_at(content, begins)
        checked = zip((begins + CHECKED_FROM).tolist(), ends.tolist(), strict=True)
        checksums = [crc32c(content[begin:end]) for begin, end in checked]
        self.are_right = self.headers["checksum"] == np.array(checksums, np.uint32)

    def check(self, wheel: WheelId, said: Stated, is_good: NDArray[np.bool_]) -> None:
        """Marks those files as not good whose frames are not what is said of them."""
        headers, numbers = self.headers, self.numbers
        wrong = are_foreign(headers, wheel, said.slots[numbers]) | ~self.are_right
        wrong[1:] |= (headers["seq"][1:] <= headers["seq"][:-1]) & (numbers[1:] == numbers[:-1])
        is_good[numbers[wrong]] = False
        is_good &= self.counts == said.frames
        known = said.known[is_good[said.known["number"]]]
        at = (np.cumsum(self.counts) - self.counts)[known["number"]] + known["place"]
        differs = (
            (headers["seq"][at] != known["seq"])
            | (self.ends[at] != known["end"])
            | (known["rows"] >= 0) & (headers["messages"][at] != known["rows"])
        )
        is_good[known["number"][differs]] = False

    def passed(self, up_to_seq: int) -> list[PassedSecond]:
        """Returns what each file holds of messages up to a seq."""
        counts = (self.headers["kind"] == Kind.MESSAGES) & (self.headers["seq"] <= up_to_seq)
        numbers, files = self.numbers[counts], len(self.counts)
        sums = (
            np.bincount(numbers, self.headers[name][counts], files).astype(np.int64).tolist()
            for name in ("messages", "length_bytes")
        )
        return [PassedSecond(*each) for each in zip(*sums, strict=True)]
