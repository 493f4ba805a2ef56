"""Wheels that a node does not write: accepting, fetching, closing and deleting them.

For each wheel one list of frames is written at a time; what arrives meanwhile waits, within bounds,
and is judged by what is held then:

| a wheel is | frames | then |
|---|---|---|
| this node's current one | any | nothing: it has one writer |
| this node's, and not opened yet | any | nothing: it has none |
| any | not requested from their sender, and not pushed by their origin | nothing |
| without this storage among its members (once it is closed: its holders) | any | nothing |
| closed at T | beyond T | dropped; if they were pushed, the origin is refused |
| promised away | beyond its limit | dropped; if they were pushed, the origin is refused |
| any of these or other | all else | may be accepted |

Of those that may be accepted, the ones that follow on what is held are mirrored, in order; those
already held are skipped; those behind a gap are dropped, to be fetched. Missing ones below are put
in their places, which a promise does not forbid: its answer reports the greatest seq that has a row
here, and no end is found below it. What does not fit is fetched later.

| a wheel is fetched | up to |
|---|---|
| closed at T, with a storage that is no member: it is *copied*, at a bounded rate | T |
| closed at T | T |
| promised away | its limit |
| otherwise | what another node reported by the tick before: newer frames are pushed |

Frames that are missing below are fetched as well, and frames of any node's wheel that the cleaner
could not read. While the disk accepts no frames, nothing is accepted or fetched; nor of a wheel
that is not verified.

A wheel that another node writes is *unwritable* here once writes of its frames have failed for
`UNWRITABLE_MS`, while node.json could be saved, and is promised away; docs/PROTOCOL.md, "Closing",
says why.

A folder is deleted when its wheel is no longer registered: everything up to its end was finished
then, and what lies beyond does not count.

| a wheel is missing from the registry | because |
|---|---|
| and a later one of its node is there | it is no longer registered |
| and its frames lie below the floor of that moment | as above: a later wheel accepts none there |
| otherwise | it may not be registered yet, as far as was read |
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.frames.bundle import NO_BUNDLE, FrameBundle
from delaywheel_replica.core.node.events import (
    CloseWheel,
    DeleteWheel,
    Effect,
    HeldWheel,
    Mirror,
    Repair,
    Send,
)
from delaywheel_replica.core.node.heard_heartbeats import HeardHeartbeats
from delaywheel_replica.core.node.shared_state import Known, PendingEffects
from delaywheel_replica.core.protocol.codec import MOST
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import MAX_SOUGHT, Heartbeat
from delaywheel_replica.core.protocol.messages import Applied, Frames, Lacks, Refused, WheelCard
from delaywheel_replica.core.wheels.fencing import Fencing
from delaywheel_replica.core.wheels.fetching import Fetching, Want
from delaywheel_replica.core.wheels.inventory import Inventory
from delaywheel_replica.core.wheels.open_wheel import CurrentWheel
from delaywheel_replica.core.wheels.verifying import AGAIN_MS, Verifying

AHEAD_SECONDS: Final = 86_400
"""How far clocks may differ, beyond a wheel's span, before frames are considered damaged.

An origin writes nothing beyond half of that, by the clock on which most nodes agree: mirrors whose
clocks are behind that one believe it, too.
"""

MAX_REPORTED: Final = 4_096
"""About this many spans of wanted frames are reported, over all wheels."""

COPIED_AT_ONCE: Final = 1
"""So many closed wheels are copied to another storage at a time."""

COPIED_BYTES_S: Final = 32 << 20
COPIED_FRAMES_S: Final = 6_000
"""They are copied no faster, beside the load: a frame costs its holder about 0.03 ms."""

COPIED_ROWS_S: Final = 50_000
"""Nor rows of frames that are finished and deleted; a row costs 0.002 ms."""

CREDIT_MS: Final = 100
"""Copying goes on this much before its time: it waits for no tick while it is slow enough."""

UNWRITABLE_MS: Final = 5_000
"""An origin goes on with its wheel for so long though this node cannot write it."""

UNWRITABLE_AGAIN_MS: Final = 60_000
"""It loses no further wheel to this node before: each is kept until its last message is done."""

WAITING_BYTES: Final = 32 << 20
"""How much content of a wheel waits for the store at most; a longer message waits alone."""


@dataclass(frozen=True, slots=True)
class MirrorVerdict:
    """What to do with received frames.

    Attributes:
        mirror: Frames to write behind what is held.
        repair: Frames to put in the places of missing ones.
        refused: They were pushed, and their wheel accepts nothing more.
        answer: They were pushed, and nothing is written: the origin must learn what is held.
    """

    mirror: FrameBundle = NO_BUNDLE
    repair: FrameBundle = NO_BUNDLE
    refused: bool = False
    answer: bool = False


def believable(frames: Frames, *, floor: int, now_slot: int) -> Frames:
    """Returns the message without frames that no holder can have.

    Those are without content although their second is not finished, by the floor that the own
    cleaner has read, or for a second that lies further ahead of the own clock than any message is
    accepted for.
    """
    last_slot = now_slot + frames.card.span_seconds + AHEAD_SECONDS
    bundle = frames.frames
    if bundle.is_whole and max(bundle.rows["slot"].tolist(), default=0) <= last_slot:
        return frames
    slots = bundle.rows["slot"].astype(np.int64)
    is_finished = slots < floor
    believed = (slots <= last_slot) & (bundle.has_content | is_finished)
    believed |= bundle.rows["length"] == 0
    return frames if believed.all() else replace(frames, frames=bundle.chosen(believed))


def judge(
    frames: Frames,
    held: HeldWheel | None,
    *,
    is_holder: bool,
    own_open: WheelId | None,
    limit: int | None,
    closed_at: int | None,
) -> MirrorVerdict:
    """Decides what to do with these frames, which ascend, as the module says.

    Args:
        held: What is held of their wheel; None: nothing.
        is_holder: This node is a member of it, or copies it since it is closed.
        limit: How far it may be fetched although it is promised away; None: it is not.
        closed_at: The committed end; None: the wheel is not closed.
    """
    card = frames.card
    if card.wheel == own_open or not is_holder:
        return MirrorVerdict()
    end = limit if closed_at is None else closed_at
    bundle = frames.frames
    mirror, repair = NO_BUNDLE, NO_BUNDLE
    if len(bundle):
        mirror = bundle.following(1 if held is None else held.applied + 1, end)
        repair = _missing(bundle, NO_SEQS if held is None else held.missing, closed_at)
    is_pushed = frames.request == 0
    refused = is_pushed and end is not None and len(bundle) > 0 and bundle.last_seq > end
    return MirrorVerdict(
        mirror=mirror,
        repair=repair,
        refused=refused,
        answer=is_pushed and not (len(mirror) or len(repair) or refused),
    )


def _missing(bundle: FrameBundle, missing: SeqSet, closed_at: int | None) -> FrameBundle:
    last_seq = bundle.last_seq if closed_at is None else min(bundle.last_seq, closed_at)
    missing = missing.within(bundle.first_seq, last_seq)
    if not missing:
        return NO_BUNDLE
    wanted = np.zeros(len(bundle), np.bool_)
    for first, last in missing.spans:
        begin, end = bundle.seqs.searchsorted([first, last + 1])
        wanted[begin:end] = True
    return bundle.chosen(wanted)


def _throttle_ms(frames: Frames) -> int:
    """Returns how long to copy nothing after these frames."""
    bundle = frames.frames
    whole = int(bundle.has_content.sum())
    by_frames_ms = whole * 1000 // COPIED_FRAMES_S + (len(bundle) - whole) * 1000 // COPIED_ROWS_S
    return max(bundle.length_bytes * 1000 // COPIED_BYTES_S, by_frames_ms)


class _WaitingFrames:
    """Messages with frames of a wheel that wait while the store writes others of that wheel."""

    def __init__(self, max_frames: int) -> None:
        self._max_frames = max_frames
        self._messages: deque[tuple[str, Frames, int]] = deque()
        self._frames = 0
        self._length_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def put(self, sender: str, frames: Frames) -> None:
        length_bytes = frames.frames.length_bytes
        is_too_long = self._length_bytes + length_bytes > WAITING_BYTES
        if self._frames >= self._max_frames or (self._messages and is_too_long):
            return
        self._messages.append((sender, frames, length_bytes))
        self._frames += len(frames.frames)
        self._length_bytes += length_bytes

    def take(self) -> tuple[str, Frames]:
        sender, frames, length_bytes = self._messages.popleft()
        self._frames -= len(frames.frames)
        self._length_bytes -= length_bytes
        return sender, frames


class Mirrors:
    """What one node does with wheels that it does not write."""

    def __init__(
        self,
        known: Known,
        hearing: HeardHeartbeats,
        promises: Fencing,
        inventory: Inventory,
        current: CurrentWheel,
        pending: PendingEffects,
        verifying: Verifying,
    ) -> None:
        """Begins with no work under way.

        The current own wheel is not one of these.
        """
        self._known = known
        self._hearing = hearing
        self._fencing = promises
        self._inventory = inventory
        self._current = current
        self._pending = pending
        self._verifying = verifying
        self._fetching = Fetching(known.config)
        self._waiting: dict[WheelId, _WaitingFrames] = {}
        # Why a write was requested: what follows when it is done.
        self._catching_up: set[WheelId] = set()
        self._pushed: set[WheelId] = set()
        self._shown: dict[WheelId, int] = {}
        self._end_after_ms: dict[WheelId, int] = {}
        self._copying_throttled_until_ms = 0
        self._not_written_since_ms: dict[WheelId, int] = {}
        self._saved_ms = -1
        self._promised_ms: dict[str, int] = {}

    # --- frames

    def came(self, sender: str, frames: Frames) -> list[Effect]:
        """Takes frames, pushed or requested."""
        wheel = frames.card.wheel
        if not self._is_its_card(frames) or not self._is_expected(sender, frames):
            return []
        if frames.request:
            self._fetching.answered(frames.request)
            if self._is_copied(wheel):
                began_ms = max(self._copying_throttled_until_ms, self._known.now_ms)
                self._copying_throttled_until_ms = began_ms + _throttle_ms(frames)
        if self._known.disk.is_out:
            return []  # the remaining space is for work that frees space
        if wheel in self._verifying.wheels:
            return []  # they are fetched, once it is known which are missing
        if not self._pending.is_writing(wheel):
            return self._take(sender, frames)
        waiting = self._waiting.get(wheel)
        if waiting is None:
            waiting = self._waiting[wheel] = _WaitingFrames(self._known.config.in_flight_frames)
        waiting.put(sender, frames)
        return []

    def mirrored(self, held: HeldWheel) -> list[Effect]:
        """Takes what the store holds after writing or examining a wheel."""
        wheel = held.card.wheel
        written = self._pending.done(Mirror, Repair, wheel=wheel)
        if isinstance(written, Repair):
            seqs = SeqSet.of(written.frames.seqs.tolist())
            self._inventory.repaired(wheel, seqs, self._known.now_ms)
        elif isinstance(written, Mirror):
            self._not_written_since_ms.pop(wheel, None)
        self._inventory.put(held)
        return [*self._report_to_origin(wheel), *self._go_on(wheel)]

    def failed(self, wheel: WheelId) -> None:
        """Drops queued messages after a failed write: they would only leave a gap."""
        self._waiting.pop(wheel, None)
        self._catching_up.discard(wheel)
        self._pushed.discard(wheel)

    def not_written(self, wheel: WheelId) -> None:
        """Notes that frames behind the last one could not be written."""
        self._not_written_since_ms.setdefault(wheel, self._known.now_ms)

    def saved(self) -> None:
        """Notes that the medium has taken node.json."""
        self._saved_ms = self._known.now_ms

    def unwritable(self) -> list[WheelId]:
        """Returns wheels that are to be promised away, so that their origins leave them; once."""
        known, found = self._known, []
        heartbeats = self._hearing.heartbeats()
        for wheel, since_ms in list(self._not_written_since_ms.items()):
            heartbeat = heartbeats.get(wheel.node)
            if heartbeat is None or heartbeat.open != wheel:
                del self._not_written_since_ms[wheel]
                continue
            again_ms = self._promised_ms.get(wheel.node, -UNWRITABLE_AGAIN_MS) + UNWRITABLE_AGAIN_MS
            is_due = known.now_ms >= max(since_ms + UNWRITABLE_MS, again_ms)
            if is_due and self._saved_ms > since_ms and not known.disk.is_out:
                self._promised_ms[wheel.node] = known.now_ms
                del self._not_written_since_ms[wheel]
                found.append(wheel)
        return found

    def not_ended(self, wheel: WheelId) -> None:
        """Notes that a wheel could not be closed or deleted; it is tried again later."""
        self._end_after_ms[wheel] = self._known.now_ms + AGAIN_MS

    def deleted(self, wheel: WheelId) -> None:
        """Forgets a wheel whose folder was deleted."""
        self.failed(wheel)
        self._end_after_ms.pop(wheel, None)
        self._inventory.deleted(wheel)
        self._fencing.forget(wheel)
        self._fetching.forget(wheel)

    def _go_on(self, wheel: WheelId) -> list[Effect]:
        if self._pending.is_writing(wheel):
            return []
        waiting = self._waiting.get(wheel)
        effects: list[Effect] = []
        while waiting and not any(isinstance(effect, Mirror | Repair) for effect in effects):
            effects += self._take(*waiting.take())
        if not waiting:
            self._waiting.pop(wheel, None)
        if not effects and wheel in self._catching_up:
            self._catching_up.discard(wheel)
            effects += self.fetch()
        return effects

    def _take(self, sender: str, frames: Frames) -> list[Effect]:
        card = frames.card
        verdict = self._judge(frames)
        effects: list[Effect] = []
        if verdict.refused:
            effects += self._refuse(sender, card.wheel)
        if verdict.answer:
            effects.append(Send(sender, self._applied(card.wheel)))
        if len(verdict.mirror):
            effects.append(Mirror(card, verdict.mirror))
        if len(verdict.repair):
            effects.append(Repair(card, verdict.repair))
        if len(verdict.mirror) or len(verdict.repair):
            (self._catching_up if frames.request else self._pushed).add(card.wheel)
        return effects

    def _is_its_card(self, frames: Frames) -> bool:
        """Whether a card matches what is known of its wheel; unknown wheels arrive only by pushes.

        The origin pushes a wheel as soon as it has it, perhaps before this node has read of it.
        """
        card = frames.card
        record, held = self._known.record(card.wheel), self._inventory.get(card.wheel)
        if record is not None:
            return (card.members, card.min_insync) == (record.members, record.min_insync)
        return frames.request == 0 if held is None else card == held.card

    def _is_expected(self, sender: str, frames: Frames) -> bool:
        """Whether frames were requested, or pushed by their origin; never of a wheel still to open.

        A folder of the spare's name would keep this node from ever opening it.
        """
        wheel, state = frames.card.wheel, self._known.state
        if wheel.node == self._known.node:
            is_spare = state.spare is not None and state.spare.wheel == wheel
            if is_spare or wheel.number > state.last_number:
                return False
        if frames.request:
            return self._fetching.has_asked(sender, wheel, frames.request)
        return sender == wheel.node

    def _judge(self, frames: Frames) -> MirrorVerdict:
        wheel, known = frames.card.wheel, self._known
        return judge(
            believable(frames, floor=known.floor or 0, now_slot=known.wall_ms // 1000),
            self._inventory.get(wheel),
            is_holder=self._holders(wheel, frames.card).get(known.node) == known.storage,
            own_open=self._current.wheel,
            limit=self._fencing.limit(wheel, known.state),
            closed_at=self._closed_at(wheel),
        )

    def _closed_at(self, wheel: WheelId) -> int | None:
        record, held = self._known.record(wheel), self._inventory.get(wheel)
        if record is not None and record.closed_at is not None:
            return record.closed_at
        return None if held is None else held.final_seq

    def _refuse(self, sender: str, wheel: WheelId) -> list[Effect]:
        """Refuses frames, reporting only what is durable: a promise, or an end."""
        upto = self._known.state.fenced.get(wheel.node, 0)
        if upto >= wheel.number:
            return [Send(sender, Refused(wheel.node, upto))]
        if self._closed_at(wheel) is not None:
            return [Send(sender, Refused(wheel.node, wheel.number))]
        return []

    def _report_to_origin(self, wheel: WheelId) -> list[Effect]:
        """Reports fetched frames to their origin, where they count like pushed ones."""
        heartbeat = self._hearing.heartbeats().get(wheel.node)
        is_in_use = heartbeat is not None and heartbeat.open == wheel
        if not is_in_use and wheel not in self._pushed:
            return []
        self._pushed.discard(wheel)
        return [Send(wheel.node, self._applied(wheel))]

    def _applied(self, wheel: WheelId) -> Applied:
        state = self._known.state
        return Applied(wheel, self._known.storage, state.boot_id, self._inventory.prefix(wheel))

    # --- fetching

    def tick(self) -> list[Effect]:
        """Fetches wanted frames, and maintains the copies."""
        for wheel in self._fetching.reported_lacks():
            wanted = self._missing_here(wheel) - self._known.lost.seqs(wheel)
            self._fetching.look_only_for(wheel, wanted)
        effects = self.fetch()
        self._shown = {}
        for heartbeat in self._hearing.heartbeats().values():
            for wheel, reported in heartbeat.wheels.items():
                self._shown[wheel] = max(reported.applied, self._shown.get(wheel, 0))
        return [*effects, *self._close_and_delete()]

    def fetch(self) -> list[Effect]:
        """Requests frames that are wanted and not requested yet."""
        if not self._hearing.others or self._known.disk.is_out:
            return []
        sought = self.sought()
        heartbeats = self._hearing.heartbeats()
        reachable = self._hearing.reachable(self._known.now_ms)
        wants, copied = {}, 0
        for wheel in self._wheels():
            if self._pending.is_writing(wheel):
                copied += self._is_copied(wheel)
                continue
            want = self._want(wheel, sought.seqs(wheel), heartbeats)
            if want is None:
                continue
            if self._is_copied(wheel) and self._may_copy(want, reachable):
                copied += 1
                at_ms = self._copying_throttled_until_ms - CREDIT_MS
                if copied > COPIED_AT_ONCE or self._known.now_ms < at_ms:
                    continue
            wants[wheel] = want
        planned = self._fetching.plan(self._known.now_ms, wants, reachable)
        return [Send(peer, fetch) for peer, fetch in planned]

    def note_lacks(self, sender: str, message: Lacks) -> None:
        """Notes that another node is missing requested frames."""
        self._fetching.lacks(sender, message)

    def sought(self) -> FrameSet:
        """Returns frames that the cleaner could not read and that are not given up."""
        cleaner = self._known.living_cleaner
        return NO_FRAMES if cleaner is None else cleaner.unreadable - self._known.lost

    def looked_for(self) -> tuple[FrameSet, dict[str, FrameSet]]:
        """Returns the frames being searched for, and which of them each member is missing."""
        reported, sought = self._fetching.reported_lacks(), self.sought()
        wheels = {*reported, *(wheel for wheel, _ in sought.items())}
        wheels.update(wheel for wheel, held in self._inventory.items() if held.missing)
        wheels.discard(self._current.wheel)
        frames: dict[WheelId, SeqSet] = {}
        lacks: dict[str, dict[WheelId, SeqSet]] = {}
        for wheel in wheels:
            held = self._inventory.get(wheel)
            seqs = sought.seqs(wheel) | (NO_SEQS if held is None else held.missing)
            for said in reported.get(wheel, {}).values():
                seqs |= said
            seqs = frames[wheel] = seqs.head(max(1, min(MAX_SOUGHT, MAX_REPORTED // len(wheels))))
            own = {self._known.node: self._missing_here(wheel)}
            for node, said in (reported.get(wheel, {}) | own).items():
                lacks.setdefault(node, {})[wheel] = seqs & said
        return FrameSet.of_wheels(frames), {
            node: FrameSet.of_wheels(said) for node, said in sorted(lacks.items())
        }

    def _missing_here(self, wheel: WheelId) -> SeqSet:
        """Returns what this node is missing as a member; nothing on a replaced storage."""
        if wheel in self._verifying.wheels or not self._is_holder(wheel):
            return NO_SEQS
        held = self._inventory.get(wheel)
        behind = NO_SEQS.with_span(1 if held is None else held.applied + 1, MOST)
        return behind if held is None else held.missing | behind

    def _wheels(self) -> list[WheelId]:
        registry = self._known.registry
        wheels = set(self._inventory)
        if registry is not None:
            wheels = {w for w in wheels if not registry.is_gone(w)} | registry.wheels.keys()
        return sorted(wheels - {self._current.wheel} - self._verifying.wheels)

    def _want(
        self, wheel: WheelId, sought: SeqSet, heartbeats: Mapping[str, Heartbeat]
    ) -> Want | None:
        if not self._is_holder(wheel):
            return None
        held = self._inventory.get(wheel)
        applied = 0 if held is None else held.applied
        limit = self._limit(wheel)
        missing = NO_SEQS if held is None else held.missing - held.not_returned
        missing |= sought.within(applied + 1, MOST)
        if not missing and limit <= applied:
            return None
        return Want(
            applied=applied,
            missing=missing,
            limit=limit,
            heartbeats={
                node: heartbeat.wheels[wheel]
                for node, heartbeat in heartbeats.items()
                if wheel in heartbeat.wheels
            },
            members=self._holders(wheel),
            storages={node: heartbeat.storage for node, heartbeat in heartbeats.items()},
        )

    def _holders(self, wheel: WheelId, card: WheelCard | None = None) -> Mapping[str, str]:
        """Returns the members of a wheel; of a closed one, the present storages of these nodes."""
        registry, held = self._known.registry, self._inventory.get(wheel)
        record = self._known.record(wheel)
        if record is not None and record.closed_at is not None and registry is not None:
            return registry.holders(record)
        if record is not None:
            return record.members
        if held is not None:
            card = held.card
        return {} if card is None else card.members

    def _is_holder(self, wheel: WheelId) -> bool:
        return self._holders(wheel).get(self._known.node) == self._known.storage

    def _is_copied(self, wheel: WheelId) -> bool:
        """Whether this node is no member of a closed wheel, and copies it all the same."""
        record = self._known.record(wheel)
        return (
            record is not None
            and record.closed_at is not None
            and record.members.get(self._known.node) != self._known.storage
        )

    def _may_copy(self, want: Want, reachable: Collection[str]) -> bool:
        """Whether a node that is heard shows what a copy needs next."""
        begins = [first for first, _ in want.runs()]
        return any(
            want.is_member(node) and want.shows(node, first)
            for node in reachable
            for first in begins[:1]
        )

    def _limit(self, wheel: WheelId) -> int:
        closed_at = self._closed_at(wheel)
        if closed_at is not None:
            # No node has later ones.
            return self._known.lost.seqs(wheel).begin_to(closed_at)
        limit = self._fencing.limit(wheel, self._known.state)
        return self._shown.get(wheel, 0) if limit is None else limit

    # --- ends

    def _close_and_delete(self) -> list[Effect]:
        effects: list[Effect] = []
        for wheel, held in self._inventory.items():
            record = self._known.record(wheel)
            if self._known.now_ms < self._end_after_ms.get(wheel, 0):
                continue
            if self._is_done_with(wheel, held):
                effects += self._once(DeleteWheel(wheel))
            elif record is not None and record.closed_at is not None and held.final_seq is None:
                effects += self._once(CloseWheel(wheel, record.closed_at))
        return effects

    def _once(self, effect: CloseWheel | DeleteWheel) -> list[Effect]:
        is_asked = self._pending.has(type(effect), effect.wheel)
        return [] if is_asked or self._pending.is_writing(effect.wheel) else [effect]

    def _is_done_with(self, wheel: WheelId, held: HeldWheel) -> bool:
        registry = self._known.registry
        if registry is None or wheel in registry.wheels:
            return False
        if wheel in {self._current.wheel, self._known.state.open}:
            return False
        if registry.is_gone(wheel):
            return True
        return registry.floor is not None and 0 <= held.top_slot < registry.floor
