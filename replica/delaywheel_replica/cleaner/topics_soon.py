"""Finds topics of messages that will be due soon, on every node, whether it leads or not.

A leader needs Kafka's answer about a topic before it forwards to it, and an answer about a topic's
limits costs the broker half a millisecond of CPU. With a thousand topics a new leader would wait
for half a second. So each node looks at the next second with messages of each wheel now and then,
and keeps the answers about their topics fresh: a sample suffices (a second of 300 messages takes
6 ms), since a topic that it misses is asked about when its second is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from delaywheel.storage.files.wheel_folder import list_wheels
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.reading.decoding import FrameBatch
from delaywheel.storage.reading.reader import WheelReader

NEAREST_S: Final = 2
"""The leader itself loads what is nearer."""

WITHIN_S: Final = 60
MESSAGES_MOST: Final = 10_000
"""No further batch is read once so many messages were: some 20 ms of CPU."""


def topics_soon(disk: Disk, data: Path, now_ms: int) -> set[str]:
    """Returns topics of messages that are due soon; what cannot be read is left out."""
    found: set[str] = set()
    first = now_ms // 1000 + NEAREST_S
    try:
        for wheel in list_wheels(disk, data):
            with closing(WheelReader(disk, data, wheel)) as reader:
                for batch in _batches(reader, first):
                    found.update(batch.columns.topics)
    except (OSError, ValueError):
        pass  # the leader's own reading reports it; a wheel may have been deleted meanwhile
    return found


def _batches(reader: WheelReader, first: int) -> Iterator[FrameBatch]:
    messages = 0
    for slot in reader.slots(first, first + WITHIN_S)[:1]:
        for batch in reader.slot_batches(slot, reader.last_seq()):
            if not isinstance(batch, FrameBatch):
                continue
            yield batch
            messages += len(batch.columns)
            if messages >= MESSAGES_MOST:
                return
