"""Drives the member machine: feeds it events, and carries out its effects.

The simulation and the real server run this same class; threads, queue, clocks, network and status
files are behind `Outside` (outside.py).

======================  =========================================  ============================
thread                  calls                                      waits for
======================  =========================================  ============================
heartbeat thread        ``tick``, ``status``                       the lock
threads of peers        ``received``, ``disconnected``             the lock; about frames also
                                                                   for the disk
event loop              ``cleaner_reported``, ``submit``,          the lock
                        ``status``, ``refusal``
books, readers, upkeep  ``published``, ``unreadable``,             the lock; the last two also for
                        ``look_at_disk``, ``checkpoint``           the disk
store thread, those     ``do``: the jobs, in order                 the disk
that may wait for it
======================  =========================================  ============================

- The machine is stepped under one lock, and clocks are read under it; nothing else is done there.
  No step ever waits for a disk, so a slow disk delays no heartbeat and no status.
- Effects that cannot fail (`Send`, `WriteStatus`, `Acknowledge`) are done at once by the thread
  that stepped, outside the lock. Two threads may overtake each other there; the machine tolerates
  that (core/protocol/messages.py), and an acknowledgement names its wheel.
- Effects that touch the disk become jobs, queued in the order of the steps: those that are
  answered form one job, each other one a job of its own (core/member/member.py says why).
  Callers' groups are jobs of the same queue. So the store has one writer at a time, which does
  everything in one order.
- Frames from a peer are written and answered by the thread that has read them, unless another one
  is at work (runtime.py): a hand-over costs more than the job.
- Nothing delays a caller's group for long (time_sharing.py): deleting files and verifying wheels is
  done in steps, each a job of its own, and other jobs of many frames let a group in between two
  pieces. So groups may overtake other jobs. Among effects, only deletions and verifications may be
  overtaken: deletions concern only what is finished, whatever else is done to the wheel meanwhile,
  and nothing else is done to a wheel that is being verified.
- A group steps the machine once, when it is written (`Written`). From its admission until then the
  seal does not move (core/wheels/open_wheel.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.seqset import SeqSet
from delaywheel.storage.files.wheel_folder import WheelMissing
from delaywheel.storage.frames.kinds import WITHDRAWING, Kind
from delaywheel.storage.writing.wheel import WheelBroken
from delaywheel_replica.core.member.member import Member, MemberRefusal
from delaywheel_replica.core.node.events import (
    Acknowledge,
    Broken,
    CleanerReported,
    Closed,
    CloseWheel,
    Disconnected,
    DiskReported,
    Drain,
    Effect,
    Event,
    Failed,
    ForgetLost,
    HeldWheel,
    LeaveWheel,
    Left,
    MemberConfig,
    Mirror,
    Mirrored,
    Opened,
    OpenWheel,
    Published,
    Received,
    Repair,
    Save,
    Saved,
    Send,
    Serve,
    Started,
    Sweep,
    Tick,
    Unreadable,
    WriteStatus,
    Written,
    divide,
)
from delaywheel_replica.core.node.plausible import check
from delaywheel_replica.core.protocol.messages import ABOUT_FRAMES, Frames, Lacks, PeerMessage
from delaywheel_replica.core.protocol.status_files import CleanerStatus, ServerStatus
from delaywheel_replica.server.commit.committer import (
    Answers,
    Committer,
    Group,
    Request,
    write,
)
from delaywheel_replica.server.commit.near_cancels import NearCancels
from delaywheel_replica.server.commit.outside import GroupJob, Job, Outside, StepJob
from delaywheel_replica.server.commit.time_sharing import (
    TIME_SLICE_MS,
    AllOfAWheel,
    LongWork,
    TimeSlice,
)
from delaywheel_replica.server.node.disk_state import DiskWatch
from delaywheel_replica.server.node.refusals import Refusal
from delaywheel_replica.server.store.store import Store

MESSAGE_BYTES: Final = 2 << 20

_EventAt: TypeAlias = Callable[[int, int], Event]
"""Makes an event from the monotonic and the wall clock."""


class Driver:
    """One node's server without threads, calls and status files; see the module.

    Attributes:
        machine: The member machine; tests alone may use it without the lock.
        floor: The greatest floor to which a sweep was requested.
        near_cancels: The next seconds that have a cancel.
    """

    def __init__(
        self,
        config: MemberConfig,
        store: Store,
        outside: Outside,
        *,
        message_bytes: int = MESSAGE_BYTES,
        slice_at_most: int | None = None,
    ) -> None:
        """Begins with what the store has found.

        Args:
            message_bytes: The most bytes of frames in one message, unless it has a single frame.
            slice_at_most: The most frames or files in a time slice; None: as many as it allows.
        """
        started = Started(
            store.state, store.held_wheels(), outside.now_ms(), unverified=store.unverified
        )
        self.machine = Member(config, started)
        self.floor = 0
        self.near_cancels = NearCancels(outside.wall_ms())
        self._store = store
        self._outside = outside
        self._committer = Committer()
        self._disk = DiskWatch(
            store.room, outside.now_ms, lambda state: self._report(DiskReported(state))
        )
        self._storage = store.state.storage
        self._message_bytes = message_bytes
        self._batch_frames = config.batch_frames
        self._slice_at_most = slice_at_most
        self._long_work = LongWork(store, outside.now_ms, most_files=slice_at_most)
        # When the last group was accepted, and into which wheel.
        self._accepted: tuple[WheelId, int] | None = None
        self._lock = threading.Lock()

    # --- queries, on any thread

    def status(self) -> ServerStatus:
        """Returns a new status."""
        outside = self._outside
        with self._lock:
            return self.machine.status(outside.now_ms(), outside.wall_ms(), outside.pid)

    @property
    def in_sync(self) -> frozenset[str]:
        """The members that must hold each frame of the open wheel."""
        with self._lock:
            return self.machine.in_sync

    @property
    def refusal(self) -> MemberRefusal | None:
        """Why no messages are accepted now; None: they are."""
        with self._lock:
            return self.machine.refusal(self._outside.now_ms())

    # --- events, on any thread

    def tick(self) -> None:
        """Handles a tick; call it every 100 ms."""
        self._step(Tick)
        self._disk.tick()
        now_ms, disk_hangs = self._outside.now_ms(), self._disk.is_stalled
        overdue = self._committer.overdue(now_ms, disk_hangs=disk_hangs)
        if overdue:
            self._outside.answer(overdue)
        if self._queue_group():
            self._outside.do_jobs(may_wait=False)

    def received(self, sender: str, message: PeerMessage) -> None:
        """Handles a message of another node; may wait for the disk. MalformedError: did nothing."""
        check(sender, message)
        may_wait = isinstance(message, ABOUT_FRAMES)
        self._step(
            lambda now_ms, wall_ms: Received(sender, message, now_ms, wall_ms), may_wait=may_wait
        )

    def disconnected(self, peer: str) -> None:
        """Notes that the connection to another node broke."""
        self._step(lambda now_ms, _: Disconnected(peer, now_ms))

    def cleaner_reported(self, status: CleanerStatus | None) -> None:
        """Handles the newest status of the cleaner; None: it is not alive."""
        self._step(lambda now_ms, wall_ms: CleanerReported(status, now_ms, wall_ms))

    def published(self, wheel: WheelId, seq: int) -> None:
        """Notes that the ledger of a wheel is published up to this seq."""
        self._report(Published(wheel, seq))

    def unreadable(self, wheel: WheelId, seq: int) -> None:
        """Notes that a reader found a damaged frame."""
        self._report(Unreadable(wheel, SeqSet.of([seq])))

    def drain(self) -> None:
        """Begins a clean stop; wheels not yet verified are left to the next start."""
        self._long_work.verifies = False
        self._report(Drain())

    def look_at_disk(self) -> None:
        """Measures the free space; may wait for the disk."""
        self._disk.look()

    def checkpoint(self) -> None:
        """Puts written data on the medium; may wait. After an OSError the next call tries again."""
        wheel = self._store.wheel
        try:
            self._store.checkpoint(lambda *damaged: self._report(Unreadable(*damaged)))
        except WheelBroken as error:
            self._disk.failed(error)
            if wheel is not None:
                self._report(Broken(wheel.wheel, str(error)))
        except OSError as error:
            self._disk.failed(error)
            raise

    def submit(self, *requests: Request) -> None:
        """Queues requests for the next group; each is answered exactly once."""
        self._committer.submit(requests, self._outside.now_ms())
        if self._queue_group():
            self._outside.do_jobs(may_wait=False)

    # --- steps

    def _report(self, event: Event) -> None:
        self._step(_at_any_time(event))

    def _step(self, event_at: _EventAt, *, may_wait: bool = False) -> None:
        """Steps the machine with an event made from the clocks; may do jobs if it `may_wait`."""
        outside = self._outside
        with self._lock:
            now_ms = outside.now_ms()
            event = event_at(now_ms, outside.wall_ms())
            effects = self.machine.step(event)
            at_once = self._queue(effects)
        outside.happened(event)
        self._do_at_once(at_once)
        if self._queue_group() or len(at_once) < len(effects):
            outside.do_jobs(may_wait=may_wait)

    def _queue(self, effects: list[Effect]) -> list[Effect]:
        """Queues the effects that touch the disk, in order; returns the others."""
        at_once, awaited, alone = divide(effects)
        if awaited:
            self._outside.enqueue(deque(awaited))
        for effect in alone:
            self._outside.enqueue(deque([effect]))
        return at_once

    def _do_at_once(self, effects: list[Effect]) -> None:
        """Answers callers first, and updates the status last, since only the cleaner reads it.

        But it is new when a caller of a cancel is answered: that one wakes the cleaner at once.
        """
        answers: Answers = []
        for effect in effects:
            if isinstance(effect, Acknowledge):
                answers = self._committer.acknowledge(effect.wheel, effect.high_watermark)
        writes_status = any(isinstance(effect, WriteStatus) for effect in effects)
        status_first = any(request.kind is Kind.CANCELS for request, _ in answers)
        if writes_status and status_first:
            self._outside.write_status()
        for effect in effects:
            if isinstance(effect, Acknowledge):
                self._outside.acknowledged(effect, answers)
            elif isinstance(effect, Send):
                self._outside.send(effect.peer, effect.message)
        if writes_status and not status_first:
            self._outside.write_status()

    # --- jobs, on the store's thread

    def begins(self) -> None:
        """Notes the start of a job, or of its next piece, so that `tick` sees how long it takes."""
        self._disk.begins()

    def do(self, job: Job) -> None:
        """Carries out a job to its end."""
        self.begins()
        match job:
            case GroupJob():
                self._write_group()
            case StepJob():
                self.do_step()
            case _:
                while job:
                    self.do_next(job)
        self.ends()

    def ends(self) -> None:
        """Notes the end of a job."""
        self._disk.ends()

    def do_step(self) -> None:
        """Does one step of long work; the rest queues behind jobs that came meanwhile."""
        event, has_more = self._long_work.step()
        if has_more:
            self._outside.enqueue(StepJob())
        if event is not None:
            self._report(event)

    def do_next(self, effects: deque[Effect]) -> None:
        """Carries out the first of these effects; if it fails, the others are dropped.

        Many short ones take long too: a group that has waited a time slice goes before the next.
        """
        if self._committer.waits_ms(self._outside.now_ms()) >= TIME_SLICE_MS:
            self._write_group()
        self.begins()
        effect = effects.popleft()
        if isinstance(effect, AllOfAWheel):
            if isinstance(effect, Sweep):
                self.floor = max(self.floor, effect.floor)
            if self._long_work.begin(effect):
                self._outside.enqueue(StepJob())
            return
        try:
            event_at = self._carry_out(effect)
        except (OSError, WheelBroken) as error:
            effects.clear()
            self._disk.failed(error)
            self._report(Failed(effect, str(error)))
            return
        if event_at is not None:
            self._step(event_at)

    def _carry_out(  # noqa: PLR0911 - one for each effect
        self, effect: Effect
    ) -> _EventAt | None:
        """Carries out an effect that touches the disk; returns the event for the machine."""
        store = self._store
        match effect:
            case Save():
                store.save(effect.state)
                return _at_any_time(Saved(effect.state))
            case OpenWheel():
                store.open_wheel(effect.spare)
                return _at_any_time(Opened(effect.spare.wheel))
            case LeaveWheel():
                self._outside.answer(self._committer.give_up(Refusal(Reason.WHEEL_LOST)))
                held = store.leave_wheel()
                return _at_any_time(Left(effect.wheel)) if held is None else _mirrored(held)
            case Mirror():
                return _mirrored(self._mirror(effect))
            case Repair():
                between = self._write_group
                held = store.repair(effect.card, effect.frames, between=between)
                self.near_cancels.wrote(effect.frames, self._outside.wall_ms())
                return _mirrored(held)
            case CloseWheel():
                between = self._write_group
                closed = store.close_wheel(effect.wheel, effect.final_seq, between=between)
                return _at_any_time(Closed(closed))
            case Serve():
                self._serve(effect)
            case ForgetLost():
                store.forget_lost(effect.frames)
            case _:
                raise AssertionError(f"{effect} is done at once")
        return None

    # --- frames of other nodes and for them, on the store's thread

    def _time_slice(self) -> TimeSlice:
        return TimeSlice(self._outside.now_ms, self._slice_at_most)

    def _mirror(self, effect: Mirror) -> HeldWheel:
        """Writes another node's frames, in pieces; a piece without any frame ends the work."""
        held: HeldWheel | None = None
        frames = effect.frames
        while True:
            before = held
            is_over = self._time_slice().is_over
            try:
                held = self._store.mirror(
                    effect.card, frames, is_over=is_over, between=self._write_group
                )
            except OSError:
                self._report_missing(effect.card.wheel)
                raise
            done = int(frames.seqs.searchsorted(held.applied, side="right"))
            wrote = frames.part(0, done)
            self._disk.wrote(wrote.length_bytes)
            self.near_cancels.wrote(wrote, self._outside.wall_ms())
            frames = frames.part(done, len(frames))
            if not len(frames) or (before is not None and held.applied == before.applied):
                return held
            self._write_group()

    def _report_missing(self, wheel: WheelId) -> None:
        """Reports what a copy is missing: what refused a frame may have lost others as well."""
        with suppress(WheelMissing):
            missing = self._store.held(wheel).missing
            if missing:
                self._report(Unreadable(wheel, missing))

    def _serve(self, effect: Serve) -> None:
        """Sends a push completely, in as many messages as needed; a fetch in one message.

        What a time slice leaves of a push queues behind what came meanwhile.
        """
        store, outside, first_seq = self._store, self._outside, effect.first_seq
        time_slice = self._time_slice()
        while first_seq <= effect.last_seq:
            frames, missing, unreadable = store.outgoing.read(
                effect.wheel,
                first_seq,
                effect.last_seq,
                max_bytes=self._message_bytes,
                max_frames=self._batch_frames,
                floor=self.floor,
                now_ms=outside.wall_ms(),
                is_over=time_slice.is_over,
                again=effect.again or effect.request != 0,
            )
            if len(frames):
                card = store.card(effect.wheel)
                outside.send(effect.peer, Frames(card, frames, effect.request))
                first_seq = frames.last_seq + 1
            elif effect.request and missing:
                first, last = missing.first, missing.last
                lacks = Lacks(effect.request, effect.wheel, self._storage, first, last)
                outside.send(effect.peer, lacks)
            if missing or unreadable:
                self._report(Unreadable(effect.wheel, missing | unreadable))
            if effect.request or missing or unreadable or not len(frames):
                return
            if first_seq <= effect.last_seq and time_slice.has_ended:
                outside.enqueue(deque([replace(effect, first_seq=first_seq)]))
                return

    # --- callers' groups, on the store's thread

    def _queue_group(self) -> bool:
        """Queues the next group, if there is one and it need not wait; on any thread."""
        if not self._committer.needs_call:
            return False
        refused = self.refusal is not None
        if not self._committer.call_for_group(self._outside.now_ms(), refused=refused):
            return False
        self._outside.enqueue(GroupJob())
        return True

    def _write_group(self) -> None:
        """Writes the next group, if one is due; also called between pieces of a long job."""
        self.begins()
        group = self.begin_group()
        if group is not None:
            self.finish_group(group)

    def begin_group(self) -> Group | None:
        """Admits the next group; None if none is called for, or it was refused."""
        requests = self._committer.take()
        if not requests:
            return None
        with self._lock:
            admission = self.machine.admit(self._outside.now_ms(), requests[0].kind)
        if isinstance(admission, MemberRefusal):
            self._outside.answer(self._committer.refuse(Refusal(Reason[admission.value])))
            self._queue_group()
            return None
        return Group.of(requests, admission)

    def _accept_at_ms(self, wheel: WheelId) -> int:
        """Returns the wall clock, never decreasing within a wheel: the ledger depends on that."""
        before = self._accepted
        now_ms = self._outside.wall_ms()
        if before is not None and before[0] == wheel:
            now_ms = max(now_ms, before[1])
        self._accepted = wheel, now_ms
        return now_ms

    def finish_group(self, group: Group) -> None:
        """Writes an admitted group, whose callers then wait for replication."""
        store, wheel = self._store, group.admitted.wheel
        accepted_at_ms = self._accept_at_ms(wheel)
        seq = store.last_seq
        outcome = write(store, group, accepted_at_ms)
        written = outcome.group
        if len(written.bundle):
            seq = written.bundle.last_seq
            self._disk.wrote(written.bundle.length_bytes)
            if group.kind is Kind.CANCELS:
                self.near_cancels.wrote(written.bundle, accepted_at_ms)
            entered = outcome.columns if group.kind is Kind.MESSAGES else None
            self._outside.enter(wheel, entered, written, accepted_at_ms)
        refused = self._committer.wait(group, seq, self._outside.now_ms())
        # Cancels and releases wait for the next commit.
        due_ms = 0 if group.kind in WITHDRAWING else int(group.columns.due_ms.min())
        self._step(lambda now_ms, _: Written(wheel, seq, store.top_slot, now_ms, due_ms))
        if refused:
            self._outside.answer(refused)
        if outcome.broken is not None:
            self._disk.failed(outcome.broken)
            self._report(Broken(wheel, str(outcome.broken)))


def _at_any_time(event: Event) -> _EventAt:
    return lambda *_: event


def _mirrored(held: HeldWheel) -> _EventAt:
    return lambda now_ms, _: Mirrored(held, now_ms)
