"""Finds topics of messages that will be due soon, on every node, whether it leads or not.

A leader needs Kafka's answer about a topic before it forwards to it, and an answer about a topic's
limits costs the broker half a millisecond of CPU. With a thousand topics a new leader would wait
for half a second. So each node looks at the next second with messages of each wheel now and then,
and keeps the answers about their topics fresh: a sample suffices (a second of 300 messages takes
6 ms), since a topic that it misses is asked about when its second is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.storage.files.wheel_folder import list_wheels
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.reading.decoding import FrameBatch
from delaywheel.storage.reading.reader import WheelReader

NEAREST_S: Final = 2
"""The leader itself loads what is nearer."""

WITHIN_S: Final = 60
MESSAGES_MOST: Final = 10_000
"""No further batch is read once so many messages were: some 20 ms of CPU."""


class TopicsSoon:
    """Samples the coming seconds of a node's wheels. For one thread."""

    def __init__(self, disk: Disk, data: Path, wall_ms: Callable[[], int]) -> None:
        self._disk = disk
        self._data = data
        self._wall_ms = wall_ms

    def names(self) -> set[str]:
        """Returns topics of messages that are due soon; what cannot be read is left out."""
        found: set[str] = set()
        try:
            for wheel in list_wheels(self._disk, self._data):
                for batch in self._batches(wheel):
                    found.update(batch.columns.topics)
        except (OSError, ValueError):
            pass  # the leader's own reading reports it; a wheel may have been deleted meanwhile
        return found

    def _batches(self, wheel: WheelId) -> Iterator[FrameBatch]:
        first = self._wall_ms() // 1000 + NEAREST_S
        messages = 0
        with closing(WheelReader(self._disk, self._data, wheel)) as reader:
            for slot in reader.slots(first, first + WITHIN_S)[:1]:
                for batch in reader.slot_batches(slot, reader.last_seq()):
                    if not isinstance(batch, FrameBatch):
                        continue
                    yield batch
                    messages += len(batch.columns)
                    if messages >= MESSAGES_MOST:
                        return
