"""The member machine: what a node's server decides, for any number of nodes.

It takes events and returns effects (core/node/events.py), does no I/O and knows no clock except the
one in the events. It is level-triggered: nodes report whole states, repeatedly; what is durable is
what was `Saved`; every tick compares what is with what should be. So a lost message or a failed
effect is made up for by a later tick.

| part | decides |
|---|---|
| peer_messages.py | what other nodes' messages mean for all of these |
| own_wheels.py, wheels/node_file.py | what is saved in node.json, and when: promises, own wheels |
| open_wheel.py | the current own wheel: callers, mirrors, high watermark |
| wheels/mirrors.py | what is accepted, fetched, closed and deleted of all others |
| fencing.py | what must be refused, and what is answered |
| verifying.py | what an earlier process has left, before anything is known of it |
| completeness.py | what may have been lost |
| prevote.py | which leader is heard, and votes |
| heard_heartbeats.py, inventory.py | what is known of the others, and of the own folder |
| own_heartbeat.py | what the heartbeat says |

Invariants, and what keeps them:

- A promise is durable before it is answered; it binds from the request on (fencing.py), and one
  about own wheels is saved only when none of them is in hand (own_wheels.py): so every answer
  covers everything that was ever accepted or written.
- A wheel is named open durably before its folder is made, once, and written only between `Opened`
  and the decision to leave it (open_wheel.py).
- Heartbeats report what is durable: a wheel as open or spare, a spare's seal, a promise,
  `complete`. For the open wheel they report what is written: mirrors can hold nothing else.
- A frame is acknowledged when the high watermark passes it, never after its wheel was left.
- At most one `Save` is under way, so no save overwrites one whose outcome is unknown.

| event | durable before | then reported |
|---|---|---|
| a fence | `Save(fenced)` | `Promise`, `Refused` |
| a registered wheel | `Save(spare)` | the heartbeat's `spare` |
| no wheel in hand | `Save(open)`, `OpenWheel` | the heartbeat's `open` |
| a second passed | `Save(spare's seal)` | the heartbeat's seal of the spare |
| frames | `Mirror` | `Applied`, the heartbeat's `applied` |
| a wheel of an earlier process | `VerifyWheel` | the heartbeat's wheel; `Promise` of its origin |
| a wheel is complete again | `Save(incomplete)` | the heartbeat's `complete`, `Promise` |

The effects of a step come in this order: those that cannot fail, then those that are answered with
an event, then the rest. Effects that cannot fail are done at once, by the stepping thread: they
depend on nothing that is not durable yet. Effects with answers are done one after another, and if
one fails, those after it are dropped, since they are requested again (`PendingEffects`). Each of
the rest stands alone: a full disk that accepts no `Save` must not keep `Sweep` from freeing space.
So do `DeleteWheel`, `VerifyWheel` and `ReadAgain`, although they are answered: all of them concern
any number of files, in steps between other jobs.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.folder.node_state import NodeState
from delaywheel_replica.core.member.parts import Parts
from delaywheel_replica.core.member.peer_messages import PeerMessages
from delaywheel_replica.core.node.events import (
    Acknowledge,
    AtOnce,
    Awaited,
    Broken,
    CleanerReported,
    Closed,
    CloseWheel,
    DeleteWheel,
    Disconnected,
    DiskReported,
    DiskState,
    Drain,
    Effect,
    Event,
    Failed,
    ForgetLost,
    FoundAgain,
    HeldWheel,
    Left,
    MemberConfig,
    Mirror,
    Mirrored,
    Opened,
    Published,
    ReadAgain,
    Received,
    Repair,
    Saved,
    Started,
    Sweep,
    Tick,
    Unreadable,
    Verified,
    VerifyWheel,
    WheelDeleted,
    WriteStatus,
    Written,
)
from delaywheel_replica.core.node.shared_state import Known, Registry
from delaywheel_replica.core.protocol.frames import NO_FRAMES
from delaywheel_replica.core.protocol.status_files import CleanerStatus, ServerStatus

SWEEP_EVERY_MS: Final = 60_000
SWEEP_AFTER_FAILURE_MS: Final = 10_000
LEAVE_AGAIN_MS: Final = 2_000
"""Between two own wheels that are left because a frame of them cannot be read: a node has a limited
number of wheels."""


class MemberRefusal(StrEnum):
    """Why a node accepts no messages at present; names are those of `delaywheel.reasons`."""

    NO_WHEEL = "NO_WHEEL"
    DRAINING = "DRAINING"
    NOT_ENOUGH_REPLICAS = "NOT_ENOUGH_REPLICAS"
    DISK_FULL = "DISK_FULL"
    DISK_STALLED = "DISK_STALLED"


@dataclass(frozen=True, slots=True)
class Admitted:
    """Messages may be written.

    Attributes:
        wheel: The wheel to write to.
        seal_slot: No message may be for a slot below.
    """

    wheel: WheelId
    seal_slot: int


class Member:
    """The state machine of one node's server."""

    def __init__(self, config: MemberConfig, started: Started) -> None:
        """Begins with what the data folder has."""
        parts = Parts.of(config, started)
        self._known = parts.known
        self._pending = parts.pending
        self._hearing = parts.hearing
        self._prevote = parts.prevote
        self._fencing = parts.fencing
        self._completeness = parts.completeness
        self._inventory = parts.inventory
        self._verifying = parts.verifying
        self._current = parts.current
        self._node_file = parts.node_file
        self._mirrors = parts.mirrors
        self._own_heartbeat = parts.own_heartbeat
        self._peers = PeerMessages(parts)
        self._swept: int | None = None
        self._sweep_again_ms = 0
        self._leave_again_ms = 0
        self._forgotten = NO_FRAMES

    # --- queries of the commit loop and the status

    @property
    def in_sync(self) -> frozenset[str]:
        """The members that must hold a frame before it is acknowledged; none without a wheel."""
        return self._current.in_sync

    def begin_group(self, now_ms: int, *, cancels: bool = False) -> Admitted | MemberRefusal:
        """Admits a group to be written; if admitted, `Written` must follow in any case."""
        admission = self.admits(now_ms, cancels=cancels)
        if isinstance(admission, Admitted):
            self._current.begin_group()
        return admission

    def admits(self, now_ms: int, *, cancels: bool = False) -> Admitted | MemberRefusal:
        """Whether messages, or cancels, may be written now."""
        if self._node_file.is_draining:
            return MemberRefusal.DRAINING
        disk = self._known.disk
        if disk is DiskState.DISK_STALLED:
            return MemberRefusal.DISK_STALLED
        if disk is DiskState.DISK_OUT or (disk is DiskState.DISK_FULL and not cancels):
            return MemberRefusal.DISK_FULL
        writing = self._current.writing
        if writing is None:
            return MemberRefusal.NO_WHEEL
        if not self._current.in_sync_enough(now_ms):
            return MemberRefusal.NOT_ENOUGH_REPLICAS
        return Admitted(writing.wheel, writing.seal.slot)

    def agreed_clock_ms(self, now_ms: int) -> int:
        """Returns the wall clock on which most nodes agree: mirrors believe no frame far beyond it.

        It is the median of the own clock and those that are heard; of two the lesser one.
        """
        clocks_ms = sorted([self._known.wall_ms, *self._hearing.clocks_ms(now_ms)])
        return clocks_ms[(len(clocks_ms) - 1) // 2]

    def status(self, now_ms: int, wall_ms: int, pid: int) -> ServerStatus:
        """Returns the server's status."""
        known = self._known
        known.now_ms, known.wall_ms = now_ms, wall_ms
        term = known.term
        own_answers = [] if term is None else self._peers.answers(term.fences)
        looked_for, lacks = self._mirrors.looked_for()
        return ServerStatus(
            heartbeat=self._own_heartbeat.heartbeat(),
            pid=pid,
            monotonic_ms=now_ms,
            peers=self._hearing.known_peers(),
            leader_heard_ms=self._prevote.leader_heard_ms,
            answers=(*own_answers, *self._fencing.answers()),
            votes=self._prevote.votes,
            vote_round=self._prevote.round,
            looked_for=looked_for,
            lacks=lacks,
            implausible_heartbeats=self._hearing.implausible,
        )

    # --- events

    def step(self, event: Event) -> list[Effect]:
        """Takes one event; returns the effects, to be carried out in order."""
        match event:
            case Tick() | Received() | CleanerReported():
                self._known.now_ms, self._known.wall_ms = event.now_ms, event.wall_ms
            case Written() | Mirrored() | Disconnected():
                self._known.now_ms = event.now_ms
            case _:
                pass
        effects = self._take(event)
        effects += self._announce_move()
        effects += self._node_file.settle(is_tick=isinstance(event, Tick))
        effects.sort(key=_rank)
        self._pending.asked(effects)
        return effects

    def _take(self, event: Event) -> list[Effect]:  # noqa: C901, PLR0911, PLR0912 - one for each
        match event:
            case Tick():
                return self._tick()
            case Received():
                return self._peers.received(event.sender, event.message)
            case Disconnected():
                self._hearing.disconnected(event.peer)
                self._prevote.gone(event.peer)
                return [WriteStatus()]
            case CleanerReported():
                return self._cleaner_reported(event.status)
            case Saved():
                return self._saved(event.state)
            case Opened():
                self._node_file.opened(event.wheel)
                return [WriteStatus()]
            case Written():
                self._current.written(event)
                return self._current.pushes()
            case Broken():
                self._node_file.must_leave(event.wheel)
                return []
            case Mirrored():
                return self._mirrored(event.held)
            case Left():
                last = self._node_file.left(event.wheel, None)
                self._verifying.left(event.wheel, last, self._known.now_ms)
                return [WriteStatus()]
            case Verified():
                return self._verified(event.held)
            case FoundAgain():
                wheel = event.held.card.wheel
                self._pending.done(ReadAgain, wheel=wheel)
                self._inventory.found_again(wheel, event.seqs, self._known.now_ms)
                return self._mirrored(event.held)
            case Unreadable():
                self._inventory.unreadable(event.wheel, event.seqs)
                self._unreadable_own(event.wheel, event.seqs)
                return []
            case Closed():
                self._pending.done(CloseWheel, wheel=event.held.card.wheel)
                self._inventory.put(event.held)
                return [WriteStatus()]
            case WheelDeleted():
                self._pending.done(DeleteWheel, wheel=event.wheel)
                self._mirrors.deleted(event.wheel)
                self._verifying.deleted(event.wheel)
                return [WriteStatus()]
            case Published():
                self._current.published(event.wheel, event.seq)
                self._inventory.published(event.wheel, event.seq)
                return []
            case Drain():
                self._node_file.drain()
                return []
            case DiskReported():
                return self._disk_reported(event.state)
            case Failed():
                self._failed(event.effect)
                return []

    def _tick(self) -> list[Effect]:
        known = self._known
        known.leader_clock_ms = self._leader_clock_ms()
        self._current.tick()
        cleaner = known.living_cleaner
        self._prevote.requested(None if cleaner is None else cleaner.prevote_request)
        self._peers.promise_away(self._mirrors.unwritable())
        return [
            *self._current.pushes(),
            *self._mirrors.tick(),
            *self._verifying.tick(known.now_ms, known.registry),
            *self._read_again(),
            *self._forget_lost(),
            *self._sweep(),
            *self._peers.ask_votes(),
            *self._own_heartbeat.tick(),
        ]

    def _disk_reported(self, state: DiskState) -> list[Effect]:
        """Reports the disk's state to origins at once: they should not wait for a full mirror."""
        known = self._known
        was_out, known.disk = known.disk.is_out, state
        if was_out == state.is_out:
            return []
        self._node_file.changed()
        return [WriteStatus(), *self._own_heartbeat.gossip()]

    # --- what is durable

    def _saved(self, state: NodeState) -> list[Effect]:
        effects = self._node_file.saved(state)
        self._mirrors.saved()
        for heartbeat in self._hearing.terms(self._known.now_ms):
            effects += self._peers.answer_leader(heartbeat)
        return [WriteStatus(), *effects]

    def _failed(self, effect: Effect) -> None:
        """Resets requests that are still needed, so that the next tick repeats them."""
        self._forgotten = NO_FRAMES
        if isinstance(effect, Sweep):
            self._sweep_again_ms = self._known.now_ms + SWEEP_AFTER_FAILURE_MS
        for dropped in self._pending.failed(effect):
            if isinstance(dropped, Mirror | Repair):
                self._mirrors.failed(dropped.card.wheel)
                if dropped is effect and isinstance(dropped, Mirror):
                    self._mirrors.not_written(dropped.card.wheel)
            elif isinstance(dropped, VerifyWheel):
                self._verifying.failed(dropped.wheel, self._known.now_ms)
            elif isinstance(dropped, DeleteWheel | CloseWheel):
                self._mirrors.not_ended(dropped.wheel)
                if dropped.wheel in self._verifying:
                    self._verifying.failed(dropped.wheel, self._known.now_ms)
            elif not isinstance(dropped, ReadAgain):  # which is due again by itself
                self._node_file.dropped(dropped)

    # --- own wheels

    def _unreadable_own(self, wheel: WheelId, seqs: SeqSet) -> None:
        """Leaves an own wheel that cannot serve one of its frames; the spare takes over.

        While the medium returns nothing, each would be left as soon as it is written: its reader
        reports the frame again, if it is still unreadable by then.
        """
        writing, now_ms = self._current.writing, self._known.now_ms
        if writing is None or writing.wheel != wheel or not seqs.within(1, writing.last_seq):
            return
        if now_ms >= self._leave_again_ms:
            self._leave_again_ms = now_ms + LEAVE_AGAIN_MS
            self._node_file.must_leave(wheel)

    def _mirrored(self, held: HeldWheel) -> list[Effect]:
        wheel = held.card.wheel
        if wheel == self._current.wheel:
            self._node_file.left(wheel, held)
            return [WriteStatus()]
        return [*self._mirrors.mirrored(held), *self._peers.update_if_leading()]

    def _verified(self, held: HeldWheel) -> list[Effect]:
        """Treats a verified wheel like all others; sweeps what has expired meanwhile."""
        last = self._verifying.done(held.card.wheel)
        self._inventory.put(held)
        if last is not None:
            self._inventory.left(held.card.wheel, last)
        self._swept = None
        return [WriteStatus()]

    def _announce_move(self) -> list[Effect]:
        """Announces near-due commits immediately, since short delays depend on it."""
        move = self._current.take_move()
        if move is None:
            return []
        acknowledge = Acknowledge(move.wheel, move.to)
        return (
            [acknowledge, WriteStatus(), *self._own_heartbeat.gossip()]
            if move.is_near
            else [acknowledge]
        )

    # --- reports of the cleaner

    def _cleaner_reported(self, status: CleanerStatus | None) -> list[Effect]:
        known = self._known
        if status is not None and status.boot != known.state.boot_id:
            return []
        stood, known.cleaner = _standing(known), status
        effects: list[Effect] = []
        if stood != _standing(known):
            effects += self._own_heartbeat.gossip()  # standing should not wait for the tick
        if self._prevote.requested(None if status is None else status.prevote_request):
            effects += self._peers.ask_votes()
        if status is None:
            return effects
        if status.control_offset >= 0:
            self._follow(status)
        self._fencing.asked(status.fences, known.state)
        self._fencing.filled(status.fills)
        unreadable = status.unreadable - known.lost
        for wheel, seqs in unreadable.items():
            self._unreadable_own(wheel, seqs)
        if status.has_term:  # nothing else reads them
            self._inventory.reported(unreadable, known.now_ms)
        self._node_file.changed()
        return effects

    def _follow(self, status: CleanerStatus) -> None:
        """Keeps what is committed, which stays true even if the cleaner is no longer alive."""
        known = self._known
        known.has_read(status.progress)
        if status.lost != known.lost:
            known.lost = status.lost
            self._inventory.lost(status.lost)
        registry = known.registry
        if registry is not None and registry.wheels is status.wheels:
            registry.floor, registry.nodes = status.floor, status.nodes
            return
        known.registry = Registry(status.wheels, status.floor, status.nodes)
        self._completeness.forget(known.registry)
        self._fencing.filled({wheel: record.fill for wheel, record in status.wheels.items()})

    def _leader_clock_ms(self) -> int | None:
        if self._known.term is not None:
            return self._known.sealing_clock_ms
        return self._hearing.leader_clock_ms(self._known.now_ms)

    def _read_again(self) -> list[Effect]:
        return [
            ReadAgain(wheel, seqs)
            for wheel, seqs in self._inventory.to_read_again(self._known.now_ms).items()
            if wheel not in self._verifying
            and not self._pending.is_writing(wheel)
            and not self._pending.has(ReadAgain, wheel)
            and not self._pending.has(DeleteWheel, wheel)
        ]

    def _forget_lost(self) -> list[Effect]:
        new = self._known.lost - self._forgotten
        self._forgotten = self._known.lost
        return [ForgetLost(new)] if new else []

    def _sweep(self) -> list[Effect]:
        """Sweeps when the floor has moved, and from time to time what could not be deleted."""
        floor, now_ms = self._known.floor, self._known.now_ms
        if floor is None or (floor == self._swept and now_ms < self._sweep_again_ms):
            return []
        self._swept = floor
        self._sweep_again_ms = now_ms + SWEEP_EVERY_MS
        return [Sweep(floor)]


def _standing(known: Known) -> tuple[bool, bool]:
    """Whether this node stands, and whether it leads: both are reported to the others."""
    return known.stands, known.term is not None


def _rank(effect: Effect) -> int:
    """Ranks effects: those that cannot fail, those that are answered, all others."""
    if isinstance(effect, Awaited):
        return 1
    return 0 if isinstance(effect, AtOnce) else 2
