"""The member machine: what a node's server decides, for any number of nodes.

It takes events and returns effects (core/node/events.py), does no I/O and knows no clock except the
one in the events. It is level-triggered: nodes report whole states, repeatedly; what is durable is
what was `Saved`; every tick compares what is with what should be. So a lost message or a failed
effect is made up for by a later tick.

| part | decides |
|---|---|
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

The driver does first the effects of a step that cannot fail, then those that are answered with an
event, then the rest. Effects that cannot fail are done at once, by the stepping thread: they
depend on nothing that is not durable yet. Effects with answers are done one after another, and if
one fails, those after it are dropped, since they are requested again (`PendingEffects`). Each of
the rest stands alone: a full disk that accepts no `Save` must not keep `Sweep` from freeing space.
So do `DeleteWheel`, `VerifyWheel` and `ReadAgain`, although they are answered: all of them concern
any number of files, in steps between other jobs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.folder.node_state import NodeState
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.member.own_heartbeat import OwnHeartbeat
from delaywheel_replica.core.member.prevote import Prevote
from delaywheel_replica.core.node.events import (
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
    Send,
    Serve,
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
from delaywheel_replica.core.node.heard_heartbeats import HeardHeartbeats, HeartbeatNews
from delaywheel_replica.core.node.plausible import known_number, tempered
from delaywheel_replica.core.node.rolled_back import was_heard_later
from delaywheel_replica.core.node.shared_state import Known, PendingEffects, Registry
from delaywheel_replica.core.protocol.frames import NO_FRAMES
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise
from delaywheel_replica.core.protocol.messages import (
    Applied,
    Fetch,
    Frames,
    Gossip,
    Lacks,
    PeerMessage,
    PrevoteRequest,
    Refused,
    Vote,
)
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role, ServerStatus
from delaywheel_replica.core.wheels.completeness import Completeness
from delaywheel_replica.core.wheels.fencing import Fencing, answer
from delaywheel_replica.core.wheels.inventory import Inventory
from delaywheel_replica.core.wheels.mirrors import AHEAD_SECONDS, Mirrors
from delaywheel_replica.core.wheels.node_file import NodeFile
from delaywheel_replica.core.wheels.open_wheel import CurrentWheel
from delaywheel_replica.core.wheels.verifying import Verifying

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
        seal_slot: No message may be for a slot below.
        last_slot: Nor for a later one than this: no mirror would believe it, and the wheel would
            wait for its mirrors until their clocks are that far.
    """

    wheel: WheelId
    seal_slot: int
    last_slot: int


class Member:
    """The state machine of one node's server."""

    def __init__(self, config: MemberConfig, started: Started) -> None:
        self._known = known = Known(config, started.state, started.now_ms)
        self._pending = pending = PendingEffects()
        self._hearing = hearing = HeardHeartbeats(config)
        self._prevote = Prevote(config.node, started.now_ms)
        self._fencing = fencing = Fencing()
        self._completeness = Completeness(config.node, started.state.boot_id)
        self._inventory = inventory = Inventory(started.held)
        self._verifying = verifying = Verifying(started.unverified, pending)
        self._current = current = CurrentWheel(known, hearing)
        self._node_file = node_file = NodeFile(
            known, fencing, self._completeness, inventory, current, pending
        )
        self._mirrors = Mirrors(known, hearing, fencing, inventory, current, pending, verifying)
        self._own_heartbeat = OwnHeartbeat(known, hearing, node_file, inventory, current, verifying)
        self._swept: int | None = None
        self._sweep_again_ms = 0
        self._leave_again_ms = 0
        self._forgotten = NO_FRAMES

    # --- queries of the commit loop and the status

    @property
    def in_sync(self) -> frozenset[str]:
        """The members that must hold a frame before it is acknowledged; none without a wheel."""
        replication = self._current.replication
        return frozenset() if replication is None else replication.in_sync

    def admit(self, now_ms: int, kind: Kind = Kind.MESSAGES) -> Admitted | MemberRefusal:
        """Admits a group to be written; if admitted, `Written` must follow in any case."""
        refusal = self.refusal(now_ms, kind)
        if refusal is not None:
            return refusal
        replication = self._current.hold_seal()
        clock_ms = self._hearing.agreed_clock_ms(self._known.wall_ms, now_ms)
        last_slot = clock_ms // 1000 + self._known.config.span_seconds + AHEAD_SECONDS // 2
        return Admitted(replication.wheel, replication.seal.slot, last_slot)

    def refusal(self, now_ms: int, kind: Kind = Kind.MESSAGES) -> MemberRefusal | None:
        """Why nothing of this kind may be written now; None: it may."""
        if self._node_file.is_draining:
            return MemberRefusal.DRAINING
        disk = self._known.disk
        if disk is DiskState.DISK_STALLED:
            return MemberRefusal.DISK_STALLED
        # The reserve is for cancels, commits and releases as well.
        if disk is DiskState.DISK_OUT or (disk is DiskState.DISK_FULL and kind is Kind.MESSAGES):
            return MemberRefusal.DISK_FULL
        replication = self._current.replication
        if replication is None and not self._node_file.waits_for_members:
            return MemberRefusal.NO_WHEEL
        has_enough = replication is not None and replication.has_enough(now_ms)
        return None if has_enough else MemberRefusal.NOT_ENOUGH_REPLICAS

    def status(self, now_ms: int, wall_ms: int, pid: int) -> ServerStatus:
        """Returns the server's status."""
        known = self._known
        known.now_ms, known.wall_ms = now_ms, wall_ms
        term = known.term
        own_answers = [] if term is None else self._answers(term.fences)
        looked_for, lacks = self._mirrors.looked_for()
        return ServerStatus(
            heartbeat=self._own_heartbeat.heartbeat(),
            pid=pid,
            monotonic_ms=now_ms,
            peers=self._hearing.known_peers(),
            leader_heard_ms=self._prevote.leader_heard_ms,
            answers=(*own_answers, *self._fencing.answers()),  # the second: of other members
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
        self._pending.asked(effects)
        return effects

    def _take(self, event: Event) -> list[Effect]:  # noqa: C901, PLR0911, PLR0912 - one for each
        match event:
            case Tick():
                return self._tick()
            case Received():
                return self._received(event.sender, event.message)
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
        known.leader_clock_ms = (
            self._hearing.leader_clock_ms(known.now_ms)
            if known.term is None
            else known.sealing_clock_ms
        )
        self._current.tick()
        cleaner = known.living_cleaner
        self._prevote.requested(None if cleaner is None else cleaner.prevote_request)
        # Their origins leave wheels that cannot be written here.
        self._asked([Fence(each.node, each.number) for each in self._mirrors.unwritable()])
        return [
            *self._current.pushes(),
            *self._mirrors.tick(),
            *self._verifying.tick(known.now_ms, known.registry),
            *self._read_again(),
            *self._forget_lost(),
            *self._sweep(),
            *self._ask_votes(),
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
            effects += self._answer_leader(heartbeat)
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
                if dropped.wheel in self._verifying.wheels:
                    self._verifying.failed(dropped.wheel, self._known.now_ms)
            elif not isinstance(dropped, ReadAgain):  # which is due again by itself
                self._node_file.dropped(dropped)

    # --- own wheels

    def _unreadable_own(self, wheel: WheelId, seqs: SeqSet) -> None:
        """Leaves an own wheel that cannot serve one of its frames; the spare takes over.

        While the medium returns nothing, each would be left as soon as it is written: its reader
        reports the frame again, if it is still unreadable by then.
        """
        replication, now_ms = self._current.replication, self._known.now_ms
        if (
            replication is None
            or replication.wheel != wheel
            or not seqs.within(1, replication.last_seq)
        ):
            return
        if now_ms >= self._leave_again_ms:
            self._leave_again_ms = now_ms + LEAVE_AGAIN_MS
            self._node_file.must_leave(wheel)

    def _mirrored(self, held: HeldWheel) -> list[Effect]:
        wheel = held.card.wheel
        if wheel == self._current.wheel:
            self._node_file.left(wheel, held)
            return [WriteStatus()]
        return [*self._mirrors.mirrored(held), *self._update_if_leading()]

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
        acknowledge, is_near = move
        return [acknowledge, *([WriteStatus(), *self._own_heartbeat.gossip()] if is_near else [])]

    # --- messages of other nodes

    def _received(  # noqa: C901, PLR0911 - one for each message
        self, sender: str, message: PeerMessage
    ) -> list[Effect]:
        """Takes one message; one of an unknown node is ignored."""
        if sender not in self._hearing.others:
            return []
        self._hearing.message(sender, self._known.now_ms)
        match message:
            case Gossip():
                return self._gossiped(sender, message)
            case Frames():
                return self._mirrors.came(sender, message)
            case Applied():
                self._current.applied(sender, message)
                return self._current.pushes()
            case Refused():
                self._refused(message)
                return []
            case Fetch():
                return self._serve(sender, message)
            case Lacks():
                self._mirrors.note_lacks(sender, message)
                return self._mirrors.fetch()
            case Promise():
                return self._promised(sender, message)
            case PrevoteRequest():
                return self._asked_vote(sender, message)
            case Vote():
                return [WriteStatus()] if self._prevote.voted(sender, message) else []

    def _refused(self, message: Refused) -> None:
        """Fences own wheels: one member that refuses them is enough to prevent acknowledgement."""
        node = self._known.node
        if message.origin == node:
            upto = min(message.upto, self._known_number(node))
            self._asked([Fence(node, upto)])

    def _known_number(self, origin: str) -> int:
        """Returns the highest plausible wheel number: promises beyond it would bind forever."""
        known = self._known
        registered = () if known.registry is None else known.registry.wheels
        held = {*self._inventory, *self._verifying.wheels}
        number = known_number(origin, registered, held, self._hearing.heartbeats())
        return max(number, known.state.last_number) if origin == known.node else number

    def _asked(self, fences: Iterable[Fence]) -> None:
        if self._fencing.asked(fences, self._known.state):
            self._node_file.changed()

    def _gossiped(self, sender: str, gossip: Gossip) -> list[Effect]:
        known, now_ms = self._known, self._known.now_ms
        effects: list[Effect] = []
        most_slot = known.wall_ms // 1000 - known.config.late_window_s
        heartbeats = [
            tempered(heartbeat, most_slot) for heartbeat in (gossip.heartbeat, *gossip.others)
        ]
        news = self._hearing.gossip(sender, Gossip(heartbeats[0], tuple(heartbeats[1:])), now_ms)
        self._hearing.message(sender, now_ms)
        for each in news:
            if was_heard_later(known.state, each.heartbeat):
                known.is_rolled_back = True
            effects += self._heard(each)
        if news and news[0].is_direct:
            effects += self._current.pushes()
            if self._current.wheel is None:
                self._node_file.changed()  # the spare may wait for it
        return effects

    def _heard(self, news: HeartbeatNews) -> list[Effect]:
        heartbeat, known = news.heartbeat, self._known
        effects = self._update_if_leading() if self._inventory.heard(heartbeat) else []
        if news.is_direct:
            self._completeness.heard(heartbeat)
            self._current.heard(heartbeat)
            effects += self._refuse_named(heartbeat)
        is_waited_for = heartbeat.stands or heartbeat.term is not None
        if news.is_direct and is_waited_for:
            self._prevote.leader_heard(heartbeat.node, known.now_ms)
        elif news.is_direct and self._prevote.gone(heartbeat.node):
            effects.append(WriteStatus())  # the cleaner may stand at once
        if heartbeat.term is None:
            return effects
        self._fencing.limited(heartbeat.term.limits)
        self._asked(f for f in heartbeat.term.fences if f.upto <= self._known_number(f.origin))
        return [*effects, *self._answer_leader(heartbeat)]

    def _refuse_named(self, heartbeat: Heartbeat) -> list[Effect]:
        """Warns an origin that uses fenced wheels, before any caller's frames are at stake."""
        upto = self._known.state.fenced.get(heartbeat.node, 0)
        if all(wheel.number > upto for wheel in heartbeat.named):
            return []
        return [Send(heartbeat.node, Refused(heartbeat.node, upto))]

    def _answer_leader(self, heartbeat: Heartbeat) -> list[Effect]:
        """Sends a leader this node's durable answers to the fences it asks for."""
        fences = () if heartbeat.term is None else heartbeat.term.fences
        return [Send(heartbeat.node, found) for found in self._answers(fences)]

    def _answers(self, fences: Iterable[Fence]) -> list[Promise]:
        """Returns this node's durable answers, at most one for each origin."""
        state = self._known.state
        if self._known.is_rolled_back:
            return []
        found = (answer(state, fence, self._inventory, self._verifying) for fence in sorted(fences))
        return [each for each in found if each is not None]

    def _promised(self, sender: str, given: Promise) -> list[Effect]:
        """Keeps another node's answer to a fence; answers about unknown origins are dropped."""
        origin = given.fence.origin
        is_configured = origin in {self._known.node, *self._hearing.others}
        if not is_configured and self._known_number(origin) == 0:
            return []
        return [WriteStatus()] if self._fencing.answered(sender, given) else []

    def _update_if_leading(self) -> list[Effect]:
        """Updates the status at once if the own cleaner leads."""
        return [] if self._known.term is None else [WriteStatus()]

    def _serve(self, sender: str, fetch: Fetch) -> list[Effect]:
        """Serves frames, except those that were never written or not reported yet."""
        if fetch.wheel in self._verifying.wheels:
            return []  # the asking node will ask another, and again
        replication, held = self._current.replication, self._inventory.get(fetch.wheel)
        if replication is not None and replication.wheel == fetch.wheel:
            end = replication.last_seq
        elif fetch.wheel == self._current.wheel:
            return []
        else:
            end = 0 if held is None else held.applied
        if fetch.first_seq <= end:
            last_seq = min(fetch.last_seq, end)
            return [Serve(sender, fetch.wheel, fetch.first_seq, last_seq, fetch.request)]
        lacks = Lacks(
            fetch.request, fetch.wheel, self._known.storage, fetch.first_seq, fetch.last_seq
        )
        return [Send(sender, lacks)]

    def _asked_vote(self, sender: str, ask: PrevoteRequest) -> list[Effect]:
        known = self._known
        cleaner = known.living_cleaner
        stands = known.term is not None or (
            cleaner is not None
            and cleaner.role is Role.CANDIDATE
            and cleaner.prevote_request is None
        )
        vote = self._prevote.asked(sender, ask, known.now_ms, stands=stands)
        return [] if vote is None else [Send(sender, vote), WriteStatus()]

    def _ask_votes(self) -> list[Effect]:
        """Asks all other nodes for votes, if the own cleaner wants any."""
        ask = self._prevote.ask()
        return [] if ask is None else [Send(peer, ask) for peer in self._hearing.others]

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
            effects += self._ask_votes()
        if status is None:
            return effects
        if status.control_offset >= 0:
            self._follow(status)
        self._fencing.asked(status.fences, known.state)
        self._fencing.limited(status.limits)
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
        known.note_progress(status.progress)
        record = status.nodes.get(known.node)
        if record is not None and record.is_ahead_of(known.storage, known.state.saves):
            known.is_rolled_back = True
        if status.lost != known.lost:
            known.lost = status.lost
            self._inventory.lost(status.lost)
        registry = known.registry
        if registry is not None and registry.wheels is status.wheels:
            registry.floor, registry.nodes = status.floor, status.nodes
            return
        known.registry = Registry(status.wheels, status.floor, status.nodes)
        self._completeness.forget(known.registry)
        self._fencing.limited({wheel: record.limit for wheel, record in status.wheels.items()})

    def _read_again(self) -> list[Effect]:
        return [
            ReadAgain(wheel, seqs)
            for wheel, seqs in self._inventory.to_read_again(self._known.now_ms).items()
            if wheel not in self._verifying.wheels
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
