"""The current own wheel, from being named open until the store reports what it holds.

| phase | node.json names it open | callers are | ends with |
|---|---|---|---|
| naming | not yet: the save is under way | refused | `Saved`; or its failure: no effect |
| making | yes | refused | `Opened`; or its failure: it is given up for good |
| open | yes | let in, while W members are in sync | a reason to leave |
| leaving | yes | refused | `Mirrored`: from then on it is held like any other; or `Left` |

Time passes while a group is written: the seal by which it was admitted is held until `Written`. A
seal that was due meanwhile is given behind the group; otherwise it would never move under load.

Reasons to leave: a member refused the wheel or a leader has it fenced, it is closed, its medium
broke, a frame of it cannot be read, a clock that was ahead has sealed it, a spare behind it was
given up, the node stops. Nothing is acknowledged after the decision to leave: waiting callers get
an unknown outcome.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import Spare
from delaywheel_replica.core.node.events import (
    Acknowledge,
    Effect,
    LeaveWheel,
    MemberConfig,
    OpenWheel,
    Serve,
    Written,
)
from delaywheel_replica.core.node.heard_heartbeats import HeardHeartbeats
from delaywheel_replica.core.node.shared_state import Known
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, WheelHeartbeat
from delaywheel_replica.core.protocol.messages import Applied
from delaywheel_replica.core.protocol.seal import Seal, next_seal

NEAR_MS = 2_000
"""Frames due sooner are announced once they are acknowledged; others by the next heartbeat."""


@dataclass(slots=True)
class _Mirror:
    """What the origin knows of one mirror.

    Attributes:
        storage: As registered.
        in_sync: Its answers are waited for.
        drains: It reports that it is stopping on purpose.
        disk_out: It reports that its disk accepts no frames.
        heard_ms: When it last reported what it holds.
        boot: The newest boot heard; None: none yet.
        has_disk: The storage last heard is the registered one.
        prefix: It reported holding everything up to here.
        pushed: Everything up to here is held or under way.
        progress_ms: Since when nothing under way was answered.
        stalled: What was under way counts as lost, and nothing was answered since.
    """

    storage: str
    in_sync: bool
    heard_ms: int
    drains: bool = False
    disk_out: bool = False
    boot: str | None = None
    past_boots: set[str] = field(default_factory=set)
    has_disk: bool = False
    prefix: int = 0
    pushed: int = 0
    progress_ms: int = 0
    stalled: bool = False


class Replication:
    """An open wheel: what members hold, what is acknowledged, and what to push.

    In-sync as in Kafka. A mirror was last *caught up* when it held everything up to the end of that
    moment, and reported so or was heard since.

    | a mirror | when |
    |---|---|
    | leaves the set | it is behind and was not caught up for longer than `insync_timeout_ms` |
    | leaves the set | its machine restarted, or has another disk: what it held may be lost |
    | leaves the set | it drains, and W are left without it; back when heard and they are not |
    | leaves the set | it reports that its disk accepts no frames |
    | comes back | it reports holding what is acknowledged, and the end of that time ago |

    So an idle wheel keeps its mirrors, heard or not, and accepts its next message; a mirror that
    has then not been heard for the timeout is not waited for. Under steady load a mirror never
    reports to hold the very end, because more is written before its answer arrives: a little less
    brings it back.

    Pushes follow one another while answers are under way:

    | a mirror that | is pushed | at most |
    |---|---|---|
    | has no disk for it | nothing | 0 |
    | answers | what follows on what was pushed | `in_flight_frames` beyond its answer |
    | made no progress for `fetch_timeout_ms` | what follows on its answer, again | `batch_frames` |
    | was not heard, or had another disk | what follows on its answer, again | as above |

    Invariants:
    - The high watermark never decreases, never passes the last seq written, and only passes a seq
      that every in-sync member, and at least W members, reported holding.
    - No mirror reports more than was written: one that does has frames of a later life of this
      folder, which is an older copy then (core/node/rolled_back.py).
    - A mirror's report counts only from the storage that the wheel was registered with, and only
      under the newest boot that was heard of it: what it reported before its machine crashed may be
      lost. A boot that was followed by another never counts again, however late its messages
      arrive.
    - Under one boot a mirror's report is never withdrawn: the mirror itself repairs frames damaged
      since, and cannot report to hold anything beyond them until then.
    - No seal is ever withdrawn (core/protocol/seal.py).

    Attributes:
        last_seq: The last seq written.
        top_slot: The greatest slot of a frame; -1: there is none.
        high_watermark: The greatest seq that is acknowledged.
        seal: The promise given last.
    """

    def __init__(
        self,
        config: MemberConfig,
        wheel: WheelId,
        members: Mapping[str, str],
        min_insync: int,
        seal: Seal,
        *,
        in_sync: Iterable[str],
        now_ms: int,
    ) -> None:
        """Begins before the first frame, with the newest seal that was reported for the wheel.

        Args:
            members: Node -> storage, as registered; W likewise.
            in_sync: Members that are heard now.
        """
        self.wheel = wheel
        self.last_seq = 0
        self.top_slot = -1
        self.high_watermark = 0
        self.seal = seal
        self._config = config
        self._min_insync = min_insync
        heard = frozenset(in_sync)
        self._mirrors = {
            node: _Mirror(storage, node in heard, now_ms)
            for node, storage in sorted(members.items())
            if node != config.node
        }
        # (since when, the end from then on); the first of them is as old as the timeout.
        self._ends = deque([(now_ms, 0)])

    @property
    def in_sync(self) -> frozenset[str]:
        """The members that must hold each frame, the origin included."""
        mirrors = (node for node, mirror in self._mirrors.items() if mirror.in_sync)
        return frozenset({self._config.node, *mirrors})

    def written(self, last_seq: int, top_slot: int, now_ms: int) -> None:
        """Notes frames written at the origin, up to this seq."""
        self.last_seq = last_seq
        self.top_slot = max(self.top_slot, top_slot)
        self._ends.append((now_ms, last_seq))
        self._raise_high_watermark()

    def booted(self, peer: str, storage: str, boot: str, now_ms: int) -> None:
        """Notes that a peer was heard directly, with this storage and boot.

        A report from another storage says nothing about the registered one.
        """
        mirror = self._mirrors.get(peer)
        if mirror is None:
            return
        mirror.has_disk = storage == mirror.storage
        mirror.in_sync = mirror.in_sync and mirror.has_disk
        if not mirror.has_disk or boot == mirror.boot or boot in mirror.past_boots:
            return
        if mirror.boot is not None:
            mirror.past_boots.add(mirror.boot)
            mirror.in_sync = False
            mirror.prefix = mirror.pushed = 0
        mirror.boot = boot
        mirror.progress_ms = now_ms

    def says(self, peer: str, *, is_draining: bool, disk_out: bool) -> None:
        """Notes whether a peer is stopping, and whether its disk accepts frames."""
        mirror = self._mirrors.get(peer)
        if mirror is None:
            return
        mirror.drains, mirror.disk_out = is_draining, disk_out
        if mirror.in_sync and not self._is_wanted(mirror):
            mirror.in_sync = False
            self._raise_high_watermark()

    def applied(self, peer: str, storage: str, boot: str, prefix: int, now_ms: int) -> None:
        """Notes the seq up to which a mirror reports holding everything."""
        mirror = self._mirrors.get(peer)
        if mirror is None or not mirror.has_disk:
            return
        if (storage, boot) != (mirror.storage, mirror.boot) or prefix > self.last_seq:
            return
        mirror.heard_ms = now_ms
        if prefix > mirror.prefix:
            mirror.prefix = prefix
            mirror.pushed = max(mirror.pushed, prefix)
            mirror.progress_ms = now_ms
            mirror.stalled = False
        has_caught_up = mirror.prefix >= max(self.high_watermark, self._overdue_seq(now_ms))
        mirror.in_sync = mirror.in_sync or (has_caught_up and self._is_wanted(mirror))
        self._raise_high_watermark()

    def tick(self, now_ms: int) -> None:
        """Removes mirrors from the in-sync set that have lagged for too long."""
        overdue_seq = self._overdue_seq(now_ms)
        for mirror in self._mirrors.values():
            was_heard = now_ms - mirror.heard_ms <= self._config.insync_timeout_ms
            if mirror.prefix < (overdue_seq if was_heard else self.last_seq):
                mirror.in_sync = False
        self._raise_high_watermark()

    def has_enough(self, now_ms: int) -> bool:
        """Whether W members are in sync now."""
        self.tick(now_ms)
        return len(self.in_sync) >= self._min_insync

    def pushes(self, now_ms: int, reachable: Collection[str]) -> list[tuple[str, int, int]]:
        """Returns what to push now, as (mirror, first seq, last seq)."""
        found = []
        for node, mirror in self._mirrors.items():
            if node not in reachable or not mirror.has_disk or mirror.disk_out:
                mirror.pushed = mirror.prefix
                continue
            is_late = now_ms - mirror.progress_ms > self._config.fetch_timeout_ms
            if mirror.pushed > mirror.prefix and is_late:
                mirror.pushed = mirror.prefix
                mirror.stalled = True
            if mirror.pushed == mirror.prefix:
                mirror.progress_ms = now_ms
            found += [(node, *batch) for batch in self._take_batches(mirror)]
        return found

    def is_stalled(self, peer: str) -> bool:
        """Whether what is pushed to a mirror was pushed before, and the mirror made no progress."""
        return self._mirrors[peer].stalled

    def sealed(self, *, own_clock_ms: int, leader_clock_ms: int | None, late_window_s: int) -> None:
        """Gives the seal that is possible now."""
        self.seal = next_seal(
            self.seal,
            own_clock_ms=own_clock_ms,
            leader_clock_ms=leader_clock_ms,
            last_seq=self.last_seq,
            late_window_s=late_window_s,
        )

    def _is_wanted(self, mirror: _Mirror) -> bool:
        if mirror.disk_out:
            return False
        return not mirror.drains or len(self.in_sync) - mirror.in_sync < self._min_insync

    def _take_batches(self, mirror: _Mirror) -> list[tuple[int, int]]:
        """Returns the batches that may be sent to a mirror now."""
        batch_frames = self._config.batch_frames
        in_flight_frames = self._config.in_flight_frames
        if mirror.stalled:
            in_flight_frames = min(in_flight_frames, batch_frames)
        end = min(self.last_seq, mirror.prefix + in_flight_frames)
        if end <= mirror.pushed:
            return []
        batches = [
            (first, min(end, first + batch_frames - 1))
            for first in range(mirror.pushed + 1, end + 1, batch_frames)
        ]
        mirror.pushed = end
        return batches

    def _overdue_seq(self, now_ms: int) -> int:
        """Returns the last seq at the time when the timeout that ends now began."""
        began_ms = now_ms - self._config.insync_timeout_ms
        while len(self._ends) > 1 and self._ends[1][0] < began_ms:
            self._ends.popleft()
        since_ms, end = self._ends[0]
        return end if since_ms < began_ms else 0

    def _raise_high_watermark(self) -> None:
        if self.high_watermark == self.last_seq:
            return  # it never goes back, and can go no further
        held = {node: mirror.prefix for node, mirror in self._mirrors.items()}
        held[self._config.node] = self.last_seq
        reached = high_watermark(held, self.in_sync, self._min_insync)
        self.high_watermark = max(self.high_watermark, reached or 0)


def high_watermark(
    applied: Mapping[str, int], in_sync: Collection[str], min_insync: int
) -> int | None:
    """Returns the greatest seq that all in-sync members hold; None while fewer than W are in sync.

    The origin's own last seq is among what members are known to hold.
    """
    if len(in_sync) < min_insync:
        return None
    return min(applied.get(member, 0) for member in in_sync)


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
        self._published = 0  # up to this seq the ledger is
        self._is_seal_held = False
        self._is_seal_due = False
        self._near: deque[int] = deque()  # last seqs of groups that are due soon, ascending

    @property
    def wheel(self) -> WheelId | None:
        """The current wheel."""
        return None if self._spare is None else self._spare.wheel

    @property
    def reported_open(self) -> WheelId | None:
        """The wheel that the node's heartbeat may name as open."""
        return self.wheel if self._phase in {WheelPhase.MAKING, WheelPhase.OPEN} else None

    @property
    def replication(self) -> Replication | None:
        """What its members hold, while it is open."""
        is_open = self._phase is WheelPhase.OPEN and not self._known.is_rolled_back
        return self._replication if is_open else None

    @property
    def is_leaving(self) -> bool:
        """Whether only the store's answer is missing."""
        return self._phase is WheelPhase.LEAVING

    def has_heard_enough(self, spare: Spare) -> bool:
        """Whether W members of a wheel were heard since the start, itself included.

        Before that nothing could be acknowledged, and what they say may keep it from being opened:
        that this folder is an older copy.
        """
        heard = sum(self._hearing.direct(node) is not None for node in spare.members)
        return 1 + heard >= spare.min_insync

    @property
    def has_all_acknowledged(self) -> bool:
        """Whether every written frame is acknowledged."""
        replication = self.replication
        return replication is None or replication.high_watermark >= replication.last_seq

    # --- its life

    def name(self, spare: Spare) -> None:
        """Notes that the wheel's name is being saved as open."""
        self._spare, self._phase, self._replication = spare, WheelPhase.NAMING, None
        self._acknowledged = self._published = 0
        self._is_seal_held = self._is_seal_due = False
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
                self._known.is_rolled_back |= _holds_unwritten(self._replication, heartbeat)
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

    def hold_seal(self) -> Replication:
        """Keeps the seal of the open wheel, which is returned, until `Written`."""
        replication = self.replication
        assert replication is not None
        self._is_seal_held = True
        return replication

    def written(self, event: Written) -> None:
        """Notes appended frames."""
        replication = self.replication
        if replication is None or replication.wheel != event.wheel:
            return
        self._is_seal_held = False
        replication.written(event.last_seq, event.top_slot, self._known.now_ms)
        if event.least_due_ms - self._known.wall_ms < NEAR_MS:
            self._near.append(event.last_seq)
        if self._is_seal_due:
            self._seal(replication)

    def applied(self, sender: str, reported: Applied) -> None:
        """Notes what a mirror reports holding."""
        replication = self.replication
        if replication is None or replication.wheel != reported.wheel:
            return
        if reported.prefix > replication.last_seq:
            self._known.is_rolled_back = True
            return
        replication.applied(
            sender, reported.storage, reported.boot, reported.prefix, self._known.now_ms
        )

    def heard(self, heartbeat: Heartbeat) -> None:
        """Notes a direct heartbeat, which also reports what the mirror holds."""
        replication = self.replication
        if replication is None:
            return
        self._known.is_rolled_back = _holds_unwritten(replication, heartbeat)
        if self._known.is_rolled_back:
            return
        replication.booted(heartbeat.node, heartbeat.storage, heartbeat.boot, self._known.now_ms)
        self._hear(replication, heartbeat)
        reported = heartbeat.wheels.get(replication.wheel)
        prefix = 0 if reported is None else reported.prefix
        replication.applied(
            heartbeat.node, heartbeat.storage, heartbeat.boot, prefix, self._known.now_ms
        )

    def published(self, wheel: WheelId, seq: int) -> None:
        """Notes that the wheel's ledger is published up to this seq."""
        if wheel == self.wheel:
            self._published = max(seq, self._published)

    def tick(self) -> None:
        """Updates the in-sync set, and seals."""
        replication = self.replication
        if replication is None:
            return
        replication.tick(self._known.now_ms)
        if self._is_seal_held:
            self._is_seal_due = True
        else:
            self._seal(replication)

    def take_move(self) -> tuple[Acknowledge, bool] | None:
        """Returns what is acknowledged since the last call, and whether any of it is due soon."""
        replication = self.replication
        if replication is None or replication.high_watermark <= self._acknowledged:
            return None
        self._acknowledged = replication.high_watermark
        is_near = False
        while self._near and self._near[0] <= self._acknowledged:
            self._near.popleft()
            is_near = True
        return Acknowledge(replication.wheel, self._acknowledged), is_near

    def pushes(self) -> list[Effect]:
        """Returns what to send to mirrors now."""
        replication, now_ms = self.replication, self._known.now_ms
        if replication is None:
            return []
        pushes = replication.pushes(now_ms, self._hearing.reachable(now_ms))
        return [
            Serve(peer, replication.wheel, first, last, again=replication.is_stalled(peer))
            for peer, first, last in pushes
        ]

    def heartbeat(self) -> WheelHeartbeat:
        """Returns the wheel's heartbeat entry."""
        replication, spare = self._replication, self._spare
        assert spare is not None
        if replication is None:
            return WheelHeartbeat.empty(spare.seal_slot)
        return WheelHeartbeat(
            applied=replication.last_seq,
            high_watermark=replication.high_watermark,
            seal_slot=replication.seal.slot,
            seal_seq=replication.seal.seq,
            ledger_seq=self._published,
            top_slot=replication.top_slot,
        )

    def _hear(self, replication: Replication, heartbeat: Heartbeat) -> None:
        replication.says(
            heartbeat.node, is_draining=heartbeat.draining, disk_out=heartbeat.disk_out
        )

    def _seal(self, replication: Replication) -> None:
        known = self._known
        self._is_seal_due = False
        replication.sealed(
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


def _holds_unwritten(replication: Replication, heartbeat: Heartbeat) -> bool:
    """Whether another node has frames of this wheel that were not written since it was opened."""
    wheel, written = replication.wheel, replication.last_seq
    reported = heartbeat.wheels.get(wheel)
    if reported is not None and reported.applied > written:
        return True
    return not written and wheel in heartbeat.verifying
