"""A simulated server process: the member machine, the store, and what carries effects out.

One after another: a list of effects of one step, or one group of requests to be written. What a
machine's effect leads to (`Saved`, `Mirrored`, ...) is told to it when the effect is done, which
takes `disk_us`; messages that come meanwhile are stepped at once, and their effects queue up.

It ends when the disk says so (`Crash`), or after `effects_left` more effects: between any two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from delaywheel.columns import Columns
from delaywheel.format import Kind
from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.slotfiles import SlotFull
from delaywheel.wheel import SlotFinished, WheelBroken
from delaywheel_replica.core.member import Admission, Member, MemberRefusal
from delaywheel_replica.core.member_events import (
    Acknowledge,
    Broken,
    CleanerTold,
    Closed,
    CloseWheel,
    Deleted,
    DeleteWheel,
    Disconnected,
    Drain,
    Effect,
    Event,
    Failed,
    ForgetLost,
    Held,
    LeaveWheel,
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
    Tell,
    Tick,
    Unreadable,
    Written,
)
from delaywheel_replica.core.peers import Frames, Gossip, Lacks
from delaywheel_replica.core.status import CleanerStatus, ServerStatus
from delaywheel_replica.server.store import Store, StoreLimits
from sim.book import Entry, columns_of
from sim.cancels import Cancels
from sim.clients import Verdicts
from sim.disk import Crash
from sim.scheduler import US_PER_MS

if TYPE_CHECKING:
    from sim.node import SimNode

TICK_US = 100 * US_PER_MS
GROUP_US = 400
"""After a first request, others are waited for so long: they arrive while a group is written."""

CHECKPOINT_US = 1_000 * US_PER_MS
LEDGER_US = 300 * US_PER_MS
MESSAGE_BYTES = 1 << 16

_ON_DISK = (Save, OpenWheel, Mirror, Repair, CloseWheel, DeleteWheel, Sweep)


@dataclass(slots=True)
class Call:
    """Some messages, or one cancel, that a caller waits for.

    Attributes:
        columns: what is to be written.
        kind: messages or cancels.
        entries: the messages, as the book knows them.
        on_answer: to be called once.
        verdicts: why each is refused; None: it is not.
        seq: with it, all of them are held.
    """

    columns: Columns
    kind: Kind
    entries: list[Entry]
    on_answer: Callable[[Verdicts], None]
    verdicts: Verdicts
    seq: int = 0

    def refuse(self, reason: Reason) -> None:
        """Answers that none was accepted, or that this is not known."""
        self.on_answer([verdict or reason for verdict in self.verdicts])


class _Group:
    """In the queue of jobs: the requests that have come so far are to be written."""


class SimServer:
    """One life of a node's server process.

    Attributes:
        node: whose.
        process: what lives and dies with it.
        store: the data folder.
        machine: decides.
        row: what it told last, as the cleaner reads it.
        cleaner_row: what the cleaner told last.
        floor: the last that was swept.
        effects_left: after so many it dies; None: it does not.
    """

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.world = node.world
        self.process = node.scheduler.process(f"{node.name}-server")
        self.pid = self.world.next_pid()
        self.row: ServerStatus | None = None
        self.cleaner_row: CleanerStatus | None = None
        self.floor = 0
        self.effects_left: int | None = None
        self._jobs: deque[deque[Effect] | _Group] = deque()
        self._working = False
        self._calls: list[Call] = []
        self._waiting: list[Call] = []
        self._published: dict[WheelId, int] = {}
        self._dead = False
        self.store = self._open_store()
        self.machine = Member(self.world.member_config(node.name), self._started())
        self._cancels = Cancels(self)

    def start(self) -> None:
        """Begins to listen and to tick."""
        name, network = self.node.name, self.world.network
        network.attach(
            name,
            self.process,
            lambda peer, message: self.run(self._receive, peer, message),
            lambda peer: self.run(self._step, Disconnected(peer, self.now_ms)),
        )
        self.run(self._tick)
        self.process.call_later(CHECKPOINT_US, self.run, self._checkpoint)

    @property
    def now_ms(self) -> int:
        """The monotonic clock."""
        return self.node.clock.monotonic_ms()

    @property
    def wall_ms(self) -> int:
        """The wall clock."""
        return self.node.clock.wall_ms()

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Does something, unless the process is dead; it may die of it."""
        if self._dead:
            return
        try:
            work(*arguments)
        except Crash:
            self.node.server_died()

    def end(self) -> None:
        """The process is dead."""
        self._dead = True
        self.process.kill()

    # --- what comes from outside

    def send(self, entries: list[Entry], on_answer: Callable[[Verdicts], None]) -> None:
        """A caller's messages."""
        call = Call(columns_of(entries), Kind.MESSAGES, entries, on_answer, [None] * len(entries))
        now_ms = self.wall_ms
        settings = self.world.settings
        for row, entry in enumerate(entries):
            if entry.due_ms < now_ms - settings.late_window_s * 1000:
                call.verdicts[row] = Reason.DUE_TOO_OLD
            elif entry.due_ms > now_ms + settings.span_s * 1000:
                call.verdicts[row] = Reason.DUE_BEYOND_SPAN
        self.write(call)

    def cancel(self, key: tuple[bytes, int], on_answer: Callable[[Any], None]) -> None:
        """A caller withdraws a message."""
        self._cancels.ask(key, on_answer)

    def write(self, call: Call) -> None:
        """Has a request written with the next group."""
        self._calls.append(call)
        if len(self._calls) == 1:
            self.process.call_later(GROUP_US, self.run, self._queue_group)

    def told(self, status: CleanerStatus | None) -> None:
        """The cleaner has written its row, or has died."""
        self.cleaner_row = status
        self._step(CleanerTold(status, self.now_ms, self.wall_ms))
        self._cancels.look()

    def drain(self) -> None:
        """The node is to stop cleanly."""
        self._step(Drain())

    def _checkpoint(self) -> None:
        """Puts what was written on the medium, in the background."""
        self.process.call_later(CHECKPOINT_US, self.run, self._checkpoint)
        try:
            self.store.checkpoint()
        except WheelBroken as error:
            self._broke(str(error))
        except OSError as error:
            self.trace("checkpoint failed", error)

    def trace(self, what: str, *details: object) -> None:
        """Notes something for people."""
        self.world.trace.add(self.node.name, what, *details)

    def _receive(self, peer: str, message: Any) -> None:
        if not isinstance(message, Gossip):
            self.trace(f"<- {peer}", message)
        self._step(Received(peer, message, self.now_ms, self.wall_ms))

    def _tick(self) -> None:
        self.process.call_later(TICK_US, self.run, self._tick)
        self._step(Tick(self.now_ms, self.wall_ms))
        self._tell_published()
        self._write_row()
        self._cancels.look()

    # --- events and effects

    def _step(self, event: Event) -> None:
        effects = self.machine.step(event)
        if effects:
            self._jobs.append(deque(effects))
            self._work()

    def _queue_group(self) -> None:
        self._jobs.append(_Group())
        self._work()

    def _work(self) -> None:
        """Carries out what is queued, one after another."""
        if self._working:
            return
        self._working = True
        while self._jobs:
            job = self._jobs[0]
            if isinstance(job, _Group):
                self._jobs.popleft()
                self._write_group()
            elif not job:
                self._jobs.popleft()
            elif isinstance(job[0], _ON_DISK) and self.node.disk_us:
                self.process.call_later(self.node.disk_us, self.run, self._go_on, job)
                return
            else:
                self._do_next(job)
        self._working = False

    def _go_on(self, job: deque[Effect]) -> None:
        """The disk was slow; now it is done."""
        self._do_next(job)
        self._working = False
        self._work()

    def _do_next(self, job: deque[Effect]) -> None:
        effect = job.popleft()
        if self.effects_left is not None:
            self.effects_left -= 1
            if self.effects_left < 0:
                self.trace("dies before", effect)
                raise Crash
        try:
            self._carry_out(effect)
        except (OSError, WheelBroken) as error:
            self.trace("failed", effect, error)
            job.clear()
            self._step(Failed(effect, str(error)))

    def _carry_out(self, effect: Effect) -> None:  # noqa: C901, PLR0912 - one for each effect
        if not isinstance(effect, Send | Tell):
            self.trace("does", effect)
        store = self.store
        match effect:
            case Send():
                if not isinstance(effect.message, Gossip):
                    self.trace(f"-> {effect.peer}", effect.message)
                self.world.network.send(self.node.name, effect.peer, effect.message)
            case Tell():
                self._write_row()
            case Save():
                store.save(effect.state)
                self._step(Saved(effect.state))
            case OpenWheel():
                store.open_wheel(effect.spare)
                self.world.checks.opened(self.node, effect.spare.wheel)
                self._step(Opened(effect.spare.wheel))
            case LeaveWheel():
                self._leave(effect.wheel)
            case Acknowledge():
                self._acknowledge(effect.wheel, effect.high_watermark)
            case Mirror():
                self._mirrored(store.mirror(effect.card, effect.frames))
            case Repair():
                self._mirrored(store.repair(effect.card, effect.frames))
            case Serve():
                self._serve(effect)
            case CloseWheel():
                held = store.close_wheel(effect.wheel, effect.final_seq)
                self._step(Closed(held))
            case ForgetLost():
                store.forget_lost(effect.frames)
            case Sweep():
                self.floor = max(self.floor, effect.floor)
                store.sweep(effect.floor)
            case DeleteWheel():
                store.delete_wheel(effect.wheel)
                self._step(Deleted(effect.wheel))

    def _mirrored(self, held: Held) -> None:
        self.world.checks.held(self.node, held)
        self._step(Mirrored(held, self.now_ms))

    def _leave(self, wheel: WheelId) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.refuse(Reason.WHEEL_LOST)
        held = self.store.leave_wheel()
        self.trace("left", wheel, held)
        self._mirrored(held)

    def _serve(self, effect: Serve) -> None:
        frames, lacking = self.store.read(
            effect.wheel,
            effect.first_seq,
            effect.last_seq,
            max_bytes=MESSAGE_BYTES,
            max_frames=self.world.settings.batch_frames,
            floor=self.floor,
        )
        name, network = self.node.name, self.world.network
        if frames:
            card = self.store.card(effect.wheel)
            message = Frames(card, tuple(frames), effect.request)
            self.trace(f"-> {effect.peer}", message)
            network.send(name, effect.peer, message)
        elif effect.request:
            storage = self.store.state.storage
            lacks = Lacks(effect.request, effect.wheel, storage, tuple(lacking))
            self.trace(f"-> {effect.peer}", lacks)
            network.send(name, effect.peer, lacks)
        for seq in lacking:
            self._step(Unreadable(effect.wheel, seq))

    def _write_row(self) -> None:
        self.row = self.machine.status(self.now_ms, self.wall_ms, self.pid)
        self.node.wake_cleaner()

    # --- callers

    def _write_group(self) -> None:
        calls, self._calls = self._calls, []
        for kind in Kind:
            group = [call for call in calls if call.kind is kind]
            if group:
                self._write(kind, group)

    def _write(self, kind: Kind, calls: list[Call]) -> None:
        admission = self.machine.admits(self.now_ms)
        if isinstance(admission, MemberRefusal):
            for call in calls:
                call.refuse(Reason[admission.value])
            return
        for call in calls:
            self._refuse_sealed(call, admission)
        columns = Columns.concat([call.columns.take(_accepted(call)) for call in calls])
        if not len(columns):
            for call in calls:
                call.refuse(Reason.DUE_TOO_OLD)
            return
        broken: WheelBroken | None = None
        try:
            self.store.append(columns, kind, self.wall_ms)
        except SlotFull:
            broken = WheelBroken(admission.wheel, "a slot is full")
        except SlotFinished as error:
            raise AssertionError(f"{self.node.name} let through what is finished") from error
        except WheelBroken as error:
            broken = error
        finally:
            self.world.checks.written(self.node, admission.wheel)
        self._written(calls, admission.wheel, broken)

    def _written(self, calls: list[Call], wheel: WheelId, broken: WheelBroken | None) -> None:
        """Some or all frames of a group are there: whoever has all of his in them waits."""
        done = self.store.last_seq
        for call in calls:
            call.seq = done
        if broken is None:
            self._waiting += calls
        else:
            for call in calls:
                call.refuse(Reason.WHEEL_LOST)
        self.trace("wrote", wheel, f"up to {done}")
        self._step(Written(wheel, done, self.store.top_slot, self.now_ms))
        if broken is not None:
            self._broke(str(broken))

    def _broke(self, cause: str) -> None:
        wheel = self.store.wheel
        if wheel is not None:
            self.trace("broke", wheel.wheel, cause)
            self._step(Broken(wheel.wheel, cause))

    def _refuse_sealed(self, call: Call, admission: Admission) -> None:
        for row, slot in enumerate(call.columns.slots.tolist()):
            if slot < admission.seal_slot and call.verdicts[row] is None:
                call.verdicts[row] = Reason.DUE_TOO_OLD
                self.world.checks.refused_as_sealed(self.node, slot, admission.seal_slot)

    def _acknowledge(self, wheel: WheelId, high_watermark: int) -> None:
        self.world.checks.acknowledged(self.node, wheel, high_watermark)
        done = [call for call in self._waiting if call.seq <= high_watermark]
        self._waiting = [call for call in self._waiting if call.seq > high_watermark]
        for call in done:
            call.on_answer(call.verdicts)
        self.process.call_later(LEDGER_US, self.run, self._publish, wheel, high_watermark)

    # --- the books, as far as the floor waits for them

    def _publish(self, wheel: WheelId, seq: int) -> None:
        ledger = self.world.ledger
        if not self.world.ledger_away:
            ledger[wheel] = max(seq, ledger.get(wheel, 0))

    def _tell_published(self) -> None:
        """Publishes the open wheel, and closed ones if this node leads; tells what is published."""
        row = self.row
        if row is None:
            return
        cleaner = self._cancels.leading()
        for wheel, beat in sorted(row.beat.wheels.items()):
            if wheel == row.beat.open:
                self._publish(wheel, beat.high_watermark)
            elif cleaner is not None and wheel in cleaner.wheels:
                closed_at = cleaner.wheels[wheel].closed_at
                if closed_at is not None:
                    self._publish(wheel, min(beat.prefix, closed_at))
            published = self.world.ledger.get(wheel, 0)
            if published > self._published.get(wheel, 0):
                self._published[wheel] = published
                self._step(Published(wheel, published))

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
                sync_groups=settings.sync_groups,
            ),
            new_storage=lambda: f"{node.random.getrandbits(128):032x}",
        )

    def _started(self) -> Started:
        return Started(self.store.state, self.store.held_wheels(), self.now_ms)


def _accepted(call: Call) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.array(
        [row for row, verdict in enumerate(call.verdicts) if verdict is None], dtype=np.intp
    )
