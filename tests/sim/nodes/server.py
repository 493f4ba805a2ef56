"""A simulated server process: the real driver and store, and their environment.

Jobs are done one after another: the effects of one step, or one group of requests to be written.
Each takes `disk_us`; what comes meanwhile is stepped at once, and what cannot fail is done at
once, as threads of the real server would do it.

It ends when the disk says so (`Crash`), or after `effects_left` more effects: between any two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.member.member import Member
from delaywheel_replica.core.node.events import (
    Acknowledge,
    Broken,
    Closed,
    DiskReported,
    Effect,
    Event,
    Failed,
    ForgetLost,
    FoundAgain,
    LeaveWheel,
    Mirrored,
    Opened,
    Send,
    Serve,
    Verified,
    WriteStatus,
)
from delaywheel_replica.core.protocol.messages import Gossip, PeerMessage
from delaywheel_replica.core.protocol.status_files import CleanerStatus, ServerStatus
from delaywheel_replica.peers.encoding import decode, encode
from delaywheel_replica.server.commit.committer import Answers, Group, Request, RequestOutcome
from delaywheel_replica.server.commit.outside import GroupJob, Job, StepJob
from delaywheel_replica.server.node.naming import key_of
from delaywheel_replica.server.node.refusals import Refusal
from delaywheel_replica.server.store.store import Store, StoreLimits
from sim.checking.book import Entry, columns_of
from sim.machine.disk import Crash
from sim.machine.scheduler import US_PER_MS
from sim.nodes.books import SimBooks
from sim.nodes.calls import Calls
from sim.nodes.clients import Verdicts
from sim.nodes.waiting import GROUP_US, WatchedDriver

if TYPE_CHECKING:
    from sim.nodes.handover import SimHandover
    from sim.nodes.node import SimNode

TICK_US = 100 * US_PER_MS
OLD_CONTROL_VERSION = 2
"""Of a release that knows of reschedules, and of no half messages."""

CHECKPOINT_US = 1_000 * US_PER_MS
LOOK_US = 1_000 * US_PER_MS
# Few messages, so that slots have entries in the table, and rows behind it.
TABLE_ROWS = 16
MESSAGE_BYTES = 1 << 16
SLICE_AT_MOST = 2
RESERVE_BYTES = 4_000
BALLAST_BYTES = 4_000
RECENT_BYTES = 1 << 10
"""Mirrors get some frames from memory, and others from the disk."""


Work = Group | StepJob | deque[Effect]


class SimServer:
    """One life of a node's server process; the environment of its driver (`jobs.Outside`).

    Attributes:
        node: the node of the server.
        process: what lives and dies with it.
        pid: its process id.
        store: the data folder.
        driver: the real one.
        row: its latest status, as the cleaner reads it.
        cleaner_row: the latest status of the cleaner.
        effects_left: it dies after this many effects; None: it does not.
        handover: its cleaner's latest connection.
        calls: what answers callers.
    """

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.world = node.world
        self.process = node.scheduler.process(f"{node.name}-server")
        self.pid = self.world.next_pid()
        self.row: ServerStatus | None = None
        self.cleaner_row: CleanerStatus | None = None
        self.effects_left: int | None = None
        self.handover: SimHandover | None = None
        self._jobs: deque[Job] = deque()
        self._working = False
        self._checkpointing = False
        self._heard = 0
        self._dead = False
        self.store = self._open_store()
        self.store.undeletable = Undeletable(self.now_ms, self._undeleted)
        config = self.world.member_config(node.name)
        self.driver = WatchedDriver(
            config,
            self.store,
            self,
            message_bytes=MESSAGE_BYTES,
            slice_at_most=SLICE_AT_MOST,
            now_us=lambda: self.node.scheduler.now_us,
            held_up=lambda us: self.world.checks.held_up(node, us),
        )
        self.calls = Calls(self)
        self._books = SimBooks(self)

    def start(self) -> None:
        """Starts to listen and to tick."""
        name, network = self.node.name, self.world.network
        network.attach(
            name,
            self.process,
            lambda peer, message: self.run(self._receive, peer, message),
            lambda peer: self.run(self.driver.disconnected, peer),
        )
        self.run(self.calls.start)
        self.run(self._tick)
        self.process.call_later(CHECKPOINT_US, self.run, self._checkpoint)
        self.run(self._look_at_disk)

    @property
    def machine(self) -> Member:
        """The deciding core."""
        return self.driver.machine

    @property
    def floor(self) -> int:
        """The floor of the driver."""
        return self.driver.floor

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Runs a call and its effects, unless the process is dead; it may die of them."""
        if self._dead:
            return
        try:
            work(*arguments)
            self._work()
        except Crash:
            self.node.server_died()

    def end(self) -> None:
        """Notes that the process is dead."""
        self._dead = True
        self.process.kill()

    def trace(self, what: str, *details: object) -> None:
        """Notes an event for people."""
        self.world.trace.add(self.node.name, what, *details)

    # --- calls from outside

    def send_messages(self, entries: list[Entry], on_answer: Callable[[Verdicts], None]) -> None:
        """Handles a caller's messages."""
        verdicts = self._judge(entries)
        rows = np.array([row for row, said in enumerate(verdicts) if said is None], dtype=np.intp)
        if not len(rows):
            on_answer(verdicts)
            return

        columns = columns_of(entries).take(rows)
        has_halves = any(entry.is_half for entry in entries)

        def answered(outcome: RequestOutcome) -> None:
            for written, row in enumerate(rows.tolist()):
                verdicts[row] = verdict_of(outcome, written)
            if has_halves:
                self.calls.note_halves(columns, outcome)
            on_answer(verdicts)

        self.write(Request(columns, Kind.MESSAGES, answered))

    def write(self, request: Request) -> None:
        """Writes a request with the next group."""
        self.calls.write(request)

    def take_cleaner_status(self, status: CleanerStatus | None) -> None:
        """Called when the cleaner has a new status, or has died."""
        self.cleaner_row = status
        self.calls.take(status)
        self.driver.cleaner_reported(status)

    def drain(self) -> None:
        """Stops the node cleanly."""
        self.driver.drain()

    def _checkpoint(self) -> None:
        """Syncs written frames in the background."""
        self.process.call_later(CHECKPOINT_US, self.run, self._checkpoint)
        if self._checkpointing:
            return  # the disk was slow when it began
        if self._is_slow:
            self.spawn_thread("upkeep", self._make_checkpoint)
        else:
            self._make_checkpoint()

    def _make_checkpoint(self) -> None:
        self._checkpointing = True
        try:
            self.driver.checkpoint()
        except OSError as error:
            self.trace("checkpoint failed", error)
        self._checkpointing = False

    def _look_at_disk(self) -> None:
        self.process.call_later(LOOK_US, self.run, self._look_at_disk)
        self.driver.look_at_disk()

    def _receive(self, peer: str, message: PeerMessage) -> None:
        if not isinstance(message, Gossip):
            self.trace(f"<- {peer}", message)
        # Reading all heartbeats would take a seventh of a run.
        self._heard += 1
        if not isinstance(message, Gossip) or self._heard % 8 == 0:
            read = decode(encode(message))
            assert read == message
        self.driver.received(peer, message)

    def _tick(self) -> None:
        self.process.call_later(TICK_US, self.run, self._tick)
        self.driver.tick()
        self._books.publish(leads=self.calls.is_leading())
        self._write_row()
        self.node.row_stamped()

    def _judge(self, entries: list[Entry]) -> Verdicts:
        now_ms, settings = self.wall_ms(), self.world.settings
        verdicts: Verdicts = [None] * len(entries)
        for row, entry in enumerate(entries):
            if entry.due_ms < now_ms - settings.late_window_s * 1000:
                verdicts[row] = Reason.DUE_TOO_OLD
            elif entry.due_ms > now_ms + settings.span_s * 1000:
                verdicts[row] = Reason.DUE_BEYOND_SPAN
            elif entry.is_half and not self.calls.are_halves_taken:
                verdicts[row] = Reason.HALVES_NOT_READY
        return verdicts

    # --- the driver's environment

    def now_ms(self) -> int:
        """The monotonic clock."""
        return self.node.clock.monotonic_ms()

    def wall_ms(self) -> int:
        """The wall clock."""
        return self.node.clock.wall_ms()

    def enqueue(self, job: Job) -> None:
        """Queues a job; a group is delayed so that others join it."""
        if isinstance(job, GroupJob):
            self.process.call_later(GROUP_US, self.run, self._jobs.append, job)
        else:
            self._jobs.append(job)

    def do_jobs(self, *, may_wait: bool) -> None:
        """Does nothing: the simulation runs jobs in its own time."""

    def happened(self, event: Event) -> None:
        """Checks the events that the machine gets."""
        match event:
            case Opened():
                self.world.checks.opened(self.node, event.wheel)
            case Mirrored() | FoundAgain() | Closed():
                self.world.checks.held(self.node, event.held)
            case Verified():
                self.world.checks.verified(self.node, event.held)
            case Broken():
                # Also a group that was written in the middle of another job, and not synced.
                self.world.checks.written(self.node, event.wheel)
                self.trace("broke", event.wheel, event.cause)
            case DiskReported():
                self.trace("disk", event.state.value)
            case Failed():
                self.trace("failed", event.effect, event.cause)
            case _:
                pass

    def send(self, peer: str, message: PeerMessage) -> None:
        """Sends a message to another node."""
        self._live_on(Send(peer, message))
        if not isinstance(message, Gossip):
            self.trace(f"-> {peer}", message)
        elif self.node.name in self.world.old_releases:
            older = replace(message.heartbeat, control_version=OLD_CONTROL_VERSION)
            message = replace(message, heartbeat=older)
        self.world.network.send(self.node.name, peer, message)

    def write_status(self) -> None:
        """Writes the status, and wakes the cleaner."""
        self._live_on(WriteStatus())
        self._write_row()
        self.node.wake_cleaner()

    def acknowledged(self, effect: Acknowledge, answers: Answers) -> None:
        """Answers callers."""
        self._live_on(effect)
        self.trace("does", effect)
        self.world.checks.acknowledged(self.node, effect.wheel, effect.high_watermark)
        self.answer(answers)

    def answer(self, answers: Answers) -> None:
        """Answers callers."""
        for request, outcome in answers:
            request.on_answer(outcome)

    def enter(
        self,
        wheel: WheelId,
        columns: Columns | None,
        group: WrittenGroup,
        accepted_at_ms: int,
    ) -> None:
        """Notes written frames."""
        del columns, accepted_at_ms
        self.world.checks.written(self.node, wheel)
        self.trace("wrote", wheel, f"up to {group.bundle.last_seq}")

    def _write_row(self) -> None:
        self.row = self.driver.status()

    # --- jobs

    def _work(self) -> None:
        """Runs the queued jobs in order; on a slow disk, time passes."""
        if self._working:
            return
        self._working = True
        if self._is_slow:
            self.spawn_thread("store", self._do_all)
        else:
            self._do_all()

    @property
    def _is_slow(self) -> bool:
        return bool(self.node.disk_us or self.node.disk.delays_us)

    def spawn_thread(self, name: str, work: Callable[[], None]) -> None:
        """Runs disk work on its own thread; the process may die of it."""
        task = self.process.spawn(f"{self.node.name}-{name}", work)
        task.on_error = self._thread_failed

    def _thread_failed(self, error: BaseException) -> None:
        if not isinstance(error, Crash):
            raise error
        self.node.server_died()

    def _do_all(self) -> None:
        scheduler = self.node.scheduler
        while self._jobs:
            work = self._next_work()
            if work is None:
                continue
            self.driver.begins()
            if self.node.disk_us and scheduler.current is not None and not _reads_only(work):
                self.node.wait_for_effect()
            self._do(work)
        self._working = False

    def _do(self, work: Work) -> None:
        if isinstance(work, Group):
            self._finish_group(work)
        elif isinstance(work, StepJob):
            self.driver.do_step()
        else:
            self._do_next(work)
        self.driver.ends()

    def _next_work(self) -> Work | None:
        """Runs one step of the first job; None: nothing is left of it."""
        job = self._jobs[0]
        if isinstance(job, StepJob):
            self._jobs.popleft()
            return job
        if not isinstance(job, GroupJob):
            if job:
                return job
            self._jobs.popleft()
            return None
        self._jobs.popleft()
        group = self.driver.begin_group()
        if group is None:
            return None
        for row in np.flatnonzero(group.verdicts).tolist():
            if group.reasons[group.verdicts[row]].reason is Reason.DUE_TOO_OLD:
                key = key_of(group.columns, row)
                self.world.checks.refused_as_sealed(self.node, key, group.admitted.seal_slot)
        return group

    def _do_next(self, job: deque[Effect]) -> None:
        effect = job[0]
        self._live_on(effect)
        self.trace("does", effect)
        self.driver.do_next(job)
        if isinstance(effect, LeaveWheel):
            self.trace("left", effect.wheel)

    def _finish_group(self, group: Group) -> None:
        try:
            self.driver.finish_group(group)
        finally:
            self.world.checks.written(self.node, group.admitted.wheel)

    def _live_on(self, effect: Effect) -> None:
        """Called before each effect: whether it is the last."""
        if self.effects_left is not None:
            self.effects_left -= 1
            if self.effects_left < 0:
                self.trace("dies before", effect)
                raise Crash

    def _undeleted(self, error: OSError, pause_ms: int) -> None:
        self.trace("cannot delete", Path(error.filename).name, f"again after {pause_ms}")

    # --- the start

    def _open_store(self) -> Store:
        node, settings = self.node, self.world.settings
        return Store.open(
            node.disk,
            node.data,
            node=node.name,
            cluster_id=self.world.names.cluster_id,
            boot_id=node.boot,
            limits=StoreLimits(
                span_seconds=settings.span_s,
                dial_rows=settings.span_s + settings.late_window_s + 60,
                open_files=settings.handles,
                max_frame_messages=settings.max_frame_messages,
                max_frame_bytes=settings.max_frame_bytes,
                sync_groups=node.sync_groups,
                recent_bytes=RECENT_BYTES,
                reserve_bytes=RESERVE_BYTES,
                ballast_bytes=BALLAST_BYTES,
                table_rows=TABLE_ROWS,
            ),
            new_storage=lambda: f"{node.random.getrandbits(128):032x}",
        )


def _reads_only(work: Work) -> bool:
    return isinstance(work, deque) and isinstance(work[0], Serve | ForgetLost)


def verdict_of(outcome: RequestOutcome, row: int) -> Reason | None:
    """Why a message of a request was refused; None: it is acknowledged."""
    refusal = outcome if isinstance(outcome, Refusal) else outcome.failed.get(row)
    return None if refusal is None else refusal.reason
