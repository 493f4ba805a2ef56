"""How much of a copy is on the medium, and its checkpoint.

The checkpoint says: everything up to a seq is on the medium, but for what is lacking. So

* a frame is noted as lacking before it is written in its place below that seq, for nobody would
  look again at what a crash of the machine leaves there;
* it is noted no more once a sync has covered it;
* what an earlier life wrote and did not sync is synced by this one.

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
so that the next sync of them would say "done". A frame that cannot be read to be written again is
damaged, and is told to whoever asked for the sync.

One thread alone syncs a wheel. With `flush = "group"` it is the store's, before anything counts,
and a checkpoint only notes how far that went; otherwise it is the one that makes checkpoints.
Neither ever waits for the other's sync: ``lock`` is held for a look, one small write, or a cut,
never while files are synced.
"""

import threading
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
from delaywheel.storage.frames.frame_copy import FrameCopy
from delaywheel.storage.frames.rows import INDEX_ROW, is_hole
from delaywheel.storage.reading.reader import WheelReader


class CopyMedium:
    """What of one copy is on the medium.

    Attributes:
        lock: held while the checkpoint is saved, a frame is written again, or the wheel is cut or
            closed. `note_lacking` and `note_synced` need it.
        closed: nothing is written any more.
        checkpoint: as it is on the medium.
        synced_seq: everything up to here is synced, but for what is noted as lacking.
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
        self.checkpoint = load_checkpoint(disk, self._folder)
        self.synced_seq = self.checkpoint.seq

    def take_over(self, first_seq: int, rows: NDArray[Any]) -> None:
        """Notes rows of one segment that an earlier life may not have synced, with their frames.

        That is all behind the checkpoint, and what was lacking then and is no more.
        """
        slots = np.unique(rows["slot"][rows["length"] > 0])
        self._slots.mark_unsynced(slots.tolist(), new=True)
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

    def note_lacking(self, seqs: SeqSet) -> None:
        """Durably notes missing frames, as far as the checkpoint covers them."""
        known = self.checkpoint
        self._save(Checkpoint(known.seq, known.lacking | seqs.within(1, known.seq)))

    def note_synced(self, seq: int, damaged: SeqSet) -> None:
        """Durably notes that a sync has covered everything up to ``seq``.

        Args:
            seq: the last that was there when the sync began.
            damaged: what cannot be read, looked up before this is called.
        """
        self._save(Checkpoint(seq, (damaged | self._rewritten).within(1, seq)))

    def sync(self, last_seq: int, *, floor: int) -> SeqSet:
        """Puts everything written on the medium.

        Args:
            last_seq: the last frame that has a row.
            floor: slots below are finished.

        Returns:
            Frames whose sync had failed before, and that cannot be read any more.

        Raises:
            OSError: the medium refused; the next call writes all of it again first.
        """
        with self._syncing:
            return self._sync(last_seq, floor)

    def _sync(self, last_seq: int, floor: int) -> SeqSet:
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
        # Only now: what was written again is in it, also where an earlier sync had covered it.
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
        if checkpoint != self.checkpoint:
            save_checkpoint(self._disk, self._folder, checkpoint)
            self.checkpoint = checkpoint

    def _write_again(self, seqs: SeqSet, floor: int) -> SeqSet:
        """Writes frames once more; returns those that cannot be read."""
        unreadable = NO_SEQS
        reader = WheelReader(self._disk, self._data, self._wheel)
        try:
            for first_seq, rows in reader.rows_of(seqs):
                holes = is_hole(rows)
                damaged = []
                for seq in (np.flatnonzero(~holes) + first_seq).tolist():
                    for found in reader.copies(seq, seq, floor=floor):
                        if isinstance(found, FrameCopy):
                            self._write_once_more(found)
                        else:
                            damaged.append(seq)
                unreadable |= SeqSet.where(first_seq, holes)
                unreadable |= SeqSet.of(damaged)
        finally:
            reader.close()
        return unreadable

    def _write_once_more(self, copy: FrameCopy) -> None:
        with self.lock:  # a frame that was cut meanwhile must not come back
            if not self.closed and copy.seq <= self._index.last_seq:
                self._put(copy)

    def _put(self, copy: FrameCopy) -> None:
        slot, offset, _, _ = np.frombuffer(copy.row, dtype=INDEX_ROW)[0].item()
        if copy.content:
            try:
                file = self._disk.open(layout.slot_path(self._folder, slot))
            except FileNotFoundError:
                return  # deleted meanwhile: below the floor
            try:
                file.write_at((copy.content,), offset)
            finally:
                file.close()
            self._slots.mark_unsynced([slot], new=False)
        self._index.rewrite(copy.seq, copy.row)
