"""Counts pending messages that lie on one node only, although others should have them.

After a disk was replaced its node copies closed wheels from the others. Until it has, the loss of
another disk may lose messages, and the loss of a node may delay them.
"""

from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.rows import message_counts
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.core.leader.holders import held_alone
from delaywheel_replica.core.protocol.status_files import CleanerStatus, ServerStatus
from delaywheel_replica.server.node.node_view import done_slot, wall_ms

# Index rows examined at once, and how often for one wheel: then the count is too low.
_PIECE_ROWS: Final = 1 << 16
_PIECES: Final = 64


def alone_messages(
    disk: Disk, data: Path, cleaner: CleanerStatus | None, status: ServerStatus
) -> int:
    """Returns how many pending messages only this node has, as far as it knows. Blocks."""
    if cleaner is None:
        return 0
    alone = held_alone(cleaner.control, status.heartbeats)
    own = {w: (first, last) for w, (node, first, last) in alone.items() if node == cleaner.node}
    slot = done_slot(cleaner.progress, wall_ms())
    return sum(pending_messages(disk, data, own, slot).values())


def pending_messages(
    disk: Disk, data: Path, frames: Mapping[WheelId, tuple[int, int]], done_slot: int
) -> dict[WheelId, int]:
    """Returns how many messages, due from `done_slot` on, of some frames are pending. Blocks.

    This node holds the frames: the first and the last of each wheel.
    """
    return {
        wheel: _pending(WheelReader(disk, data, wheel), first, last, done_slot)
        for wheel, (first, last) in frames.items()
    }


def _pending(reader: WheelReader, first: int, last: int, done_slot: int) -> int:
    messages = 0
    with closing(reader), suppress(OSError):  # the disk's trouble is reported elsewhere
        for begin in range(first, last + 1, _PIECE_ROWS)[:_PIECES]:
            rows = reader.rows(begin, min(last, begin + _PIECE_ROWS - 1))
            is_pending = rows["slot"] >= done_slot
            messages += int(np.sum(message_counts(rows[is_pending])))
    return messages
