"""The wheels that a node has files of but does not write: mirrors, and its own old ones.

The store's last report (`HeldWheel`) counts; it is combined with what the store cannot know.

| beside `HeldWheel` | known from | until |
|---|---|---|
| frames that could not be read | the store, when reading | they are repaired, cut or lost |
| frames that a leader waits for | its status | repaired, cut, lost, or withdrawn |
| frames that are lost | the cleaner: committed | forever; they are not missing |
| high watermark, seal, ledger | heartbeats of any node: the greatest | the wheel is deleted |

The cleaner's report may be older than a repair: for a repaired frame it counts only after
`READ_AGAIN_MS`. It may also be wrong about frames that were repaired while it read: frames it waits
for are withdrawn once it has named no frame of that wheel for `READ_AGAIN_MS`. By then other nodes
have sent theirs; and only leaders read, so a node that hands over its leadership is repaired all
the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.node.events import HeldWheel
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import MAX_MISSING, Heartbeat, WheelHeartbeat
from delaywheel_replica.core.protocol.seal import Seal

READ_AGAIN_MS = 2_000
READ_AGAIN_AT_MOST_MS = 60_000
READ_AGAIN_FRAMES = 4_096


@dataclass(slots=True)
class _InventoryWheel:
    # As the store reported it, and adjusted for the sets below and the lost frames.
    stored: HeldWheel
    held: HeldWheel
    high_watermark: int = 0
    seal: Seal = field(default_factory=lambda: Seal(0, 0))
    ledger_seq: int = 0
    bad: SeqSet = NO_SEQS
    reported: SeqSet = NO_SEQS
    reported_ms: int = 0
    # When missing frames are to be read again, and how long after the last time.
    reading_ms: int = 0
    reading_every_ms: int = READ_AGAIN_MS
    read_to: int = 0  # the last one that was read again: many are read in parts
    # When frames were repaired, in the last `READ_AGAIN_MS`.
    repaired: list[tuple[int, SeqSet]] = field(default_factory=list)


class Inventory:
    """What one node holds."""

    def __init__(self, held: Mapping[WheelId, HeldWheel]) -> None:
        self._lost = NO_FRAMES
        # In order.
        self._wheels = {
            wheel: _InventoryWheel(found, found) for wheel, found in sorted(held.items())
        }
        self._heartbeats: dict[WheelId, WheelHeartbeat] | None = None

    def __contains__(self, wheel: object) -> bool:
        return wheel in self._wheels

    def __iter__(self) -> Iterator[WheelId]:
        return iter(self._wheels)

    def get(self, wheel: WheelId) -> HeldWheel | None:
        """Returns what is held of a wheel; None if it has no files."""
        known = self._wheels.get(wheel)
        return None if known is None else known.held

    def items(self) -> list[tuple[WheelId, HeldWheel]]:
        """All wheels, each with what is held, in order."""
        return [(wheel, known.held) for wheel, known in self._wheels.items()]

    def prefix(self, wheel: WheelId) -> int:
        """Returns the seq up to which every frame is held, except lost ones."""
        held = self.get(wheel)
        end = 0 if held is None else held.missing.first - 1 if held.missing else held.applied
        return self._lost.seqs(wheel).end_from(end)

    def put(self, held: HeldWheel) -> None:
        """Notes what the store holds."""
        wheel = held.card.wheel
        known = self._wheels.get(wheel)
        if known is None:
            known = _InventoryWheel(held, held)
            self._wheels = dict(sorted([*self._wheels.items(), (wheel, known)], key=itemgetter(0)))
        known.stored = held
        known.bad = known.bad.within(1, held.applied)
        known.reported = known.reported.within(1, held.applied)
        self._look_at(wheel, known)

    def left(self, wheel: WheelId, wheel_heartbeat: WheelHeartbeat) -> None:
        """Adds an own wheel that is no longer written; what was reported of it stays true."""
        known = self._wheels[wheel]
        known.high_watermark, known.seal = wheel_heartbeat.high_watermark, wheel_heartbeat.seal
        known.ledger_seq = wheel_heartbeat.ledger_seq
        self._heartbeats = None

    def repaired(self, wheel: WheelId, seqs: SeqSet, now_ms: int) -> None:
        """Notes that the store has rewritten frames; must be called before `put`."""
        known = self._wheels.get(wheel)
        if known is not None:
            known.bad -= seqs
            known.reported -= seqs
            _repaired_lately(known, now_ms)
            known.repaired.append((now_ms, seqs))

    def found_again(self, wheel: WheelId, seqs: SeqSet, now_ms: int) -> None:
        """Does the same for frames that were read again; others of the wheel are read next."""
        self.repaired(wheel, seqs, now_ms)
        known = self._wheels.get(wheel)
        if known is not None and seqs:
            known.reading_ms, known.reading_every_ms = now_ms, READ_AGAIN_MS

    def to_read_again(self, now_ms: int) -> dict[WheelId, SeqSet]:
        """Returns missing frames that are to be read again now: of each wheel the next ones.

        Soon after they were found missing, then less and less often; at once after some were found.
        """
        found: dict[WheelId, SeqSet] = {}
        for wheel, known in self._wheels.items():
            missing = known.held.missing
            if not missing:
                known.reading_ms, known.reading_every_ms = 0, READ_AGAIN_MS
            elif not known.reading_ms:
                known.reading_ms = now_ms + known.reading_every_ms
            elif now_ms >= known.reading_ms:
                known.reading_every_ms = min(2 * known.reading_every_ms, READ_AGAIN_AT_MOST_MS)
                known.reading_ms = now_ms + known.reading_every_ms
                behind = missing.within(known.read_to + 1, missing.last) or missing
                found[wheel] = behind.least(READ_AGAIN_FRAMES)
                known.read_to = found[wheel].last
        return found

    def unreadable(self, wheel: WheelId, seqs: SeqSet) -> None:
        """Notes frames that the store could not read."""
        known = self._wheels.get(wheel)
        if known is not None:
            known.bad |= seqs.within(1, known.stored.applied)
            self._look_at(wheel, known)

    def reported(self, frames: FrameSet, now_ms: int) -> None:
        """Replaces the set of frames that a leader waits for and cannot read."""
        for wheel, known in self._wheels.items():
            seqs = frames.seqs(wheel)
            if seqs:
                known.reported_ms = now_ms
                seqs = seqs.within(1, known.stored.applied) - _repaired_lately(known, now_ms)
                seqs |= known.reported
            elif known.reported and now_ms - known.reported_ms < READ_AGAIN_MS:
                continue
            if seqs != known.reported:
                known.reported = seqs
                self._look_at(wheel, known)

    def lost(self, frames: FrameSet) -> None:
        """Stops looking for these frames: they are committed as lost."""
        self._lost = frames
        for wheel, known in self._wheels.items():
            self._look_at(wheel, known)

    def deleted(self, wheel: WheelId) -> None:
        """Removes a wheel whose files were deleted."""
        self._wheels.pop(wheel, None)
        self._heartbeats = None

    def heard(self, heartbeat: Heartbeat) -> bool:
        """Notes a heartbeat's entries for these wheels; returns whether a high watermark moved."""
        moved = False
        for wheel, wheel_heartbeat in heartbeat.wheels.items():
            known = self._wheels.get(wheel)
            if known is None:
                continue
            if wheel_heartbeat.high_watermark > known.high_watermark:
                known.high_watermark = wheel_heartbeat.high_watermark
                moved = True
            if (wheel_heartbeat.seal_slot, -wheel_heartbeat.seal_seq) > _strength(known.seal):
                known.seal = wheel_heartbeat.seal
                self._heartbeats = None
            if wheel_heartbeat.ledger_seq > known.ledger_seq:
                self.published(wheel, wheel_heartbeat.ledger_seq)
        if moved:
            self._heartbeats = None
        return moved

    def published(self, wheel: WheelId, seq: int) -> None:
        """Notes that the ledger of a wheel is published up to this seq."""
        known = self._wheels.get(wheel)
        if known is not None:
            known.ledger_seq = max(seq, known.ledger_seq)
            self._heartbeats = None

    def heartbeats(self) -> Mapping[WheelId, WheelHeartbeat]:
        """The heartbeat entries of all wheels; the mapping is never changed afterwards."""
        if self._heartbeats is None:
            self._heartbeats = {wheel: _heartbeat(known) for wheel, known in self._wheels.items()}
        return self._heartbeats

    def _look_at(self, wheel: WheelId, known: _InventoryWheel) -> None:
        stored = known.stored
        missing = (stored.missing | known.bad | known.reported) - self._lost.seqs(wheel)
        known.held = stored if missing == stored.missing else replace(stored, missing=missing)
        self._heartbeats = None


def _heartbeat(known: _InventoryWheel) -> WheelHeartbeat:
    held = known.held
    return WheelHeartbeat(
        applied=held.applied,
        high_watermark=known.high_watermark,
        seal_slot=known.seal.slot,
        seal_seq=known.seal.seq,
        ledger_seq=known.ledger_seq,
        top_slot=held.top_slot,
        missing=held.missing.condensed(MAX_MISSING),
    )


def _repaired_lately(known: _InventoryWheel, now_ms: int) -> SeqSet:
    known.repaired = [
        (at_ms, seqs) for at_ms, seqs in known.repaired if now_ms - at_ms < READ_AGAIN_MS
    ]
    return SeqSet(span for _, seqs in known.repaired for span in seqs.spans)


def _strength(seal: Seal) -> tuple[int, int]:
    """Orders seals: of two for one slot, the one with the smaller seq promises more."""
    return seal.slot, -seal.seq
