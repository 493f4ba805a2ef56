"""The current own wheel, from being named open until the store reports what it holds.

| phase | node.json names it open | callers are | ends with |
|---|---|---|---|
| naming | not yet: the save is under way | refused | `Saved`; or its failure: no effect |
| making | yes | refused | `Opened`; or its failure: it is given up for good |
| open | yes | let in, while W members are in sync | a reason to leave |
| leaving | yes | refused | `Mirrored`: from then on it is held like any other; or `Left` |

Time passes while a group is written: from `begin_group` to `Written` no new seal is given, because
the group was admitted under the present one. A seal that was due meanwhile is given behind the
group; otherwise it would never move under load.

Reasons to leave: a member refused the wheel or a leader has it fenced, it is closed, its medium
broke, a frame of it cannot be read, a clock that was ahead has sealed it, a spare behind it was
given up, the node stops. Nothing
is acknowledged after the decision to leave: waiting callers get an unknown outcome.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import Spare
from delaywheel_replica.core.node.events import Effect, LeaveWheel, OpenWheel, Serve, Written
from delaywheel_replica.core.node.heard_heartbeats import HeardHeartbeats
from delaywheel_replica.core.node.shared_state import Known
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, WheelHeartbeat
from delaywheel_replica.core.protocol.messages import Applied
from delaywheel_replica.core.protocol.seal import Seal
from delaywheel_replica.core.wheels.replication import Replication

NEAR_MS = 2_000
"""Frames due sooner are announced once they are acknowledged; others by the next heartbeat."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move of the high watermark.

    Attributes:
        to: The new high watermark.
        is_near: Whether other nodes should know at once.
    """

    wheel: WheelId
    to: int
    is_near: bool


class WheelPhase(StrEnum):
    """The phase of the current wheel."""

    NAMING = "naming"
    MAKING = "making"
    OPEN = "open"
    LEAVING = "leaving"


class CurrentWheel:
    """The current wheel of one node, if there is one."""

    def __init__(self, known: Known, hearing: HeardHeartbeats) -> None:
        self._known = known
        self._hearing = hearing
        self._spare: Spare | None = None
        self._phase = WheelPhase.NAMING
        self._replication: Replication | None = None
        self._acknowledged = 0
        self._published = 0
        self._is_being_written = False
        self._is_seal_due = False
        self._near: deque[int] = deque()  # ends of groups with something near, ascending

    @property
    def in_sync(self) -> frozenset[str]:
        """The members that must hold each frame; none while no wheel is written."""
        writing = self.writing
        return frozenset() if writing is None else writing.in_sync

    @property
    def wheel(self) -> WheelId | None:
        """The current wheel."""
        return None if self._spare is None else self._spare.wheel

    @property
    def reported_open(self) -> WheelId | None:
        """The wheel that the node's heartbeat may name as open."""
        return self.wheel if self._phase in {WheelPhase.MAKING, WheelPhase.OPEN} else None

    @property
    def writing(self) -> Replication | None:
        """The open wheel, while it is written."""
        return self._replication if self._phase is WheelPhase.OPEN else None

    @property
    def is_leaving(self) -> bool:
        """Whether only the store's answer is missing."""
        return self._phase is WheelPhase.LEAVING

    @property
    def has_all_acknowledged(self) -> bool:
        """Whether every written frame is acknowledged."""
        writing = self.writing
        return writing is None or writing.high_watermark >= writing.last_seq

    # --- its life

    def name(self, spare: Spare) -> None:
        """Notes that the wheel's name is being saved as open."""
        self._spare, self._phase, self._replication = spare, WheelPhase.NAMING, None
        self._acknowledged = self._published = 0
        self._is_being_written = self._is_seal_due = False
        self._near.clear()

    def saved(self) -> list[Effect]:
        """Notes a durable state: once it has the wheel's name, the folder may be made."""
        spare = self._spare
        named = spare is not None and self._known.state.open == spare.wheel
        if spare is None or not named or self._phase is not WheelPhase.NAMING:
            return []
        self._phase = WheelPhase.MAKING
        return [OpenWheel(spare)]

    def opened(self, wheel: WheelId) -> None:
        """Notes that the folder exists: the wheel may be written."""
        spare, now_ms = self._spare, self._known.now_ms
        if spare is None or spare.wheel != wheel or self._phase is not WheelPhase.MAKING:
            return
        self._phase = WheelPhase.OPEN
        self._replication = Replication(
            self._known.config,
            wheel,
            spare.members,
            spare.min_insync,
            Seal(spare.seal_slot, 0),
            in_sync=[self._known.node, *self._heard_members(spare)],
            now_ms=now_ms,
        )
        for peer in self._hearing.others:
            heartbeat = self._hearing.direct(peer)
            if heartbeat is not None:
                self._replication.booted(peer, heartbeat.storage, heartbeat.boot, now_ms)
                self._hear(self._replication, heartbeat)

    def leave(self) -> list[Effect]:
        """Stops writing the wheel."""
        if self._spare is None or self._phase not in {WheelPhase.OPEN, WheelPhase.LEAVING}:
            return []
        self._phase = WheelPhase.LEAVING
        return [LeaveWheel(self._spare.wheel)]

    def not_named(self) -> None:
        """Notes that the save failed: named or not, the wheel was never made."""
        if self._phase is WheelPhase.NAMING:
            self.drop()

    def drop(self) -> WheelHeartbeat | None:
        """Drops the wheel; returns what was last reported of it if it was ever written."""
        reported = self.heartbeat() if self._replication is not None else None
        self._spare = self._replication = None
        self._phase = WheelPhase.NAMING
        return reported

    # --- while it is written

    def begin_group(self) -> None:
        """Notes that frames admitted by the present seal are being appended; `Written` follows."""
        self._is_being_written = True

    def written(self, event: Written) -> None:
        """Notes appended frames."""
        writing = self.writing
        if writing is None or writing.wheel != event.wheel:
            return
        self._is_being_written = False
        writing.written(event.last_seq, event.top_slot, self._known.now_ms)
        if event.least_due_ms - self._known.wall_ms < NEAR_MS:
            self._near.append(event.last_seq)
        if self._is_seal_due:
            self._seal(writing)

    def applied(self, sender: str, reported: Applied) -> None:
        """Notes what a mirror reports holding."""
        writing = self.writing
        if writing is not None and writing.wheel == reported.wheel:
            writing.applied(
                sender, reported.storage, reported.boot, reported.prefix, self._known.now_ms
            )

    def heard(self, heartbeat: Heartbeat) -> None:
        """Notes a direct heartbeat, which also reports what the mirror holds."""
        writing = self.writing
        if writing is None:
            return
        writing.booted(heartbeat.node, heartbeat.storage, heartbeat.boot, self._known.now_ms)
        self._hear(writing, heartbeat)
        reported = heartbeat.wheels.get(writing.wheel)
        prefix = 0 if reported is None else reported.prefix
        writing.applied(
            heartbeat.node, heartbeat.storage, heartbeat.boot, prefix, self._known.now_ms
        )

    def published(self, wheel: WheelId, seq: int) -> None:
        """Notes that the wheel's ledger is published up to this seq."""
        if wheel == self.wheel:
            self._published = max(seq, self._published)

    def tick(self) -> None:
        """Updates the in-sync set, and seals."""
        writing = self.writing
        if writing is None:
            return
        writing.tick(self._known.now_ms)
        if self._is_being_written:
            self._is_seal_due = True
        else:
            self._seal(writing)

    def in_sync_enough(self, now_ms: int) -> bool:
        """Whether W members are in sync."""
        writing, spare = self.writing, self._spare
        if writing is None or spare is None:
            return False
        writing.tick(now_ms)
        return len(writing.in_sync) >= spare.min_insync

    def take_move(self) -> Move | None:
        """Returns how the high watermark has moved since the last call."""
        writing = self.writing
        if writing is None or writing.high_watermark <= self._acknowledged:
            return None
        self._acknowledged = writing.high_watermark
        is_near = False
        while self._near and self._near[0] <= self._acknowledged:
            self._near.popleft()
            is_near = True
        return Move(writing.wheel, self._acknowledged, is_near)

    def pushes(self) -> list[Effect]:
        """Returns what to send to mirrors now."""
        writing, now_ms = self.writing, self._known.now_ms
        if writing is None:
            return []
        pushes = writing.pushes(now_ms, self._hearing.reachable(now_ms))
        return [
            Serve(peer, writing.wheel, first, last, again=writing.is_stalled(peer))
            for peer, first, last in pushes
        ]

    def heartbeat(self) -> WheelHeartbeat:
        """Returns the wheel's heartbeat entry."""
        replication, spare = self._replication, self._spare
        assert spare is not None
        if replication is None:
            return WheelHeartbeat(0, 0, spare.seal_slot, 0, 0, -1)
        return WheelHeartbeat(
            applied=replication.last_seq,
            high_watermark=replication.high_watermark,
            seal_slot=replication.seal.slot,
            seal_seq=replication.seal.seq,
            ledger_seq=self._published,
            top_slot=replication.top_slot,
        )

    def _hear(self, writing: Replication, heartbeat: Heartbeat) -> None:
        writing.says(heartbeat.node, is_draining=heartbeat.draining, disk_out=heartbeat.disk_out)

    def _seal(self, writing: Replication) -> None:
        known = self._known
        self._is_seal_due = False
        writing.sealed(
            own_clock_ms=known.wall_ms,
            leader_clock_ms=known.leader_clock_ms,
            late_window_s=known.config.late_window_s,
        )

    def _heard_members(self, spare: Spare) -> list[str]:
        """Returns members that are heard now with the storages the wheel was registered with."""
        heartbeats = self._hearing.heartbeats()
        return [
            node
            for node in self._hearing.reachable(self._known.now_ms)
            if spare.members.get(node) == heartbeats[node].storage
        ]
