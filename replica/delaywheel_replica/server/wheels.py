"""The life of the node's own wheels, from its side.

A wheel of this node goes through these states; everything that others may be told of is durable
in node.json (or meta.json) first.

===========  ================================  ==================================================
state        how it is reached                 what this module does
===========  ================================  ==================================================
registered   the cleaner's row shows it        saves it as the spare, with its number
spare        as above                          moves its seal once a second; opens it when no
                                               wheel is in use
open         node.json names it as open,       the committer writes it
             then its folder is made
left         restart, broken medium, fence,    keeps what it holds ready for the fence
             clean stop
fenced       the cleaner's row wants it        saves the promise, then tells the answer
closed       the cleaner's row shows T         notes T in meta.json
gone         not registered any more, wholly   deletes its folder, while the cleaner leads
             below the floor
===========  ================================  ==================================================

All of it happens on one thread, the keeper, in ``Keeper.work``: it waits for disks, and nothing
that answers callers or beats may wait with it.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from delaywheel.dial import Dial
from delaywheel.disk import Disk
from delaywheel.identity import WheelId
from delaywheel.index import read_segments
from delaywheel.layout import wheel_folder
from delaywheel.nodestate import NodeState, Spare
from delaywheel.recovery import recover_wheel
from delaywheel.slotfiles import HandleCache
from delaywheel.wheel import (
    OriginWheel,
    WheelMeta,
    WheelState,
    delete_halves,
    delete_wheel,
    list_wheels,
    load_meta,
    mark_wheel,
)
from delaywheel_replica.core.beat import Fence, FenceAnswer
from delaywheel_replica.core.origin import opened
from delaywheel_replica.core.seal import Seal, next_seal
from delaywheel_replica.core.status import CleanerStatus
from delaywheel_replica.server.committer import Committer
from delaywheel_replica.server.floor import Sweeper
from delaywheel_replica.server.status import HeldWheel, NodeView, wall_ms

_SPARE_SEAL_S: Final = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """What the node's wheels share on its disk."""

    disk: Disk
    handles: HandleCache
    dial: Dial
    sweeper: Sweeper


@dataclass(frozen=True, slots=True)
class WheelLimits:
    """How new wheels are made."""

    span_seconds: int
    late_window_seconds: int
    max_frame_messages: int
    max_frame_bytes: int


class Keeper:
    """Keeps the node's wheels. ``work`` is for one thread; the other methods are for any."""

    def __init__(
        self,
        files: NodeFiles,
        view: NodeView,
        committer: Committer,
        *,
        limits: WheelLimits,
        on_change: Callable[[], None],
    ) -> None:
        """Prepares; ``start`` starts the thread.

        Args:
            files: what the wheels share.
            view: what the parts know of the node.
            committer: writes the open wheel.
            limits: how new wheels are made.
            on_change: called when the beat says something new.
        """
        self._disk = files.disk
        self._files = files
        self._view = view
        self._committer = committer
        self._limits = limits
        self._on_change = on_change
        self._woken = threading.Event()
        self._leaving = threading.Event()
        self._left = threading.Event()
        self._ended = threading.Event()
        self._seal_at = 0.0
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    @property
    def _data(self) -> Path:
        return self._view.folder.data

    @property
    def _state(self) -> NodeState:
        return self._view.folder.state

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._woken.set()
        self._thread.join()

    def wake(self) -> None:
        """Something may have to be done."""
        self._woken.set()

    def leave(self) -> None:
        """A clean stop: from the next beat on, the wheel may be closed. The spare stays.

        Blocks until that is so. Draining has to be set before.
        """
        self._leaving.set()
        self._woken.set()
        self._left.wait()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._leaving.is_set() and not self._left.is_set():
                self._drop_open()
                self._left.set()
            self.work()
            self._woken.wait(_SPARE_SEAL_S)
            self._woken.clear()

    def work(self) -> None:
        """Does what is to be done now; what the disk refuses is tried again the next time.

        A full disk must not end the node: forwarding goes on, and frees it. So deleting comes
        first, and no step hangs on another one's success.
        """
        for step in (
            self._sweep,
            self._replace_lost,
            self._keep_promises,
            self._follow_registry,
            self._open_spare,
            self._move_spare_seal,
        ):
            try:
                step()
            except OSError as error:
                _log.warning("disk refuses", step=step.__name__, error=str(error))

    def _sweep(self) -> None:
        status = self._view.cleaner.fresh()
        if status is not None and status.floor is not None:
            self._files.sweeper.sweep(status.floor)
            self._delete_unregistered(status, status.floor)

    def _keep_promises(self) -> None:
        status = self._view.cleaner.fresh()
        for fence in () if status is None else status.fences:
            self._promise(fence)

    def _follow_registry(self) -> None:
        status = self._view.cleaner.fresh()
        if status is not None:
            self._adopt(status)
            self._note_closed(status)
            self._note_complete(status)

    # --- opening and leaving

    def _adopt(self, status: CleanerStatus) -> None:
        """Takes a wheel that was registered for this node as its spare."""
        state = self._state
        if self._view.draining or state.spare is not None:
            return
        above = max(state.last_number, state.fenced.get(state.node, 0))
        mine = [
            wheel
            for wheel, record in status.wheels.items()
            if wheel.node == state.node
            and wheel.number > above
            and record.closed_at is None
            and record.members.get(state.node) == state.storage
        ]
        if not mine:
            return
        wheel = min(mine)
        record = status.wheels[wheel]
        spare = Spare(wheel, record.seal_slot, dict(record.members), record.min_insync)
        self._save(spare=spare, last_number=wheel.number)
        _log.info("wheel given", wheel=str(wheel))

    def _open_spare(self) -> None:
        """Opens the spare when no wheel is in use."""
        state = self._state
        if state.open is None and state.spare is not None and not self._view.draining:
            self._open(state.spare)

    def _open(self, spare: Spare) -> None:
        # node.json first: a wheel that may have been opened is never opened a second time.
        self._view.folder.save(open=spare.wheel, spare=None)
        meta = WheelMeta(
            wheel=spare.wheel,
            members=spare.members,
            min_insync=spare.min_insync,
            span_seconds=self._limits.span_seconds,
        )
        wheel = OriginWheel.create(
            self._disk,
            self._data,
            meta,
            self._files.handles,
            dial=self._files.dial,
            max_frame_messages=self._limits.max_frame_messages,
            max_frame_bytes=self._limits.max_frame_bytes,
        )
        origin = opened(
            self._state.node,
            members=spare.members,
            min_insync=spare.min_insync,
            in_sync=(),
            seal_slot=spare.seal_slot,
        )
        self._committer.use(wheel, origin)
        self._on_change()
        _log.info("wheel opened", wheel=str(spare.wheel))

    def _replace_lost(self) -> None:
        """Leaves an open wheel that cannot be written (any more).

        Its medium failed; or it is of the life before; or it was named in node.json, and then
        could not be made.
        """
        wheel, named = self._committer.wheel, self._state.open
        if wheel is not None and wheel.broken is not None:
            _log.error("wheel left", wheel=str(wheel.wheel), cause=wheel.broken)
            self._drop_open()
        elif wheel is None and named is not None:
            self._drop_open()

    def _drop_open(self) -> None:
        """The open wheel takes no more; what it holds is told from the files."""
        line = self._committer.line
        if line is not None:
            self._committer.finish()
            self._hold(line.wheel, held_wheel(self._disk, self._data, line.wheel))
            self._committer.drop()
        self._save(open=None)

    # --- promises

    def _promise(self, fence: Fence) -> None:
        """Takes no more of a node's wheels up to a number; durable before it is answered.

        The answer is made anew for as long as it is asked for: what it says may change.
        """
        state, origin = self._state, fence.origin
        if fence.upto > state.fenced.get(origin, 0):
            state = self._view.folder.save(fenced={**state.fenced, origin: fence.upto})
        promised = state.fenced[origin]
        if origin == state.node:
            self._fence_own(promised)
        self._answer(Fence(origin, promised))

    def _answer(self, fence: Fence) -> None:
        """Tells of everything that was ever promised of that node."""
        state = self._state
        applied = {
            wheel: held.applied
            for wheel, held in self._view.held.items()
            if wheel.node == fence.origin and wheel.number <= fence.upto
        }
        self._mark(applied, WheelState.FENCED)
        answer = FenceAnswer(
            node=state.node,
            storage=state.storage,
            fence=fence,
            applied=applied,
            incomplete=frozenset(state.incomplete),
            all_incomplete=state.all_incomplete,
        )
        if self._view.answers.get(fence.origin) != answer:
            self._view.answers = {**self._view.answers, fence.origin: answer}
            self._on_change()

    def _fence_own(self, upto: int) -> None:
        state = self._state
        if state.spare is not None and state.spare.wheel.number <= upto:
            self._save(spare=None)
        if state.open is not None and state.open.number <= upto:
            self._drop_open()

    def _mark(self, wheels: Mapping[WheelId, int], to: WheelState) -> None:
        for wheel in wheels:
            if load_meta(self._disk, self._data, wheel).state is WheelState.OPEN:
                mark_wheel(self._disk, self._data, wheel, to)

    # --- what the registry says

    def _note_closed(self, status: CleanerStatus) -> None:
        for wheel, held in self._view.held.items():
            record = status.wheels.get(wheel)
            if record is None or record.closed_at is None or held.final_seq is not None:
                continue
            mark_wheel(self._disk, self._data, wheel, WheelState.CLOSED, final_seq=record.closed_at)
            if held.applied < record.closed_at:
                # The machine crashed between the commit and this note of it.
                recover_wheel(self._disk, self._data, wheel, os_crashed=True)
            self._hold(wheel, held_wheel(self._disk, self._data, wheel))
            _log.info("wheel closed", wheel=str(wheel), final_seq=record.closed_at)

    def _note_complete(self, status: CleanerStatus) -> None:
        """Takes wheels out of the incomplete set; docs/PROTOCOL.md says when."""
        state = self._state
        if self._view.complete or status.control_offset < 0:
            return
        doubted = set(status.wheels) if state.all_incomplete else set(state.incomplete)
        left = tuple(sorted(wheel for wheel in doubted if self._is_incomplete(wheel, status)))
        if state.all_incomplete or left != state.incomplete:
            self._save(all_incomplete=False, incomplete=left)

    def _is_incomplete(self, wheel: WheelId, status: CleanerStatus) -> bool:
        record = status.wheels.get(wheel)
        if record is None:
            return False
        state = self._state
        # What this node itself writes, or will, since the boot: nobody holds more of it.
        if wheel == state.open or (state.spare is not None and wheel == state.spare.wheel):
            return False
        held = self._view.held.get(wheel)
        applied = held.applied if held is not None else 0
        return record.closed_at is None or applied < record.closed_at

    def _delete_unregistered(self, status: CleanerStatus, floor: int) -> None:
        if self._view.cleaner.leading() is None:
            return  # its registry may be an old one
        state = self._state
        for wheel, held in self._view.held.items():
            registered = wheel in status.wheels or wheel.number > state.last_number
            if wheel.node != state.node or registered or held.top_slot >= floor:
                continue
            delete_wheel(self._disk, self._data, wheel)
            self._hold(wheel, None)
            _log.info("wheel deleted", wheel=str(wheel))

    def _move_spare_seal(self) -> None:
        """A spare holds back the floor as any wheel: its seal moves, and is durable when told."""
        spare = self._state.spare
        if spare is None or time.monotonic() < self._seal_at:
            return
        self._seal_at = time.monotonic() + _SPARE_SEAL_S
        seal = next_seal(
            Seal(spare.seal_slot, 0),
            own_clock_ms=wall_ms(),
            leader_clock_ms=self._view.cleaner.leader_clock_ms,
            last_seq=0,
            late_window_s=self._limits.late_window_seconds,
        )
        if seal.slot > spare.seal_slot:
            self._view.folder.save(spare=replace(spare, seal_slot=seal.slot))

    def _save(self, **changes: Any) -> None:
        self._view.folder.save(**changes)
        self._on_change()

    def _hold(self, wheel: WheelId, held: HeldWheel | None) -> None:
        """Replaces the map as a whole: others read it without a lock."""
        others = {known: value for known, value in self._view.held.items() if known != wheel}
        self._view.held = others if held is None else {**others, wheel: held}
        self._on_change()


def recover_all(
    disk: Disk, data: Path, *, os_crashed: bool, floor: int
) -> dict[WheelId, HeldWheel]:
    """Recovers every wheel of the folder that may have been written since it was last looked at.

    Args:
        disk: where the data folder lies.
        data: the data folder.
        os_crashed: the machine started anew since the node last ran.
        floor: slots below are finished.
    """
    held = {}
    delete_halves(disk, data)
    for wheel in list_wheels(disk, data):
        if os_crashed or load_meta(disk, data, wheel).state is WheelState.OPEN:
            recovered = recover_wheel(disk, data, wheel, os_crashed=os_crashed, floor=floor)
            if recovered.cut or recovered.damaged:
                _log.warning(
                    "wheel recovered",
                    wheel=str(wheel),
                    last_seq=recovered.last_seq,
                    cut=[f"{cut.path.name}: {cut.length_bytes} bytes" for cut in recovered.cut],
                    damaged=recovered.damaged,
                )
        held[wheel] = held_wheel(disk, data, wheel)
    return held


def held_wheel(disk: Disk, data: Path, wheel: WheelId) -> HeldWheel:
    """What the index of a wheel that nobody writes says."""
    applied, top_slot = 0, -1
    for first_seq, rows in read_segments(disk, wheel_folder(data, wheel)):
        applied = first_seq + len(rows) - 1
        with_frames = rows[rows["length"] > 0]
        if len(with_frames):
            top_slot = max(top_slot, int(with_frames["slot"].max()))
    return HeldWheel(applied, top_slot, load_meta(disk, data, wheel).final_seq)
