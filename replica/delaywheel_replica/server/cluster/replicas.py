"""Which nodes hold how much of each registered wheel, as this node knows it, and how far each lags.

| a member of a wheel | is shown as |
|---|---|
| whose folder was replaced while the wheel is not closed, or that was removed | gone |
| that is not heard, or runs on another folder than the registered one | away |
| that the wheel's own node waits for | in sync |
| that cannot read some of it, or reports that it may have lost something | incomplete |
| that is missing something, or holds all and is not waited for | behind |

Which members a wheel's node waits for is known only there, while the wheel is open. For wheels that
are not open, and on other nodes, a member that holds everything up to the known end is in sync.

Lag is given twice. In frames: those up to the end that the member did not have in its last report.
In time: how long ago the oldest of these that is not finished yet was accepted. That long ago the
member held everything: the two are the same moment. It is read from the frame itself, so it
survives restarts, and compares the clock of the wheel's node with the own one.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.failure_detector import ages_ms
from delaywheel_replica.core.leader.holders import held_prefix
from delaywheel_replica.core.protocol.control import ControlState, WheelRecord
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.status_files import ServerStatus
from delaywheel_replica.server.node.node_view import heartbeats_heard

# Index rows examined at once, and how often: a member that is missing more has no lag in time.
_PIECE_ROWS: Final = 1 << 16
_PIECES: Final = 64


@dataclass(frozen=True, slots=True)
class _KnownMember:
    """What is known of a node that may be a member; one that is heard reaches this node."""

    heartbeat: Heartbeat
    reported_ago_ms: int
    is_heard: bool


def replicas_of(
    control: ControlState, status: ServerStatus, in_sync: Collection[str]
) -> dict[WheelId, list[pb.Replica]]:
    """Returns the members of every registered wheel; `lag_ms` only where nothing is missing."""
    known_members = _known_members(status)
    found = {}
    for wheel, record in control.wheels.items():
        waited_for = in_sync if wheel == status.heartbeat.open and in_sync else None
        looks = _Looks(control, wheel, record, known_members, waited_for)
        found[wheel] = [looks.at(node) for node in sorted(record.members)]
    return found


def _known_members(status: ServerStatus) -> dict[str, _KnownMember]:
    heard, ages = heartbeats_heard(status), ages_ms(status, status.monotonic_ms)
    return {
        node: _KnownMember(heartbeat, ages[node], node in heard)
        for node, heartbeat in status.heartbeats.items()
        if node in ages
    }


class _Looks:
    """What is known of one wheel's members."""

    def __init__(
        self,
        control: ControlState,
        wheel: WheelId,
        record: WheelRecord,
        known_members: Mapping[str, _KnownMember],
        waited_for: Collection[str] | None,
    ) -> None:
        self._control = control
        self._wheel = wheel
        self._record = record
        self._known_members = known_members
        self._waited_for = waited_for
        self._holders = control.holders(record)
        reported = [
            known.heartbeat.wheels[wheel]
            for known in known_members.values()
            if wheel in known.heartbeat.wheels
        ]
        ends = [max(heartbeat.applied, heartbeat.high_watermark) for heartbeat in reported]
        self._end = max(ends, default=0) if record.closed_at is None else record.closed_at

    def at(self, node: str) -> pb.Replica:
        replica = pb.Replica(node=node)
        known = self._known_members.get(node)
        has_folder = known is not None and known.heartbeat.storage == self._holders.get(node)
        if known is not None:
            replica.told_ago_ms = known.reported_ago_ms
        if node not in self._holders:
            replica.state = pb.REPLICA_STATE_GONE
            return replica
        if known is None or not has_folder:
            replica.state = pb.REPLICA_STATE_AWAY
            return replica
        held = min(held_prefix(self._control, self._wheel, known.heartbeat), self._end)
        replica.held_seq, replica.lag_frames = held, self._end - held
        if not replica.lag_frames:
            replica.lag_ms = 0
        replica.state = self._state(node, known, lags=held < self._end)
        return replica

    def _state(self, node: str, known: _KnownMember, *, lags: bool) -> pb.ReplicaState.ValueType:
        if not known.is_heard:
            return pb.REPLICA_STATE_AWAY
        if not lags if self._waited_for is None else node in self._waited_for:
            return pb.REPLICA_STATE_IN_SYNC
        reported = known.heartbeat.wheels.get(self._wheel)
        if lags and (not known.heartbeat.complete or (reported is not None and reported.missing)):
            return pb.REPLICA_STATE_INCOMPLETE
        return pb.REPLICA_STATE_BEHIND


class Lags:
    """Measures for how long members have lagged, from the local frames. Blocks."""

    def __init__(self, disk: Disk, data: Path, *, wall_ms: Callable[[], int]) -> None:
        self._disk = disk
        self._data = data
        self._wall_ms = wall_ms

    def add_lags(self, wheel: WheelId, replicas: Collection[pb.Replica], floor: int) -> None:
        """Adds `lag_ms` to those members of a wheel that miss frames, from the floor on."""
        late = [replica for replica in replicas if replica.lag_frames]
        if not late:
            return
        with closing(WheelReader(self._disk, self._data, wheel)) as reader:
            for replica in late:
                end = replica.held_seq + replica.lag_frames
                lag_ms = self._lag_ms(reader, replica.held_seq + 1, end, floor)
                if lag_ms is not None:
                    replica.lag_ms = lag_ms

    def _lag_ms(self, reader: WheelReader, first: int, end: int, floor: int) -> int | None:
        """Returns 0 if all of these frames are finished; None if it cannot be determined here."""
        try:
            seq = _first_unfinished(reader, first, end, floor)
            frame = reader.frame(seq) if seq is not None and reader.has(seq) else None
        except OSError:
            return None
        if isinstance(frame, Frame):
            return max(0, self._wall_ms() - frame.accepted_at_ms)
        return 0 if seq == end + 1 else None


def _first_unfinished(reader: WheelReader, first: int, end: int, floor: int) -> int | None:
    """Returns the first of these frames due at or above the floor; end + 1 if there is none.

    None: it is not here, or too far away.
    """
    for _ in range(_PIECES):
        if first > end:
            return first
        rows = reader.rows(first, min(end, first + _PIECE_ROWS - 1))
        if not len(rows):
            return None
        wanted = np.flatnonzero(rows["slot"] >= floor)
        if len(wanted):
            return first + int(wanted[0])
        first += len(rows)
    return None
