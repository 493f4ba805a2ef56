"""All wheels of one data folder and their only writer, which carries out the machine's effects.

Each method carries out one effect of the member machine (core/node/events.py) and returns when it
is done; its result, or exception, is reported to the machine. Methods that write are for one
thread, one after the other; ``checkpoint`` is for any other thread.

====================  ===========================================================================
a wheel is here as    after
====================  ===========================================================================
the open one          ``open_wheel``: this node writes it
a copy                the first frame of another node's wheel; ``leave_wheel``
unverified            the start, if an earlier process left it: it may have to be recovered;
                      ``leave_wheel``, if the medium reports an error
a copy                ``verifying``
nothing               ``delete_wheel``
====================  ===========================================================================

A start does not wait for the wheels that it finds: after a crash of the machine that takes time in
proportion to the number of files. Nothing is known of an unverified wheel, and until `verifying` is
done with it, the machine requests nothing else that concerns it (core/wheels/verifying.py).

A copy is missing those frames up to its last row that cannot be read, and are neither finished
(their slot is below the floor) nor committed as lost. `HeldWheel` reports them; the wheel's
checkpoint remembers them, so that a restart does not turn a missing frame into a held one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.index import ROWS_PER_SEGMENT
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.files.wheel_folder import WheelExists, WheelMeta, WheelMissing, WheelState
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.folder.node_file import NodeFolder, new_storage, open_node_folder
from delaywheel.storage.folder.node_state import NodeState, Spare
from delaywheel.storage.folder.steps import Steps, finish
from delaywheel.storage.frames.bundle import NO_GROUP, FrameBundle, WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.writing.dial import Dial
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel.storage.writing.wheel import (
    DEFAULT_MAX_FRAME_BYTES,
    DEFAULT_MAX_FRAME_MESSAGES,
    NotEncodable,
    OriginWheel,
    WheelBroken,
)
from delaywheel_replica.core.node.events import DiskState, HeldWheel
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.core.protocol.messages import WheelCard
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.node.disk_state import BALLAST_BYTES, FreeSpace
from delaywheel_replica.server.store.copies import Copies, MissingOfCopies
from delaywheel_replica.server.store.frames_to_send import FramesToSend

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits for making and writing wheels; those of frames concern the own wheel.

    Attributes:
        dial_rows: At least the number of slots that can hold messages at one time.
        sync_groups: Nothing counts before it is on the medium.
        recent_bytes: How many of the newest bytes are kept in memory for mirrors.
        reserve_bytes: With less free space, no messages are accepted.
        ballast_bytes: How much is reserved for saves when no space is left.
        table_rows: How many index rows, roughly, slot tables may lag behind.
    """

    span_seconds: int = 7_200
    dial_rows: int = 8_192
    open_files: int = 1_024
    max_frame_messages: int = DEFAULT_MAX_FRAME_MESSAGES
    max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES
    sync_groups: bool = False
    recent_bytes: int = 8 << 20
    reserve_bytes: int = 0
    ballast_bytes: int = BALLAST_BYTES
    table_rows: int = ROWS_PER_SEGMENT


class Store:
    """One data folder; see the module.

    Attributes:
        undeletable: Files that could not be deleted.
        unverified: Wheels that were left, and are not known to be whole.
    """

    def __init__(self, disk: Disk, folder: NodeFolder, limits: StoreLimits) -> None:
        self._disk = disk
        self._data = folder.data
        self._folder = folder
        self._limits = limits
        self.room = FreeSpace(
            disk,
            folder.data,
            reserve_bytes=limits.reserve_bytes,
            ballast_bytes=limits.ballast_bytes,
        )
        self.handles = HandleCache(disk, limits.open_files)
        self._dial = Dial(disk, folder.data, limits.dial_rows)
        self._copies = Copies(
            disk,
            folder.data,
            self.handles,
            self._dial,
            sync_groups=limits.sync_groups,
            boot=folder.state.boot_id,
            table_rows=limits.table_rows,
        )
        self.unverified = frozenset[WheelId]()
        self._unsynced = folder.state.unsynced
        self._counted = frozenset[WheelId]()  # those of them that the dial already counts
        self._open: OriginWheel | None = None
        self._top_slot = -1
        self._missing = MissingOfCopies()
        self.undeletable = Undeletable(on_refused=_undeleted)
        self.outgoing = FramesToSend(self._copies, self._missing, limits.recent_bytes)

    @classmethod
    def open(
        cls,
        disk: Disk,
        data: Path,
        *,
        node: str,
        cluster_id: str,
        boot_id: str,
        floor: int = 0,
        limits: StoreLimits | None = None,
        new_storage: Callable[[], str] = new_storage,
    ) -> Self:
        """Locks the folder, finds its wheels, and counts the start.

        If the machine was restarted since the node last ran, acknowledged frames may be lost,
        unless all of them had been synced: that is noted together with the new boot id, in one
        save, so that a second crash cannot hide the first. What counts is how they were
        acknowledged, not whether groups are synced from now on.

        Raises:
            NodeFolderError: The folder cannot be used.
            MetaTooNew: A newer release has written one of its wheels.
        """
        folder = open_node_folder(
            disk,
            data,
            node=node,
            cluster_id=cluster_id,
            boot_id=boot_id,
            make_storage=new_storage,
        )
        try:
            store = cls(disk, folder, limits or StoreLimits())
            store._start(boot_id, floor)
        except BaseException:
            folder.release()
            raise
        return store

    def _start(self, boot_id: str, floor: int) -> None:
        state = self._folder.state
        os_crashed = state.boot_id != boot_id
        self.room.before_start()
        self._copies.floor, self._copies.boot = floor, boot_id
        self.unverified = self._copies.look()
        doubtful = os_crashed and state.unsynced
        # Under this boot id an earlier process may have left what it did not sync; `verifying`
        # syncs it if groups are synced.
        left_unsynced = state.unsynced and not os_crashed and bool(self.unverified)
        self._unsynced = not self._limits.sync_groups or left_unsynced
        self.save(
            replace(
                state,
                boot_id=boot_id,
                starts=state.starts + 1,
                saves=state.saves + 1,
                all_incomplete=state.all_incomplete or doubtful,
            )
        )

    def release(self) -> None:
        """Releases the folder."""
        if self._open is not None:
            self._open.close()
        self._copies.close()
        self._folder.release()

    @property
    def state(self) -> NodeState:
        """The content of node.json."""
        return self._folder.state

    def save(self, state: NodeState) -> None:
        """Makes this the durable content of node.json, except `unsynced`, which the store knows."""
        self._folder.put(replace(state, unsynced=self._unsynced))

    def verifying(
        self, wheel: WheelId, record: WheelRecord | None = None, *, now_ms: int = 0
    ) -> Steps[HeldWheel]:
        """Recovers a left wheel, in steps; returns what it holds.

        `record` serves if its own identity cannot be read; without that: MetaDamaged. After an
        OSError of the medium, try again. `now_ms` is the monotonic clock's.
        """
        meta = None if record is None else self._registered(wheel, record)
        counts = wheel not in self._counted
        yield from self._copies.verifying(wheel, meta, counts=counts, now_ms=now_ms)
        self.unverified -= {wheel}
        self._counted -= {wheel}
        if self._unsynced and self._limits.sync_groups and not self.unverified:
            self._unsynced = False
            self.save(self.state)
        return self.held(wheel)

    def reading_again(self, wheel: WheelId, seqs: SeqSet) -> Steps[SeqSet]:
        """Looks again at missing frames of a copy, in steps; returns those that are not missing.

        If groups are synced, these are on the medium; an OSError of that: ask again.
        """
        copy = self._copy(wheel)
        there = yield from copy.reading_again(seqs)
        self._synced(copy)
        return there

    # --- the wheel that this node writes

    @property
    def wheel(self) -> OriginWheel | None:
        """The open wheel, until it is left."""
        return self._open

    @property
    def last_seq(self) -> int:
        """The last counting frame of the open wheel; 0 if none."""
        return 0 if self._open is None else self._open.last_seq

    @property
    def top_slot(self) -> int:
        """The greatest slot of the open wheel's frames; -1 if it has none."""
        return self._top_slot

    def open_wheel(self, spare: Spare) -> None:
        """Creates a wheel's folder and makes it the open wheel.

        WheelExists: it was opened before; it must be left, and never written again.
        """
        if self._open is not None:
            raise ValueError(f"{self._open.wheel} is open")
        meta = WheelMeta(
            wheel=spare.wheel,
            members=spare.members,
            min_insync=spare.min_insync,
            span_seconds=self._limits.span_seconds,
            boot=self._folder.state.boot_id,
        )
        self._open = OriginWheel.create(
            self._disk,
            self._data,
            meta,
            self.handles,
            dial=self._dial,
            max_frame_messages=self._limits.max_frame_messages,
            max_frame_bytes=self._limits.max_frame_bytes,
            table_rows=self._limits.table_rows,
        )
        self.outgoing.own = WheelReader(self._disk, self._data, spare.wheel)
        self._open.raise_floor(self._copies.floor)
        self._top_slot = -1

    def append(self, columns: Columns, kind: Kind, accepted_at_ms: int) -> WrittenGroup:
        """Writes one group into the open wheel.

        After SlotFull, SlotFinished or NotEncodable nothing was written. WheelBroken: the medium
        reported an error; some frames may count, see `last_seq`. If groups are synced, none of this
        one is known to: what it wrote is not on the medium.
        """
        if self._open is None:
            raise ValueError("no wheel is open")
        group = NO_GROUP
        try:
            group = self._open.append(columns, kind=kind, accepted_at_ms=accepted_at_ms)
            if self._limits.sync_groups:
                self._open.sync()
        except WheelBroken as broken:
            group = group if len(group.bundle) else broken.done
            if self._limits.sync_groups:
                broken.done = NO_GROUP
            raise
        finally:
            if len(group.bundle):
                self._top_slot = max(self._top_slot, int(group.bundle.rows["slot"][-1]))
        if len(self._open.meta.members) > 1:
            self.outgoing.recent.add(group.bundle)
        return group

    def can_encode(self, columns: Columns, kind: Kind) -> bool:
        """Whether frames of the open wheel can hold these messages."""
        if self._open is None:
            raise ValueError("no wheel is open")
        try:
            self._open.check_encodable(columns, kind)
        except NotEncodable:
            return False
        return True

    def leave_wheel(self) -> HeldWheel | None:
        """Stops writing the open wheel; returns what it holds.

        None: the medium cannot be read, and the wheel is unverified. Wheels are mostly left because
        their medium reports errors, and that must not keep the node from its spare.
        """
        if self._open is None:
            raise WheelMissing(f"{self._data} has no open wheel")
        left, is_doubtful = self._open.meta, self._open.close()
        wheel = left.wheel
        self._open = None
        self.outgoing.left()
        try:
            self._copies.recover(left, is_doubtful=is_doubtful)
        except OSError as error:
            _log.warning("wheel left unverified", wheel=str(wheel), error=str(error))
            self.unverified |= {wheel}
            self._counted |= {wheel}
            return None
        return self.held(wheel)

    # --- copies

    def mirror(
        self,
        card: WheelCard,
        frames: FrameBundle,
        *,
        is_over: Callable[[], bool] | None = None,
        between: Callable[[], object] = lambda: None,
    ) -> HeldWheel:
        """Appends frames to a copy, byte for byte.

        The first frame that does not follow, or is damaged, ends the list. Frames already held are
        skipped. After an OSError, frames written completely may count; try again.

        Args:
            is_over: Called after each frame that was written; if true, no more are written.
            between: Called between files, and while a new copy is made: others may want the disk.
        """
        copy = self._copy_for(card, between)
        refused = copy.append(frames, is_over=is_over, between=between)
        if refused is not None:
            _log.warning("frame refused", wheel=str(card.wheel), cause=str(refused))
        return self._synced(copy)

    def repair(
        self,
        card: WheelCard,
        frames: FrameBundle,
        *,
        between: Callable[[], object] = lambda: None,
    ) -> HeldWheel:
        """Writes missing frames of a copy to their places, which are up to its last one.

        Calls `between` after each: others may want the disk. After an OSError as `mirror`.
        """
        copy = self._copy_for(card, between)
        for refused in copy.repair(frames, between=between):
            _log.warning("frame refused", wheel=str(card.wheel), cause=str(refused))
        return self._synced(copy)

    def close_wheel(
        self, wheel: WheelId, final_seq: int, *, between: Callable[[], object] = lambda: None
    ) -> HeldWheel:
        """Durably notes the seq at which a wheel ends, as committed, and cuts everything beyond.

        Calls `between` after each file: others may want the disk.
        """
        copy = self._copy(wheel)
        copy.end_at(final_seq, between=between)
        return self._synced(copy)

    def delete_wheel(self, wheel: WheelId) -> Iterator[object]:
        """Deletes everything of a wheel, file by file."""
        yield from self._copies.delete(wheel, self.undeletable)
        self._missing.forget(wheel)

    def forget_lost(self, frames: FrameSet) -> None:
        """Notes frames that are committed as lost, and so no longer missing."""
        self._missing.lose(frames)

    def sweep(self, floor: int) -> Iterator[int | None]:
        """Finishes every slot below the floor at once, then deletes their files one by one.

        Yields the slot of each slot file, and None for each index segment. A file that cannot be
        deleted is tried again by a later sweep, after a pause. Each wheel is tried separately: the
        OSError of the first whose files cannot be listed is raised after all.
        """
        floor = self._copies.floor = max(self._copies.floor, floor)
        wheels: list[MirrorWheel | OriginWheel] = [*self._copies.known.values()]
        if self._open is not None:
            wheels.append(self._open)
        for wheel in wheels:
            wheel.raise_floor(floor)
        self._dial.clear_below(floor)
        return self._delete_finished(wheels)

    def card(self, wheel: WheelId) -> WheelCard:
        """Returns a wheel's identity; WheelMissing: nothing of it is here."""
        if self._open is not None and self._open.wheel == wheel:
            return _card(self._open.meta)
        return _card(self._copy(wheel).meta)

    def held(self, wheel: WheelId) -> HeldWheel:
        """Returns what is held of a wheel that is not open; WheelMissing: nothing is here."""
        return self._held(self._copy(wheel))

    def held_wheels(self) -> dict[WheelId, HeldWheel]:
        """Returns what is held of every wheel except the open one."""
        return {wheel: self.held(wheel) for wheel in sorted(self._copies.known)}

    def checkpoint(self, on_damaged: Callable[[WheelId, SeqSet], object]) -> None:
        """Records how much is on the medium. For any one thread.

        Unless groups are synced, it first syncs what was written. Calls `on_damaged` with frames of
        copies that turn out to be damaged. WheelBroken: the medium reported an error for the open
        wheel; OSError: for a copy, or only for a record about a wheel: the next call tries again.
        """
        syncs = not self._limits.sync_groups
        refreshes = self.room.state is DiskState.ROOM
        failure: OSError | None = None
        for wheel, copy in list(self._copies.known.items()):
            try:
                damaged = copy.checkpoint(syncs=syncs, refreshes=refreshes)
            except OSError as error:
                failure = error
                continue
            if damaged:
                on_damaged(wheel, damaged)
        origin = self._open
        if origin is not None and origin.broken is None:
            try:
                origin.checkpoint(syncs=syncs, refreshes=refreshes)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    # --- inside

    def _delete_finished(self, wheels: Iterable[MirrorWheel | OriginWheel]) -> Iterator[int | None]:
        self.undeletable.forget_gone(self._disk)
        failure: OSError | None = None
        for wheel in wheels:
            try:
                yield from wheel.delete_finished(self.undeletable)
            except OSError as error:
                _log.warning("wheel not swept", wheel=str(wheel.wheel), error=str(error))
                failure = failure or error
        if failure is not None:
            raise failure

    def _registered(self, wheel: WheelId, record: WheelRecord) -> WheelMeta:
        """Returns the identity of a wheel from the control topic; its frames are examined again."""
        return WheelMeta(
            wheel,
            record.members,
            record.min_insync,
            self._limits.span_seconds,
            state=WheelState.OPEN if record.closed_at is None else WheelState.CLOSED,
            final_seq=record.closed_at,
        )

    def _synced(self, copy: MirrorWheel) -> HeldWheel:
        """Returns what a copy holds, after a sync if groups are synced."""
        if self._limits.sync_groups:
            copy.sync()
        return self._held(copy)

    def _held(self, copy: MirrorWheel) -> HeldWheel:
        return HeldWheel(
            card=_card(copy.meta),
            applied=copy.last_seq,
            top_slot=copy.top_slot,
            missing=self._missing.of(copy),
            final_seq=copy.meta.final_seq,
            not_returned=copy.not_returned,
        )

    def _copy(self, wheel: WheelId) -> MirrorWheel:
        copy = self.outgoing.copy_of(wheel)
        if copy is None:
            raise WheelMissing(f"{self._data} has no copy of {wheel}")
        return copy

    def _copy_for(self, card: WheelCard, between: Callable[[], object]) -> MirrorWheel:
        """Returns the copy of a wheel; makes it if there is none."""
        if self._open is not None and self._open.wheel == card.wheel:
            raise WheelExists(f"{card.wheel} is open")
        copy = self._copies.known.get(card.wheel)
        if copy is not None:
            return copy
        meta = WheelMeta(card.wheel, card.members, card.min_insync, card.span_seconds)
        return finish(self._copies.taking(meta), between)


def _undeleted(error: OSError, pause_ms: int) -> None:
    _log.warning(
        "file cannot be deleted", path=error.filename, error=error.strerror, again_after_ms=pause_ms
    )


def _card(meta: WheelMeta) -> WheelCard:
    return WheelCard(meta.wheel, meta.members, meta.min_insync, meta.span_seconds)
