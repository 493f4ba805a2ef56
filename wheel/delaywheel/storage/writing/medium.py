"""How much of a copy is on the medium, and its checkpoint.

The checkpoint states that everything up to a seq is on the medium, except for missing frames. So

* a frame is noted as missing before it is written in its place below that seq, since nothing
  would look again at what a crash of the machine leaves there;
* the note is removed once a sync has covered the frame;
* what an earlier process wrote and did not sync is synced by this one.

What was written is in one of these states:

=============  =======================  =======================================================
state          reached by               left for
=============  =======================  =======================================================
unsynced       a write                  being synced, when a sync begins
being synced   a sync                   synced, if all of it succeeds; doubted, if any of it fails
doubted        a failed sync            unsynced, once everything behind the checkpoint, and all
                                        that was rewritten, has been written again
synced         a sync that began after  unsynced, by the next write
               the write and succeeded
=============  =======================  =======================================================

A failed sync leaves nothing but doubt: the kernel may have dropped the pages and marked them clean,
so that their next sync would succeed. A frame that cannot be read to be written again is damaged,
and is reported to the caller of the sync.

Only one thread syncs a wheel. With `flush = "group"` it is the store's, before anything counts, and
a checkpoint only records how far that went; otherwise it is the thread that makes checkpoints.
Neither ever waits for the other's sync: ``lock`` is held for a lookup, one small write, or a cut,
never while files are synced. Linux reports a failed write once: if two threads synced the same
files, one could fail and leave the other with nothing to do, and groups were acknowledged so.
"""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import ROWS_PER_SEGMENT, IndexWriter
from delaywheel.storage.files.slot_files import SlotFiles
from delaywheel.storage.files.wheel_folder import Checkpoint, load_checkpoint, save_checkpoint
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.bundle import FrameCopy
from delaywheel.storage.frames.rows import is_hole
from delaywheel.storage.reading.reader import WheelReader


class CopyMedium:
    """How much of one copy is on the medium.

    Attributes:
        lock: Held while the checkpoint is saved, a frame is written again, or the wheel is cut or
            closed. `note_missing` and `note_synced` need it.
        closed: Nothing more is written.
        checkpoint: As it is on the medium.
        synced_seq: Everything up to here is synced, except for frames noted as missing.
    """

    def __init__(
        self, disk: Disk, data: Path, wheel: WheelId, slots: SlotFiles, index: IndexWriter
    ) -> None:
        self._disk = disk
        self._data = data
        self._wheel = wheel
        self._folder = layout.wheel_folder(data, wheel)
        self._slots = slots
        self._index = index
        self._rewritten = NO_SEQS  # in their places, since the last sync
        self._rewritten_lock = threading.Lock()
        self._doubted = False
        self._syncing = threading.Lock()
        self.lock = threading.Lock()
        self.closed = False
        self.checkpoint = load_checkpoint(disk, self._folder) or Checkpoint(0)
        self.synced_seq = self.checkpoint.seq
        # Whether the medium may hold another one: saving it has failed, perhaps behind the rename.
        self._is_other_saved = False
        try:
            disk.sync_folder(self._folder)  # an earlier process may have died there
        except OSError:
            self._is_other_saved = True

    def take_over(self, first_seq: int, rows: NDArray[Any]) -> None:
        """Notes rows of one segment, and their frames, that an earlier process may not have synced.

        These are all rows behind the checkpoint, and of those before it what was missing when it
        was saved, and is there now.
        """
        slots = np.unique(rows["slot"][rows["length"] > 0])
        self._slots.mark_unsynced(slots.tolist())
        self._index.mark_unsynced([(first_seq - 1) // ROWS_PER_SEGMENT])
        last_seq = min(first_seq + len(rows) - 1, self.checkpoint.seq)
        self.rewritten(NO_SEQS.with_span(first_seq, last_seq))

    def rewritten(self, seqs: SeqSet) -> None:
        """Notes that these frames were rewritten in their places."""
        with self._rewritten_lock:
            self._rewritten |= seqs

    def doubt(self) -> None:
        """Notes that a sync has failed."""
        self._doubted = True

    def note_missing(self, seqs: SeqSet) -> None:
        """Durably notes missing frames, as far as the checkpoint covers them."""
        known = self.checkpoint
        self._save(known._replace(missing=known.missing | seqs.within(1, known.seq)))

    def note_synced(self, seq: int, damaged: SeqSet) -> None:
        """Durably notes that a sync has covered everything up to `seq`, the last one when it began.

        What is damaged, so that it cannot be read, must have been determined before this call.
        """
        missing = (damaged | self._rewritten).within(1, seq)
        self._save(Checkpoint(seq, missing, self.checkpoint.first_segment))

    def note_first(self, segment: int) -> None:
        """Durably notes that index segments below this one are finished, and may be deleted."""
        with self.lock:
            self._save(self.checkpoint._replace(first_segment=segment))

    def sync(self, last_seq: int, *, floor: int) -> SeqSet:
        """Puts everything written, up to the last frame that has a row, on the medium.

        Returns frames whose sync had failed before, and that can no longer be read. Raises OSError
        if the medium does; the next call first writes all of it again.
        """
        with self._syncing:
            with self._rewritten_lock:
                rewritten, self._rewritten = self._rewritten, NO_SEQS
            unreadable = NO_SEQS
            if self._doubted:
                written = rewritten.with_span(self.checkpoint.seq + 1, last_seq)
                try:
                    unreadable = self._write_again(written, floor)
                except OSError:
                    self.rewritten(rewritten)
                    raise
            # Only now: it includes what was written again, even if a sync had covered that before.
            slots, segments = self._slots.take_unsynced(), self._index.take_unsynced()
            try:
                self._slots.sync(slots)
                self._index.sync(segments)
            except OSError:
                self._doubted = True
                self._slots.put_back(slots)
                self._index.mark_unsynced(segments)
                self.rewritten(rewritten)
                raise
            self._doubted = False
            self.synced_seq = max(last_seq, self.synced_seq)
            return unreadable

    def _save(self, checkpoint: Checkpoint) -> None:
        if checkpoint == self.checkpoint and not self._is_other_saved:
            return
        self._is_other_saved = True  # it may have its name although this fails
        save_checkpoint(self._disk, self._folder, checkpoint)
        self._is_other_saved = False
        self.checkpoint = checkpoint

    def _write_again(self, seqs: SeqSet, floor: int) -> SeqSet:
        """Writes frames again; returns those that cannot be read."""
        unreadable = NO_SEQS
        with closing(WheelReader(self._disk, self._data, self._wheel)) as reader:
            for first_seq, rows in reader.rows_of(seqs):
                holes = is_hole(rows)
                damaged = []
                for seq in (np.flatnonzero(~holes) + first_seq).tolist():
                    frame, damage = reader.bundle(seq, seq, floor=floor)
                    for copy in frame.copies():
                        self._write_once_more(copy)
                    if damage is not None:
                        damaged.append(seq)
                unreadable |= SeqSet.where(first_seq, holes)
                unreadable |= SeqSet.of(damaged)
        return unreadable

    def _write_once_more(self, copy: FrameCopy) -> None:
        with self.lock:  # a frame that was cut meanwhile must not come back
            if self.closed or copy.seq > self._index.last_seq:
                return
            if copy.content:
                path = layout.slot_path(self._folder, copy.slot)
                try:
                    file = self._disk.open(path)
                except FileNotFoundError:
                    return  # deleted meanwhile: below the floor
                with closing(file):
                    file.write_at((copy.content,), copy.offset)
                self._slots.mark_unsynced([copy.slot])
            self._index.rewrite(copy.seq, copy.row)
