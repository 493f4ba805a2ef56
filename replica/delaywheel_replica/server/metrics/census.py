"""Counts messages that were accepted before the start, by topic: once, in the background.

It reads, frame by frame, the wheels into which this node accepted messages before, each once it is
verified: until then nobody knows what it holds. New messages go to another wheel and are counted as
they are written. While it counts, and if a frame cannot be read, metric and quotas see too few.
"""

import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.storage.files.wheel_folder import list_wheels
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.decoding import FrameBatch
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.node.pending_topics import PendingTopics

_PAUSE_FACTOR: Final = 4
"""It pauses this many times as long as it works, so that it uses a fifth of a core at most."""

_LOOKS_EVERY_S: Final = 0.5
"""Whether more wheels are verified."""

_log = get_logger(__name__)


class Census:
    """Counts on its own thread."""

    def __init__(
        self, disk: Disk, data: Path, pending: PendingTopics, heartbeat: Callable[[], Heartbeat]
    ) -> None:
        self._disk = disk
        self._data = data
        self._pending = pending
        self._heartbeat = heartbeat
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to count the wheels that have folders now, but those for new messages."""
        first = self._heartbeat()
        every = list_wheels(self._disk, self._data)
        wheels = {wheel for wheel in every if wheel.node == first.node}
        self._thread = threading.Thread(
            target=self._run, args=(wheels - {first.open, first.spare},), name="census", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stops, even if not everything is counted."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, wheels: set[WheelId]) -> None:
        while wheels and not self._ended.is_set():
            verified = wheels - self._heartbeat().verifying
            if not verified:
                self._ended.wait(_LOOKS_EVERY_S)
                continue
            wheel = min(verified)
            wheels -= {wheel}
            try:
                with closing(WheelReader(self._disk, self._data, wheel)) as reader:
                    self._count(reader)
            except OSError as error:
                _log.warning("not counted by topic", wheel=str(wheel), error=str(error))

    def _count(self, reader: WheelReader) -> None:
        last_seq = reader.last_seq()
        for slot in reader.slots():
            began_s = time.thread_time()
            for batch in reader.slot_batches(slot, last_seq):
                if isinstance(batch, FrameBatch) and batch.kind is Kind.MESSAGES:
                    self._pending.add(batch.columns)
            if self._ended.wait(_PAUSE_FACTOR * (time.thread_time() - began_s)):
                return
