"""Counts by topic what was accepted before the server started: once, in the background.

The wheels that this node accepted into before are read from the floor on, frame after frame; what
is accepted from now on goes into another wheel, and is counted as it is written. While it counts,
and where a frame cannot be read, fewer are told than there are.
"""

import threading
from collections.abc import Mapping
from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.format import Frame, Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.core.protocol.heartbeat import Beat
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.node.pending_topics import PendingTopics

_log = get_logger(__name__)


class Census:
    """Counts on a thread of its own."""

    def __init__(self, disk: Disk, data: Path, pending: PendingTopics) -> None:
        """Prepares.

        Args:
            disk: where the data folder lies.
            data: the data folder.
            pending: is told.
        """
        self._disk = disk
        self._data = data
        self._pending = pending
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, beat: Beat) -> None:
        """Begins to count.

        Args:
            beat: says which wheels there were, how far they are written, and the floor.
        """
        wheels = {
            wheel: told.applied
            for wheel, told in beat.wheels.items()
            if wheel.node == beat.node and wheel not in (beat.open, beat.spare)
        }
        run = threading.Thread(
            target=self._run, args=(wheels, beat.floor or 0), name="census", daemon=True
        )
        self._thread = run
        run.start()

    def stop(self) -> None:
        """Ends, whether all is counted or not."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, wheels: Mapping[WheelId, int], floor: int) -> None:
        for wheel, last_seq in wheels.items():
            reader = WheelReader(self._disk, self._data, wheel)
            try:
                self._count(reader, last_seq, floor)
            except OSError as error:
                _log.warning("not counted by topic", wheel=str(wheel), error=str(error))
            finally:
                reader.close()

    def _count(self, reader: WheelReader, last_seq: int, floor: int) -> None:
        for slot in reader.slots(floor):
            for frame in reader.slot_frames(slot, last_seq, kind=Kind.MESSAGES):
                if self._ended.is_set():
                    return
                if isinstance(frame, Frame):
                    columns = frame.columns
                    self._pending.add(columns.topics, columns.topic_numbers, columns.slots)
