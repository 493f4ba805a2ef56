"""The ground truth: what was ever written, and who holds it, read from the disks directly.

The nodes do not know it. A frame is `gone` when no disk of the cluster has its bytes any more,
which happens only by faults on disks: then, and only then, its messages may be lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.ingress import TOPIC
from delaywheel.record_headers import HALF_TOPIC
from delaywheel.storage.files import index as files_index
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.format import Frame, FrameDamaged, decode_frame, index_row_of
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import INDEX_ROW_LENGTH_BYTES, checked_rows, raw_rows
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.server.node.naming import key_of
from sim.machine.disk import SimulatedDisk

DATA = Path("/data")
"""The data folder of every node."""

PAGE_BYTES = 4096
"""How much of an index becomes unreadable at once."""

Key = MessageKey
"""Id and due of a message."""

FrameName = tuple[WheelId, int]
"""Wheel and seq."""


@dataclass(slots=True)
class FrameTruth:
    """One frame as its origin wrote it.

    Attributes:
        wheel: with `seq`, its name.
        seq: see `wheel`.
        slot: the second of its due.
        offset: its place in the slot file of every holder.
        path: the slot file.
        row: its index row.
        content: its bytes.
        kind: messages, or rows that name some.
        keys: of its messages, or of the messages that it names.
        gone: no disk has it any more.
    """

    wheel: WheelId
    seq: int
    slot: int
    offset: int
    path: Path
    row: bytes
    content: bytes
    kind: Kind
    keys: tuple[Key, ...]
    gone: bool = False

    def is_on(self, disk: SimulatedDisk, *, with_row: bool) -> bool:
        """Whether a disk has it, whole and in its place.

        Args:
            disk: the disk to look at.
            with_row: the folder was recovered, so that only frames in its index count.

        Bytes that the medium cannot read are not held: no process can read them until they are
        written again.
        """
        if not self._is_written(disk, with_row=with_row):
            return False
        return self._is_readable(disk) and not (with_row and self.is_behind_bad_sector(disk))

    def is_durable_on(self, disk: SimulatedDisk) -> bool:
        """Whether a disk that has it keeps it, and its row, whatever happens to the machine."""
        index, begin = _row_place(self.wheel, self.seq)
        is_kept = disk.is_durable(self.path, self.offset, self.offset + len(self.content))
        return is_kept and disk.is_durable(index, begin, begin + INDEX_ROW_LENGTH_BYTES)

    def _is_written(self, disk: SimulatedDisk, *, with_row: bool) -> bool:
        file, end = disk.peek(self.path), self.offset + len(self.content)
        if file is None or file[self.offset : end] != self.content:
            return False
        return not with_row or self.row == row_on(disk, self.wheel, self.seq)

    def _is_readable(self, disk: SimulatedDisk) -> bool:
        return disk.is_readable(self.path, self.offset, self.offset + len(self.content))

    def is_behind_bad_sector(self, disk: SimulatedDisk) -> bool:
        """Whether a disk has it, and its row in a page of the index that cannot be read."""
        is_written = self._is_written(disk, with_row=True)
        return is_written and not _is_row_readable(disk, self.wheel, self.seq)

    def is_in_deleted_file(self, disk: SimulatedDisk) -> bool:
        """Whether a disk has it in a deleted file, where no process reads it."""
        file = disk.peek_unlinked(self.path)
        return (
            file is not None and file[self.offset : self.offset + len(self.content)] == self.content
        )


def index_of(wheel: WheelId, seq: int) -> Path:
    """The segment of a wheel's index in which a frame has its row."""
    return _row_place(wheel, seq)[0]


def _row_place(wheel: WheelId, seq: int) -> tuple[Path, int]:
    """The segment in which a frame has its row, and where that begins."""
    segment, place = divmod(seq - 1, files_index.ROWS_PER_SEGMENT)
    path = layout.index_path(layout.wheel_folder(DATA, wheel), segment)
    return path, place * INDEX_ROW_LENGTH_BYTES


def row_on(disk: SimulatedDisk, wheel: WheelId, seq: int) -> bytes:
    """The index row of a frame; empty when there is none."""
    path, begin = _row_place(wheel, seq)
    index, end = disk.peek(path), begin + INDEX_ROW_LENGTH_BYTES
    if index is None or len(index) < end:
        return b""
    return bytes(index[begin:end])


def _is_row_readable(disk: SimulatedDisk, wheel: WheelId, seq: int) -> bool:
    """Whether a row lies in a page with a bad sector: larger reads find holes there."""
    path, begin = _row_place(wheel, seq)
    begin = begin // PAGE_BYTES * PAGE_BYTES
    return disk.is_readable(path, begin, begin + PAGE_BYTES)


def rows_on(disk: SimulatedDisk, wheel: WheelId) -> int:
    """The seq of the last complete row of an index."""
    names = disk.list_quietly(layout.wheel_folder(DATA, wheel))
    segments = [number for number in map(layout.index_segment, names) if number is not None]
    if not segments:
        return 0
    last = max(segments) * files_index.ROWS_PER_SEGMENT
    index = disk.peek(index_of(wheel, last + 1))
    return last + (0 if index is None else len(index) // INDEX_ROW_LENGTH_BYTES)


class RewrittenError(Exception):
    """One seq of a wheel was written twice, with different bytes."""


class Truth:
    """All frames.

    Attributes:
        frames: by wheel and seq.
        copies: for each message, the frames that hold it.
        cancels: for each message, the frames that cancel it.
        commits: for each half, the frames that commit or release it.
        had: (storage, boot, wheel) -> the greatest seq up to which that disk held the wheel while
            its machine ran under that boot id.
    """

    def __init__(self) -> None:
        self.frames: dict[FrameName, FrameTruth] = {}
        self.copies: defaultdict[Key, list[FrameName]] = defaultdict(list)
        self.cancels: defaultdict[Key, list[FrameName]] = defaultdict(list)
        self.commits: defaultdict[Key, list[FrameName]] = defaultdict(list)
        self.had: defaultdict[tuple[str, str, WheelId], int] = defaultdict(int)
        self._last: defaultdict[WheelId, int] = defaultdict(int)
        self._unread: defaultdict[WheelId, set[int]] = defaultdict(set)
        self._live: dict[FrameName, FrameTruth] = {}

    def look(self, disk: SimulatedDisk, wheel: WheelId) -> list[FrameTruth]:
        """Records the frames of a wheel that a disk has, and that nobody has looked at yet.

        What cannot be read there is looked for again, on each disk.
        """
        known, last = self._last[wheel], rows_on(disk, wheel)
        new = []
        for seq in (*sorted(self._unread[wheel]), *range(known + 1, last + 1)):
            frame = _read(disk, wheel, seq)
            if frame is None:
                self._unread[wheel].add(seq)
            else:
                self._unread[wheel].discard(seq)
                self._add(frame)
                new.append(frame)
        self._last[wheel] = max(known, last)
        return new

    def is_known(self, wheel: WheelId, to_seq: int) -> bool:
        """Whether each frame of a wheel was looked at, up to here."""
        return to_seq <= self._last[wheel] and not self._unread[wheel]

    @property
    def is_all_read(self) -> bool:
        """Whether each frame that was found could be read."""
        return not any(self._unread.values())

    def check_again(self, disk: SimulatedDisk, wheel: WheelId) -> None:
        """Checks that a wheel reads as it was first written.

        Raises:
            RewrittenError: it is not.
        """
        self.look(disk, wheel)
        for seq in range(1, rows_on(disk, wheel) + 1):
            known = self.frames.get((wheel, seq))
            if known is None or known.is_on(disk, with_row=True):
                continue
            frame = _read(disk, wheel, seq)
            if frame is not None and frame.content != known.content:
                raise RewrittenError(f"{wheel}/{seq} is another frame")

    def held(self, storage: str, boot: str, wheel: WheelId, prefix: int) -> None:
        """Notes that a disk holds a wheel up to here."""
        place = storage, boot, wheel
        self.had[place] = max(self.had[place], prefix)

    def ever_had(self, storage: str, wheel: WheelId) -> int:
        """The greatest seq up to which a disk ever held a wheel."""
        places = (place for place in self.had if place[0] == storage and place[2] == wheel)
        return max((self.had[place] for place in places), default=0)

    def last_seq(self, wheel: WheelId) -> int:
        """The last seq that was ever written."""
        return self._last[wheel]

    def live(self, floor: int) -> Collection[FrameTruth]:
        """Yields frames whose slots are not below the floor."""
        finished = [name for name, frame in self._live.items() if frame.slot < floor]
        for name in finished:
            del self._live[name]
        return self._live.values()

    def are_gone(self, names: Collection[FrameName]) -> bool:
        """Whether there were frames of these names, and no disk has any of them."""
        frames = [self.frames.get(name) for name in names]
        return bool(frames) and all(frame is not None and frame.gone for frame in frames)

    def is_any_gone(self, names: Iterable[FrameName]) -> bool:
        """Whether one of these frames was lost."""
        return any(self.frames[name].gone for name in names)

    def of_wheel(self, wheel: WheelId) -> Iterator[FrameTruth]:
        """The frames of a wheel, in order."""
        for seq in range(1, self._last[wheel] + 1):
            frame = self.frames.get((wheel, seq))
            if frame is not None:
                yield frame

    def _add(self, frame: FrameTruth) -> None:
        name = frame.wheel, frame.seq
        self.frames[name] = self._live[name] = frame
        places = {Kind.MESSAGES: self.copies, Kind.CANCELS: self.cancels}
        for key in frame.keys:
            places.get(frame.kind, self.commits)[key].append(name)


def _read(disk: SimulatedDisk, wheel: WheelId, seq: int) -> FrameTruth | None:
    """A frame as a disk has it; None: it cannot be read, or has no row there."""
    found = row_on(disk, wheel, seq)
    if not any(found):  # its segment is deleted, or it is finished
        return None
    row = checked_rows(raw_rows(found))[0]
    if int(row["length"]) == 0:
        return None
    slot, offset = int(row["slot"]), int(row["offset"])
    path = layout.slot_path(layout.wheel_folder(DATA, wheel), slot)
    for file in (disk.peek(path), disk.peek_unlinked(path)):
        if file is None:
            continue
        content = bytes(file[offset : offset + int(row["length"])])
        try:
            frame = decode_frame(content, wheel=wheel, slot=slot, seq=seq)
        except FrameDamaged:
            continue
        return _truth(frame, offset, path, content)
    return None


def _truth(frame: Frame, offset: int, path: Path, content: bytes) -> FrameTruth:
    columns = frame.columns
    return FrameTruth(
        wheel=frame.wheel,
        seq=frame.seq,
        slot=frame.slot,
        offset=offset,
        path=path,
        row=index_row_of(frame, offset),
        content=content,
        kind=frame.kind,
        keys=tuple(key_of(columns, row) for row in range(len(columns))),
    )


def key_in(headers: Mapping[str, bytes | None], topic: str) -> Key:
    """The message that a leader's record in a topic is about: perhaps it goes elsewhere later."""
    id_, due_ms = headers.get("dw-id") or b"", headers.get("dw-due") or b"0"
    named = (headers.get(name) for name in (HALF_TOPIC, TOPIC, "dw-dead-topic"))
    goes_to = next((each.decode() for each in named if each), topic)
    return MessageKey(bytes.fromhex(id_.decode()), int(due_ms), goes_to)
