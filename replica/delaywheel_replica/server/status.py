"""What this node tells of itself (``server.row``), and what its cleaner tells (``cleaner.row``).

The beat is made anew each time from what the parts know at that moment; nothing is counted
along. It is written every 100 ms by a thread that does nothing else and never waits for a disk,
so that a busy node is not taken for a dead one; and at once when the high watermark moves.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.nodefile import NodeFolder
from delaywheel.row import RowReader, RowWriter
from delaywheel_replica.core.beat import Beat, FenceAnswer, Office, WheelBeat
from delaywheel_replica.core.fields import MalformedError
from delaywheel_replica.core.status import CleanerStatus, Role, ServerStatus
from delaywheel_replica.server.committer import Line

BEAT_S: Final = 0.1


def wall_ms() -> int:
    """The wall clock in Unix milliseconds."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """The monotonic clock; the same in all processes of this machine."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class HeldWheel:
    """A wheel of which there are files here and which nobody writes any more.

    Attributes:
        applied: the last frame that is here.
        top_slot: the greatest slot of a frame; -1: there is none.
        final_seq: T once it is closed.
    """

    applied: int
    top_slot: int
    final_seq: int | None = None


@dataclass(slots=True)
class Cleaner:
    """The newest that was read of the cleaner's row."""

    status: CleanerStatus | None = None

    def fresh(self) -> CleanerStatus | None:
        """The status, if the cleaner lives; what it says is committed stays true without that."""
        status = self.status
        return status if status is not None and status.is_fresh(monotonic_ms()) else None

    def leading(self) -> CleanerStatus | None:
        """The status, if the cleaner lives and leads."""
        status = self.fresh()
        return status if status is not None and status.role is Role.LEADING else None

    @property
    def leader_clock_ms(self) -> int | None:
        """The leader's clock as it reads now; None while nobody here is heard to lead."""
        status, now_ms = self.status, monotonic_ms()
        if status is None or not status.is_in_office(now_ms):
            return None
        return status.wall_ms + now_ms - status.monotonic_ms

    @property
    def office(self) -> Office | None:
        """What the node tells as leader; None while its cleaner is not in office."""
        status = self.status
        if status is None or status.epoch is None or not status.is_in_office(monotonic_ms()):
            return None
        return Office(status.epoch, status.fences, status.fills)


@dataclass(slots=True)
class NodeView:
    """What the parts of the server know of the node; each field has one writer.

    Attributes:
        folder: node.json; written by the wheel keeper.
        boot_id: of the machine's start.
        line: the wheel in use, asked of the committer.
        cleaner: read by the event loop.
        held: wheels not in use; replaced as a whole by the wheel keeper.
        published: up to which seq each wheel's ledger is published; replaced as a whole by the
            books.
        draining: no more messages are taken.
        answers: the newest promise about each node's wheels; replaced as a whole by the wheel
            keeper.
    """

    folder: NodeFolder
    boot_id: str
    line: Callable[[], Line | None] = lambda: None
    cleaner: Cleaner = field(default_factory=Cleaner)
    held: Mapping[WheelId, HeldWheel] = field(default_factory=dict)
    published: Mapping[WheelId, int] = field(default_factory=dict)
    draining: bool = False
    answers: Mapping[str, FenceAnswer] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the node holds all that it ever acknowledged."""
        state = self.folder.state
        return not state.all_incomplete and not state.incomplete

    def beat(self, count: int = 0) -> Beat:
        """What the node tells now.

        Args:
            count: of the beats that it has told since its start.
        """
        state, status = self.folder.state, self.cleaner.status
        line = self.line()
        wheels = {
            wheel: WheelBeat(
                applied=held.applied,
                high_watermark=held.applied,
                seal_slot=0,
                seal_seq=0,
                ledger_seq=self.published.get(wheel, 0),
                top_slot=held.top_slot,
            )
            for wheel, held in self.held.items()
        }
        if state.spare is not None:
            wheels[state.spare.wheel] = WheelBeat(0, 0, state.spare.seal_slot, 0, 0, -1)
        if line is not None:
            origin = line.origin
            wheels[line.wheel] = WheelBeat(
                applied=origin.last_seq,
                high_watermark=origin.high_watermark,
                seal_slot=origin.seal.slot,
                seal_seq=origin.seal.seq,
                ledger_seq=self.published.get(line.wheel, 0),
                top_slot=line.top_slot,
            )
        return Beat(
            node=state.node,
            storage=state.storage,
            boot=self.boot_id,
            wall_ms=wall_ms(),
            open=state.open,
            spare=state.spare.wheel if state.spare is not None else None,
            last_number=state.last_number,
            draining=self.draining,
            complete=self.complete,
            wheels=wheels,
            start=state.starts,
            count=count,
            floor=None if status is None else status.floor,
            office=self.cleaner.office,
        )

    def lacks(self) -> dict[tuple[WheelId, int], frozenset[str]]:
        """Frames that no member has: the only one, if its cleaner could not read them.

        What the open wheel has not come to yet is not lacking.
        """
        status, line = self.cleaner.status, self.line()
        if status is None:
            return {}
        alone = frozenset([self.folder.state.node])
        return {
            (wheel, seq): alone
            for wheel, seq in status.unreadable - status.lost
            if line is None or wheel != line.wheel or seq <= line.origin.last_seq
        }


class StatusRow:
    """Writes ``server.row``."""

    def __init__(self, path: Path, view: NodeView, *, before: Callable[[], None]) -> None:
        """Prepares; ``start`` starts the thread.

        Args:
            path: of the row.
            view: what is told.
            before: called before each regular beat, on its thread; must not block.
        """
        self._row = RowWriter(path)
        self._view = view
        self._before = before
        self._lock = threading.Lock()
        self._count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        """Begins to tell."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def write(self) -> None:
        """Writes the row now; from any thread."""
        with self._lock:
            self._count += 1
            status = ServerStatus(
                beat=self._view.beat(self._count),
                pid=os.getpid(),
                monotonic_ms=monotonic_ms(),
                answers=tuple(self._view.answers.values()),
                lacks=self._view.lacks(),
            )
            self._row.write(status.to_json())

    def _run(self) -> None:
        while not self._ended.is_set():
            self._before()
            self.write()
            self._ended.wait(BEAT_S)


class CleanerRow:
    """Reads ``cleaner.row``."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._row = RowReader(path)
        self._boot_id = boot_id

    def read(self) -> CleanerStatus | None:
        """The newest status of this boot; None when there is none, or none that we understand."""
        status = self.read_any()
        return status if status is not None and status.boot == self._boot_id else None

    def read_any(self) -> CleanerStatus | None:
        """The last status that was ever written here, of an earlier boot perhaps."""
        document = self._row.read()
        if document is None:
            return None
        try:
            return CleanerStatus.from_json(document)
        except MalformedError:
            return None
