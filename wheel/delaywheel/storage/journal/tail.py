"""Follows a journal that others write: which of its frames have rows of a second.

Heads are read once, as frames come, and only those: each has the list of its seconds. Frames are
read when rows of one of their seconds are asked for. What is filled is forgotten.
"""

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, File, is_medium_error
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.journal.format import (
    HEADER_LENGTH_BYTES,
    JournalFrame,
    decode_frame,
    decode_head,
)

_READ_BYTES: Final = 64 << 10
"""Heads of small frames, or that of a large one."""
_LONGEST_HEAD_BYTES: Final = 64 << 20


class _Noted(NamedTuple):
    """Where a frame lies, and what it has rows of."""

    segment: int
    at: int
    length_bytes: int
    seconds: NDArray[np.uint32]


class JournalTail:
    """The frames of (F, e] of one wheel. For one thread."""

    def __init__(self, disk: Disk, folder: Path, wheel: WheelId) -> None:
        self._disk = disk
        self._folder = folder
        self._wheel = wheel
        self._filled = 0
        self._noted: list[_Noted] = []  # from F + 1 on
        self._files: dict[int, File] = {}  # by the seq of the segment's name

    def follow(self, filled: int, end: int) -> None:
        """Notes frames that have come, and forgets those that are filled.

        Raises:
            FrameDamaged: One cannot be read.
            OSError: Not the medium's.
        """
        if filled < self._filled:  # what was copied is another journal's
            self._noted.clear()
        else:
            del self._noted[: filled - self._filled]
        self._filled = filled
        del self._noted[max(end - filled, 0) :]
        while self._filled + len(self._noted) < end:
            self._note_more(self._filled + len(self._noted) + 1, end)
        needed = {noted.segment for noted in self._noted}
        for segment in self._files.keys() - needed:
            self._files.pop(segment).close()

    def _note_more(self, seq: int, end: int) -> None:
        """Notes frames from this one on: as many as one read has, and one segment."""
        segment, number, at = self._known_before(seq)
        length = _READ_BYTES
        while True:
            content, place = self._read(segment, at, length), 0
            try:
                while number <= end and place < min(len(content), _READ_BYTES):
                    head = decode_head(content, place, wheel=self._wheel)
                    if head.seq != number:
                        break  # the next one begins a segment
                    if number >= seq:
                        first = place + HEADER_LENGTH_BYTES
                        seconds = np.frombuffer(content, "<u4", head.seconds, first)
                        note = _Noted(segment, at + place, head.length_bytes, seconds.copy())
                        self._noted.append(note)
                    place += head.length_bytes
                    number += 1
            except FrameDamaged as damage:
                if damage.reason is not DamageReason.SHORT:
                    raise
                length = _READ_BYTES if place else 2 * length
            if number > seq or (not place and length > _LONGEST_HEAD_BYTES):
                break
            if not place and len(content) < length:
                break
            at += place
        if number <= seq:
            raise FrameDamaged(DamageReason.GONE, f"seq {seq}")

    def _known_before(self, seq: int) -> tuple[int, int, int]:
        """Returns the segment of a frame, and a frame in it, up to this one, with its place."""
        names = self._disk.list_folder(layout.journal_folder(self._folder))
        seqs = [s for name in names if (s := layout.journal_segment(name)) is not None]
        segment = max((each for each in seqs if each <= seq), default=0)
        if self._noted and self._noted[-1].segment == segment:
            return segment, seq, self._noted[-1].at + self._noted[-1].length_bytes
        return segment, segment, 0

    def frames_with(self, slot: int) -> tuple[list[JournalFrame], bytes]:
        """Reads the frames with rows of a second; returns them, and all their bytes.

        Raises:
            FrameDamaged: One cannot be read.
            OSError: Not the medium's.
        """
        wanted = [
            (seq, noted)
            for seq, noted in enumerate(self._noted, self._filled + 1)
            if _has(noted.seconds, slot)
        ]
        parts = [self._read(noted.segment, noted.at, noted.length_bytes) for _, noted in wanted]
        buffer = parts[0] if len(parts) == 1 else b"".join(parts)
        frames, at = [], 0
        for (seq, _), part in zip(wanted, parts, strict=True):
            frames.append(decode_frame(buffer, at, wheel=self._wheel, seq=seq))
            at += len(part)
        return frames, buffer

    def _read(self, segment: int, at: int, length: int) -> bytes:
        try:
            if segment not in self._files:
                path = layout.journal_path(self._folder, segment)
                self._files[segment] = self._disk.open_read(path)
            content = self._files[segment].read_at(length, at)
        except FileNotFoundError as error:
            raise FrameDamaged(DamageReason.GONE, f"segment {segment}") from error
        except OSError as error:
            if not is_medium_error(error):
                raise
            raise FrameDamaged(DamageReason.UNREADABLE, str(error)) from error
        return content

    def close(self) -> None:
        """Closes its files, and forgets where frames lie."""
        self._noted.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()


def _has(seconds: NDArray[np.uint32], slot: int) -> bool:
    at = int(seconds.searchsorted(slot))
    return at < len(seconds) and int(seconds[at]) == slot
