"""Which wheels' ledgers this node publishes, and how far.

=========================================  ==============  ===================================
a wheel that is held here                  is published    up to
                                           by
=========================================  ==============  ===================================
own, not closed                            this node       the frames that W members hold: its
                                                           high watermark
own, closed at T                           this node       T, as far as it is held here
another's, closed at T, its node is lost   the leader's    likewise
                                           node
another's, otherwise                       its own node
=========================================  ==============  ===================================

A node is lost for a wheel if

- an operator replaced its folder or removed it: it never comes back; or
- it runs on another folder than the wheel's, which may or may not come back; or
- no node heard it for `LOST_MS`, and this node has been able to hear it for as long.

It may come back after all and publish, too. A node that publishes what another might also publish
looks at the names first; files that still overlap have the same rows, and readers drop the second
ones. The leader holds every frame of a closed wheel that counts, or it would not lead; a member
that is missing something never publishes for others.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader.failure_detector import ages_ms
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.status_files import CleanerStatus, ServerStatus

LOST_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Publishable:
    """How far a wheel's ledger may be published.

    Attributes:
        last_seq: Up to here it may be published.
        reported_seq: Up to here some node reported it as published or given up.
        born_ms: Nothing of it was accepted before.
        is_sole: No other node may publish it.
        is_whole: It is closed, and `last_seq` is its end.
        floor: Frames for earlier slots were published or given up, and their files are deleted.
    """

    last_seq: int
    reported_seq: int = 0
    born_ms: int = 0
    is_sole: bool = True
    is_whole: bool = False
    lost: FrameSet = NO_FRAMES
    floor: int = 0


def publishable(
    status: ServerStatus, cleaner: CleanerStatus | None, *, leads: bool, heard_for_ms: int
) -> dict[WheelId, Publishable]:
    """Returns everything that this node publishes.

    Args:
        leads: Whether the cleaner lives and leads.
        heard_for_ms: For how long the server has been able to hear other nodes.
    """
    heartbeat = status.heartbeat
    records: Mapping[WheelId, WheelRecord] = {} if cleaner is None else cleaner.wheels
    found: dict[WheelId, Publishable] = {}
    for wheel in heartbeat.wheels:
        record = records.get(wheel)
        is_own = wheel.node == heartbeat.node and (
            record is None or record.members.get(wheel.node) == heartbeat.storage
        )
        if is_own and wheel != heartbeat.spare:
            found[wheel] = _publishable(wheel, heartbeat, record, cleaner)
        elif not is_own and leads and record is not None and record.closed_at is not None:
            assert cleaner is not None
            if _is_lost(wheel, record, status, cleaner, heard_for_ms):
                found[wheel] = _publishable(wheel, heartbeat, record, cleaner)
    return found


def published_seqs(status: ServerStatus) -> dict[WheelId, int]:
    """Returns each wheel of which this node has files, and up to where it is known as published."""
    heartbeat = status.heartbeat
    known = dict.fromkeys(heartbeat.verifying, 0)
    known.update((wheel, reported.ledger_seq) for wheel, reported in heartbeat.wheels.items())
    return known


def registered(cleaner: CleanerStatus | None) -> Collection[WheelId] | None:
    """Returns the registered wheels; None if they were never read, or the cleaner is dead."""
    return None if cleaner is None or cleaner.control_offset < 0 else cleaner.wheels.keys()


def _publishable(
    wheel: WheelId,
    heartbeat: Heartbeat,
    record: WheelRecord | None,
    cleaner: CleanerStatus | None,
) -> Publishable:
    reported = heartbeat.wheels[wheel]
    closed_at = None if record is None else record.closed_at
    lost = NO_FRAMES if cleaner is None else cleaner.lost.of_wheel(wheel)
    end = lost.seqs(wheel).end_from(reported.prefix)
    last_seq = min(end, reported.high_watermark if closed_at is None else closed_at)
    return Publishable(
        last_seq=last_seq,
        reported_seq=reported.ledger_seq,
        born_ms=0 if record is None else record.seal_slot * 1000,
        is_sole=closed_at is None,
        is_whole=last_seq == closed_at,
        lost=lost,
        floor=heartbeat.floor or 0,
    )


def _is_lost(
    wheel: WheelId,
    record: WheelRecord,
    status: ServerStatus,
    cleaner: CleanerStatus,
    heard_for_ms: int,
) -> bool:
    node = wheel.node
    if node not in cleaner.control.remaining(record):
        return True
    known = status.peers.get(node)
    if known is not None and known.heartbeat.storage != record.members[node]:
        return True
    age_ms = ages_ms(status, status.monotonic_ms).get(node, heard_for_ms)
    return min(age_ms, heard_for_ms) >= LOST_MS
