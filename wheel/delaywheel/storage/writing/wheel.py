"""A node's own wheel and its only writer.

The life of an origin wheel:

=========  ================================  =============================================
state      how it is reached                 what is possible
=========  ================================  =============================================
open       ``OriginWheel.create``, fsynced   append, sync, checkpoint
broken     a write or sync failed            nothing more; what is written stays readable
ended      ``close``, or the process ended   reading; a wheel is never opened for append again
=========  ================================  =============================================

An append writes the bytes of all frames to their slot files, then their index rows in one write: a
frame counts once its row can be read. So a crash between any two effects leaves whole frames with
rows, and perhaps bytes without rows, which recovery cuts.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.index import ROWS_PER_SEGMENT, IndexWriter
from delaywheel.storage.files.slot_files import (
    SlotFiles,
    delete_slots_below,
    forget_announced,
)
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.files.wheel_folder import Checkpoint, WheelMeta, make_wheel, save_checkpoint
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.bundle import NO_GROUP, FrameBundle, WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.encode import EncodedGroup, encode_group
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import index_rows
from delaywheel.storage.writing.dial import Dial
from delaywheel.storage.writing.table_writer import SlotTable

DEFAULT_MAX_FRAME_MESSAGES = 10_000
DEFAULT_MAX_FRAME_BYTES = 16 * 1024 * 1024


class SlotFinished(Exception):
    """A message for a slot below the floor: its file would come back after its deletion."""


class NotEncodable(Exception):
    """A group has something that no frame can hold and that its caller should have refused.

    Nothing was written. The rest of the group can be tried again.
    """


class WheelBroken(Exception):
    """The medium refused a write: this wheel accepts nothing more, and its node opens the spare.

    ``done`` are the frames of the failed group that count; whether others of it are found after a
    restart is unknown.
    """

    def __init__(self, wheel: WheelId, cause: str, done: "WrittenGroup | None" = None) -> None:
        super().__init__(f"wheel {wheel}: {cause}")
        self.done = done or NO_GROUP


class OriginWheel:
    """The wheel that this node writes. ``append`` is for one thread, ``checkpoint`` for any."""

    def __init__(
        self,
        disk: Disk,
        data: Path,
        meta: WheelMeta,
        handles: HandleCache,
        *,
        dial: Dial | None = None,
        max_frame_messages: int = DEFAULT_MAX_FRAME_MESSAGES,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        table_rows: int = ROWS_PER_SEGMENT,
    ) -> None:
        self._disk = disk
        self._folder = layout.wheel_folder(data, meta.wheel)
        self._slots = SlotFiles(self._folder, handles, keeps_open=True)
        self._index = IndexWriter(disk, self._folder)
        self._table = SlotTable(disk, self._folder, refresh_rows=table_rows)
        self._handles = handles
        self._dial = dial
        self._max_frame_messages = max_frame_messages
        self._max_frame_bytes = max_frame_bytes
        self._sync_lock = threading.Lock()
        self._synced_seq = 0
        self._first_segment = 0
        # Held while the checkpoint is saved, and never for longer.
        self._save_lock = threading.Lock()
        self._broken: str | None = None
        self._closed = False
        self._is_refused = False  # by the medium: a write or a sync
        self._floor = 0
        self.meta = meta

    @classmethod
    def create(
        cls, disk: Disk, data: Path, meta: WheelMeta, handles: HandleCache, **options: Any
    ) -> Self:
        """Opens a new wheel, which is on the medium before this returns.

        Args:
            meta: Its state is OPEN.
            options: ``dial``, ``max_frame_messages``, ``max_frame_bytes``, ``table_rows``.

        Raises:
            WheelExists: The folder has a wheel of this name.
        """
        make_wheel(disk, data, meta)
        return cls(disk, data, meta, handles, **options)

    @property
    def wheel(self) -> WheelId:
        """The wheel's name."""
        return self.meta.wheel

    @property
    def last_seq(self) -> int:
        """The seq of the last frame that counts; 0 if there is none yet."""
        return self._index.last_seq

    @property
    def broken(self) -> str | None:
        """Why the wheel accepts no frames; None while it does."""
        return self._broken

    def append(
        self, columns: Columns, *, kind: Kind = Kind.MESSAGES, accepted_at_ms: int
    ) -> WrittenGroup:
        """Writes a group of at least one message: a frame and a write for each slot, then the rows.

        The wall clock by which it was accepted is never less than before.

        Raises:
            SlotFull: Nothing was written; retry without that slot's messages.
            SlotFinished: Nothing was written; the caller should have refused a late message.
            NotEncodable: Nothing was written; the caller should have refused what no frame can
                hold.
            WheelBroken: The medium reported an error; see there.
        """
        self._refuse_if_broken()
        group = self._encode(columns, kind, accepted_at_ms)
        if int(group.slots[0]) < self._floor:
            raise SlotFinished(f"slot {group.slots[0]} is below the floor {self._floor}")
        offsets = self._slots.places(group.slots, group.edges)
        self._handles.now_slot = accepted_at_ms // 1000
        written, failure = self._write(group, offsets)
        if failure is not None:
            raise self._break(f"a write failed: {failure}", written) from failure
        return written

    def check_encodable(self, columns: Columns, kind: Kind) -> None:
        """Encodes a group only to check that this is possible; raises NotEncodable."""
        self._encode(columns, kind, accepted_at_ms=0)

    def sync(self) -> None:
        """Returns when everything appended is on the medium, or raises WheelBroken."""
        with self._sync_lock:
            # Not before the lock: its last holder may have met the error that concerns us too.
            self._refuse_if_broken()
            seq = self._index.last_seq
            try:
                self._slots.sync(self._slots.take_unsynced())
                self._index.sync(self._index.take_unsynced())
            except OSError as error:
                raise self._break(f"a sync failed: {error}") from error
            self._synced_seq = seq

    def checkpoint(self, *, syncs: bool = True, refreshes: bool = True) -> int:
        """Records the seq up to which everything is on the medium.

        Recovery after a crash of the machine examines only what came later.

        Args:
            syncs: Sync everything appended first; otherwise the caller calls `sync` for each group.
            refreshes: Update the slot table too; not if there is hardly any space.

        Raises:
            WheelBroken: The medium reported an error; what it holds is unknown.
            OSError: Everything is on the medium, but the checkpoint could not be recorded.
        """
        if syncs:
            self.sync()
        with self._save_lock:
            if self._closed:  # the copy's checkpoint records it now
                return self._synced_seq
            self._refuse_if_broken()
            seq = self._synced_seq
            self._save_checkpoint(self._first_segment)
        if refreshes:
            self._table.refresh(seq, floor=self._floor)
        return seq

    def raise_floor(self, floor: int) -> None:
        """Raises the floor: nothing more is written for slots below."""
        self._floor = max(self._floor, floor)
        self._slots.forget_below(floor)

    def delete_finished(self, undeletable: Undeletable) -> Iterator[int | None]:
        """Deletes the slot files below the floor, and then index segments, one by one.

        Yields the slot of each slot file, and None for each segment.
        """
        yield from delete_slots_below(self._disk, self._folder, self._floor, undeletable)
        segments = self._index.delete_below(self._floor, self._note_first, undeletable)
        # The copy that follows has a checkpoint of its own, and deletes them with its next sweep.
        while not self._closed and next(segments, None) is not None:
            yield None

    def close(self) -> bool:
        """Closes the files; the wheel is never opened for append again.

        Does not wait for a checkpoint in progress, which will not be recorded. Returns whether the
        medium has refused something, or may still do so in a sync in progress.
        """
        if self._broken is None:
            with suppress(OSError):  # then recovery examines a few slots needlessly
                forget_announced(self._disk, self._folder)
        self._table.close()
        with self._save_lock:
            self._closed = True
            self._broken = self._broken or "it was closed"
        self._slots.close()
        self._index.close()
        # Last: from now on no sync begins. The lock first: a sync that fails notes it before it
        # releases the lock.
        return self._sync_lock.locked() or self._is_refused

    def _encode(self, columns: Columns, kind: Kind, accepted_at_ms: int) -> EncodedGroup:
        try:
            return encode_group(
                columns,
                kind=kind,
                wheel=self.meta.wheel,
                first_seq=self._index.last_seq + 1,
                accepted_at_ms=accepted_at_ms,
                max_frame_messages=self._max_frame_messages,
                max_frame_bytes=self._max_frame_bytes,
            )
        except Exception as error:  # encoding has no effects, whatever it raises
            raise NotEncodable(f"{type(error).__name__}: {error}") from error

    def _write(
        self, group: EncodedGroup, offsets: NDArray[np.int64]
    ) -> tuple[WrittenGroup, OSError | None]:
        """Writes frames until one fails, then their rows; returns which ones count."""
        edges = group.edges
        lengths = edges[1:] - edges[:-1]
        rows = index_rows(group.slots, offsets, lengths, group.counts, kind=group.kind)
        first_seq = self._index.last_seq + 1
        seqs = np.arange(first_seq, first_seq + len(rows))
        bundle = FrameBundle(seqs, rows, edges, memoryview(group.content))
        frames, failure = 0, None
        try:
            self._slots.announce(group.slots.tolist())
        except OSError as error:
            failure = error
        else:
            wrote = self._slots.append(bundle)
            frames, failure = wrote.frames, wrote.failure
        try:
            self._index.append(rows[:frames])
        except OSError as error:
            failure = failure or error
            with suppress(OSError):  # then none of the group is known to count
                self._index.look_again()
        done = self._index.last_seq + 1 - first_seq
        if self._dial is not None and done:
            self._dial.add(rows[:done])
        counts = group.counts[:done]
        order = group.order[: int(counts.sum())]
        return WrittenGroup(bundle.part(0, done), counts, order), failure

    def _note_first(self, segment: int) -> None:
        """Durably notes that index segments below this one are finished."""
        with self._save_lock:
            if segment != self._first_segment:
                self._save_checkpoint(segment)
                self._first_segment = segment

    def _save_checkpoint(self, first_segment: int) -> None:
        known = Checkpoint(self._synced_seq, first_segment=first_segment)
        save_checkpoint(self._disk, self._folder, known)

    def _break(self, cause: str, done: WrittenGroup | None = None) -> WheelBroken:
        self._is_refused = True
        self._broken = cause
        return WheelBroken(self.meta.wheel, cause, done)

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise WheelBroken(self.meta.wheel, self._broken)
