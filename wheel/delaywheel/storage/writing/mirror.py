"""A copy of a wheel that this node does not write, or no longer writes, byte for byte.

A frame goes to the slot file and offset where its origin wrote it, and its row to the same place of
the index; the bytes first, as everywhere: a frame counts once its row can be read. The rows of a
copy:

=====================  =================  =====================================================
row                    comes from         is
=====================  =================  =====================================================
of a frame that lies   its holder         held
there
of a frame that does   crash, damage      missing: `repair` puts it in its place
not, or is damaged
of a finished slot     holder that has    held: a slot below the floor no longer has content
                       swept it
``GONE_ROW``           holder whose       held, as above: all that the index segment referred to
                       segment is gone    was finished
``HOLE_ROW``           crash; holder of   missing, unless it is committed as lost
                       a lost frame
=====================  =================  =====================================================

What is finished is decided by the own floor alone, which no peer raises:

| a frame that comes without content | is taken |
|---|---|
| with a row, of a slot below the own floor | yes |
| with any other row | no: its holder knows a higher floor, or is wrong; until then it is missing |
| as gone, behind the last row | if no row here is of a slot at or above the own floor |
| as gone, in the place of a hole | if no other row of its segment is of such a slot |
| as gone, in any other place | no |

Segments are deleted whole and in order: so where one was finished, all before it were.

Rows follow one another without gaps; holes are filled in behind the end. Files may be sparse if an
earlier frame of a slot is missing or finished.

A write that fails leaves whole frames with rows, and perhaps bytes without rows: a retry puts the
same bytes there. What is on the medium: see ``medium.py``.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.handles import HandleCache, Placement
from delaywheel.storage.files.index import ROWS_PER_SEGMENT, IndexWriter, read_raw_rows, top_slot_of
from delaywheel.storage.files.pages import PAGE_BYTES
from delaywheel.storage.files.slot_files import SlotFiles, delete_slots_below
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.files.wheel_folder import WheelMeta, WheelState, load_meta, save_meta
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames.bundle import NO_BUNDLE, FrameBundle, FrameCopy
from delaywheel.storage.frames.checking import damage_of, good_frames
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.frames.rows import (
    GONE_ROW,
    checked_rows,
    is_gone,
    is_hole,
    is_unreadable,
    leading,
)
from delaywheel.storage.reading.reader import UNREADABLE_WAIT_MS, DamagedFrame, WheelReader
from delaywheel.storage.writing.cutting import cut_beyond
from delaywheel.storage.writing.dial import Dial
from delaywheel.storage.writing.medium import CopyMedium
from delaywheel.storage.writing.placing import (
    MissingFrames,
    is_taken,
    lies_there,
    not_finished,
)
from delaywheel.storage.writing.refused_pages import (
    RefusedFrames,
    meeting,
    read_file,
)
from delaywheel.storage.writing.restoring import Restored, move_rows, restoring
from delaywheel.storage.writing.table_writer import SlotTable

_LEFT_IN_PLACE = frozenset({errno.ENOENT, errno.ENOSPC, errno.EDQUOT})
"""A slot file that was deleted, or for which there is no space, is not written again."""


class MirrorWheel:
    """One copy. ``checkpoint`` is for any thread, all other methods for one.

    Attributes:
        reader: Reads it, on that thread.
        floor: Slots below are finished.
        not_counted: Frames without rows that the dial does not count, or may not. It counts all
            others, also those that have lost their rows since.
    """

    def __init__(
        self,
        disk: Disk,
        data: Path,
        meta: WheelMeta,
        handles: HandleCache,
        *,
        floor: int = 0,
        dial: Dial | None = None,
        table_rows: int = ROWS_PER_SEGMENT,
    ) -> None:
        self._disk = disk
        self._data = data
        self._folder = layout.wheel_folder(data, meta.wheel)
        self._handles = handles
        self._slots = SlotFiles(self._folder, handles)
        self._index = IndexWriter(disk, self._folder, opened=handles.indexes)
        self._table = SlotTable(disk, self._folder, refresh_rows=table_rows)
        self.reader = WheelReader(disk, data, meta.wheel, opened=handles.indexes)
        self.floor = floor
        self._dial = dial
        self.not_counted = NO_SEQS
        self._missing = MissingFrames()
        self._searched = NO_SEQS  # missing frames that were looked for in all slot files
        # And in all but some: by the greatest slot whose file could not be read.
        self._searched_but: dict[int, SeqSet] = {}
        self._not_returned = NO_SEQS  # missing frames that were repaired in vain
        self._refused = RefusedFrames()
        self._medium = CopyMedium(disk, data, meta.wheel, self._slots, self._index)
        self.meta = meta
        self.top_slot = -1

    @classmethod
    def opening(  # noqa: PLR0913 - what its start knows of it
        cls,
        disk: Disk,
        data: Path,
        wheel: WheelId,
        handles: HandleCache,
        *,
        damaged: SeqSet = NO_SEQS,
        nowhere: SeqSet = NO_SEQS,
        floor: int = 0,
        dial: Dial | None = None,
        table_rows: int = ROWS_PER_SEGMENT,
    ) -> Steps[Self]:
        """Opens an existing copy, which was made (``make_wheel``), or has been recovered.

        Args:
            damaged: The frames that recovery found missing.
            nowhere: Those of them that lie in no slot file.
            table_rows: How many rows, roughly, its slot table may lag behind.

        Raises:
            WheelMissing: There is no such wheel.
        """
        meta = load_meta(disk, data, wheel)
        copy = cls(disk, data, meta, handles, floor=floor, dial=dial, table_rows=table_rows)
        copy._missing.add(damaged)
        yield from copy._read_index()
        copy._searched = nowhere
        return copy

    @property
    def wheel(self) -> WheelId:
        """The wheel's name."""
        return self.meta.wheel

    @property
    def last_seq(self) -> int:
        """The last frame that has a row; 0 if none."""
        return self._index.last_seq

    @property
    def missing(self) -> SeqSet:
        """Frames up to the last one that cannot be read and are not known to be finished."""
        return self._missing.seqs

    @property
    def not_returned(self) -> SeqSet:
        """Missing frames that `repair` could not mend, and that were not read again since.

        It is no use to fetch them once more before that: the medium does not take them, or does not
        return what it has taken.
        """
        return self._not_returned & self._missing.seqs

    # --- writing

    def append(
        self,
        bundle: FrameBundle,
        *,
        is_over: Callable[[], bool] | None = None,
        between: Callable[[], object] = lambda: None,
    ) -> FrameDamaged | None:
        """Writes the frames that follow the last one.

        Frames already held are skipped. The first that does not follow, lies beyond the committed
        end, or is damaged, ends the list; if it was damaged, its fault is returned.

        Args:
            is_over: Called after each written frame; if true, no more are written.
            between: Called before frames, and before their rows: others may want the disk.

        Raises:
            OSError: The medium reported an error; earlier frames may count, see ``last_seq``. What
                lies in the page that refused a frame is missing then, if it cannot be read.
        """
        following = bundle.following(self.last_seq + 1, self.meta.final_seq)
        good, accepted_at_ms = good_frames(self.wheel, following)
        self._handles.now_slot = max(self._handles.now_slot, accepted_at_ms // 1000)
        refused = None
        if good < len(following):
            refused = damage_of(self.wheel, following.part(good, good + 1))
        founded = self._founded(following.part(0, good))
        if founded < good:
            good, refused = founded, not_finished(int(following.seqs[founded]))
        written, taken, refusal = self._write_frames(
            self._bared(following.part(0, good)), is_over, between
        )
        failure = refusal
        if len(written):
            between()
        before = self._index.last_seq
        try:
            self._append_rows(written.rows)
        except OSError as error:
            failure = failure or error
            with suppress(OSError):  # then none of the rows is known to count
                self._index.look_again()
        self._count(written.part(0, self._index.last_seq - before))
        if failure is not None:
            if refusal is not None and is_medium_error(refusal):
                self._note_unread(following)
            raise failure
        return taken or (refused if len(written) == good else None)

    def repair(
        self, bundle: FrameBundle, *, between: Callable[[], object] = lambda: None
    ) -> list[FrameDamaged]:
        """Writes missing frames up to the last one to their places, and calls `between` after each.

        Returns the faults of those that were damaged, or that the medium refused.

        Raises:
            OSError: It cannot be gone on with any of them; frames written before stay.
        """
        copies: list[FrameCopy] = []
        refused = []
        wanted = (bundle.seqs >= 1) & (bundle.seqs <= self.last_seq) & ~is_hole(bundle.rows)
        for number in wanted.nonzero()[0].tolist():
            frame = bundle.part(number, number + 1)
            if not good_frames(self.wheel, frame).frames:
                refused.append(damage_of(self.wheel, frame))
                continue
            copy = self._bared(frame).only()
            if self._may_repair(copy):
                copies.append(copy)
            else:
                refused.append(not_finished(copy.seq))
        damaged = []
        for copy in copies:
            if self._damage(copy.seq) is not None:
                damaged.append(copy)
            between()
        self._slots.reopen({copy.slot for copy in damaged})
        taken = set[int]()
        for copy in damaged:
            if is_taken(self.reader, copy):
                taken.add(copy.seq)
            between()
        # Before it is noted: a checkpoint in progress must not take the note back.
        seqs = SeqSet.of(copy.seq for copy in damaged)
        self._note_missing(seqs)
        unread = self._mend_all([copy for copy in damaged if copy.seq not in taken], between)
        self._not_returned |= SeqSet.of(unread)
        refused += unread.values()
        # Also of frames whose rows could not be read when this was opened, and can be now.
        self.top_slot = max([self.top_slot, *(copy.slot for copy in copies)])
        refused += [lies_there(seq) for seq in sorted(taken)]
        whole = SeqSet.of({copy.seq for copy in copies}) - seqs
        self._take_over(self._missing.seqs & whole)
        self._missing.remove(SeqSet.of({copy.seq for copy in copies} - taken - unread.keys()))
        return refused

    def reading_again(self, seqs: SeqSet) -> Steps[SeqSet]:
        """Looks again at missing frames: restores lost rows, and reads what is there.

        Returns those that are not missing: they can be read, or are finished.
        """
        new = seqs - self._searched
        restored = yield from restoring(
            self._disk, self._folder, self.wheel, new, floor=self.floor, moved=self._reopen_index
        )
        self._note_searched(new, restored)
        for slot, found in restored.by_slot.items():
            self._table.change({slot})
            self._medium.rewritten(found)
        there = NO_SEQS
        self._not_returned -= seqs
        for seq in seqs.within(1, self.last_seq):
            frame, _ = self.reader.bundle(seq, seq, floor=self.floor)
            if len(frame):
                there = there.with_span(seq, seq)
                # Its row may have been unreadable when this was opened.
                self.top_slot = top_slot_of(frame.rows, self.top_slot)
            yield
        self._take_over(there)
        self._missing.remove(there)
        self._searched -= there  # their rows may be lost once more
        return there

    def note_damaged(self, seq: int) -> None:
        """Notes a frame that cannot be read."""
        if 1 <= seq <= self.last_seq:
            self._missing.add(SeqSet.of([seq]))

    def end_at(self, final_seq: int, *, between: Callable[[], object] = lambda: None) -> None:
        """Durably notes that the wheel ends here, as is committed, then cuts what lies beyond.

        Calls `between` after each file that was cut: others may want the disk.

        Raises:
            ValueError: It was closed before, at another seq.
            OSError: The medium reported an error; call it again.
        """
        if self.meta.final_seq not in {None, final_seq}:
            raise ValueError(f"wheel {self.wheel} was closed at {self.meta.final_seq}")
        with self._medium.lock:
            closed = replace(self.meta, state=WheelState.CLOSED, final_seq=final_seq)
            if closed != self.meta:
                save_meta(self._disk, self._data, closed)
                between()
            if self.last_seq > final_seq:
                self._cut(final_seq, between)
            self.meta = closed

    def raise_floor(self, floor: int) -> None:
        """Raises the floor: nothing below it is read, written or missing any more."""
        self.floor = max(self.floor, floor)
        self._slots.forget_below(floor)
        self._refused.drop_below(self.floor)
        self._missing.remove(self._finished(self._missing.some()))

    def delete_finished(self, undeletable: Undeletable) -> Iterator[int | None]:
        """See `OriginWheel.delete_finished`."""
        yield from delete_slots_below(self._disk, self._folder, self.floor, undeletable)
        segments = self._index.delete_below(self.floor, self._medium.note_first, undeletable)
        while not self._medium.closed and next(segments, None) is not None:
            yield None

    # --- reading

    def end_of_hole(self, first_seq: int, last_seq: int, *, now_ms: int) -> int:
        """Returns the end of the hole that begins at `first_seq`, at most `last_seq`.

        Rows that the medium cannot read are none: nobody knows that their frames are absent. Nor
        are holes whose frames may lie in slot files, as nobody has looked there (`unsought`).
        """
        sought = self._sought(now_ms)
        span, searched = self._missing.seqs.span_of(first_seq), sought.span_of(first_seq)
        if span is None or searched is None:
            return first_seq - 1
        rows = self.reader.rows(first_seq, min(last_seq, span[1], searched[1]))
        return first_seq - 1 + leading(is_hole(rows) & ~is_unreadable(rows))

    def unreadable_rows(self, first_seq: int) -> SeqSet:
        """Returns the run of rows from `first_seq` on that the medium cannot read."""
        rows = self.reader.rows(first_seq, first_seq + ROWS_PER_SEGMENT - 1)
        return NO_SEQS.with_span(first_seq, first_seq - 1 + leading(is_unreadable(rows)))

    def unsought(self, first_seq: int, last_seq: int, *, now_ms: int) -> SeqSet:
        """Returns the holes in a row from `first_seq` on whose frames may lie in slot files.

        `reading_again` looks there. For files that it cannot read, it is waited as long as for
        frames that have a row.
        """
        last_seq = min(last_seq, first_seq + ROWS_PER_SEGMENT - 1)
        end = first_seq - 1 + leading(is_hole(self.reader.rows(first_seq, last_seq)))
        return NO_SEQS.with_span(first_seq, end) - self._sought(now_ms)

    def _sought(self, now_ms: int) -> SeqSet:
        """Returns missing frames that lie in no slot file, as far as is waited to know it."""
        sought = self._searched
        for unread_slot, seqs in self._searched_but.items():
            if now_ms >= unread_slot * 1000 + UNREADABLE_WAIT_MS:
                sought |= seqs
        return sought

    def _note_searched(self, looked_for: SeqSet, found: Restored) -> None:
        """Notes what a search has found; found frames may lose their rows once more."""
        searched_but = {slot: s - looked_for for slot, s in self._searched_but.items()}
        if found.unread_slot < 0:
            self._searched |= found.nowhere
        else:
            before = searched_but.get(found.unread_slot, NO_SEQS)
            searched_but[found.unread_slot] = before | found.nowhere
        self._searched_but = {slot: seqs for slot, seqs in searched_but.items() if seqs}

    def _damage(self, seq: int) -> DamagedFrame | None:
        _, damaged = self.reader.bundle(seq, seq, floor=self.floor)
        return damaged

    # --- the medium

    def sync(self) -> None:
        """Returns when everything written is on the medium; after an OSError, writes it again."""
        self._sync(self.last_seq)

    def checkpoint(self, *, syncs: bool = True, refreshes: bool = True) -> SeqSet:
        """Records how much is on the medium, and what is missing; raises as `sync` does.

        Returns frames that were found to be damaged.

        Args:
            syncs: Sync everything written first; otherwise the caller has called `sync` for it.
            refreshes: Update the slot table too; not if there is hardly any space.
        """
        medium, seq, damaged = self._medium, self._medium.synced_seq, NO_SEQS
        if syncs:
            seq = self.last_seq
            try:
                damaged = self._sync(seq)
            except OSError:
                if medium.closed:  # perhaps its files are deleted
                    return NO_SEQS
                raise
        with medium.lock:
            if not medium.closed:
                medium.note_synced(seq, self._missing.seqs)
        if refreshes:
            try:
                self._table.refresh(seq, floor=self.floor)
            except OSError:
                if not damaged:  # which must be reported; the table is only late
                    raise
        return damaged

    def _sync(self, last_seq: int) -> SeqSet:
        unreadable = self._medium.sync(last_seq, floor=self.floor)
        self._missing.add(unreadable)
        return unreadable

    def doubt_medium(self) -> None:
        """Notes that a sync has failed: everything held is written again before the next one."""
        self._medium.doubt()

    def close(self) -> None:
        """Closes everything; nothing more is written."""
        with self._medium.lock:
            self._medium.closed = True
            self._table.close()
            self._slots.close()
            self._index.close()
            self.reader.close()

    # --- inside

    def _read_index(self) -> Steps[None]:
        """Finds the end of the copy from the frames after the slot table and the checkpoint."""
        self._index.look_again()
        yield
        last_seq, head = self._index.last_seq, self._table.head
        counted = head.seq if head.seq <= last_seq else 0
        top_slot = head.top_slot if counted else -1
        behind = read_raw_rows(self._disk, self._folder, counted + 1, last_seq)
        filled = self.reader.rows_of(head.holes.within(1, counted))
        for _, rows in chain(behind, filled):  # the table has counted none of these
            top_slot = top_slot_of(rows, top_slot)
            yield
        self.top_slot = top_slot
        synced = min(self._medium.checkpoint.seq, last_seq)
        for first_seq, rows in read_raw_rows(self._disk, self._folder, synced + 1, last_seq):
            self._medium.take_over(first_seq, checked_rows(rows))
            yield
        mended = (self._medium.checkpoint.missing - self._missing.seqs).within(1, synced)
        yield
        self._take_over(mended)
        yield

    def _take_over(self, seqs: SeqSet) -> None:
        """Notes frames that could not be read, and can be now: nobody may have synced them."""
        for first_seq, rows in self.reader.rows_of(seqs):
            self._medium.take_over(first_seq, rows)
            self._count_late(first_seq, rows)

    def _founded(self, bundle: FrameBundle) -> int:
        """Returns how many leading frames behind the last one may be taken (see the table)."""
        if bundle.is_whole:
            return len(bundle)
        rows = bundle.rows
        slots = np.where(rows["length"] > 0, rows["slot"].astype(np.int64), -1)
        tops = np.maximum.accumulate(np.maximum(slots, self.top_slot))
        is_unfounded = ~bundle.has_content & (slots >= self.floor)
        is_unfounded |= is_gone(rows) & (tops >= self.floor)
        return leading(~is_unfounded)

    def _may_repair(self, copy: FrameCopy) -> bool:
        """Whether a frame may be put in its place (see the table)."""
        if copy.content:
            return True
        if copy.row != GONE_ROW:
            return copy.slot < self.floor
        if not is_hole(self.reader.rows(copy.seq, copy.seq)).all():
            return False
        first_seq = (copy.seq - 1) // ROWS_PER_SEGMENT * ROWS_PER_SEGMENT + 1
        rows = self.reader.rows(first_seq, first_seq + ROWS_PER_SEGMENT - 1)
        return int(rows["slot"].max(initial=0)) < self.floor

    def _bared(self, bundle: FrameBundle) -> FrameBundle:
        """Returns frames as they are written: only rows for those of finished slots.

        The file of a finished slot would come back after its deletion.
        """
        finished = bundle.has_content & (bundle.rows["slot"] < self.floor)
        return bundle.without_content(finished) if np.count_nonzero(finished) else bundle

    def _write_frames(
        self,
        bundle: FrameBundle,
        is_over: Callable[[], bool] | None,
        between: Callable[[], object],
    ) -> tuple[FrameBundle, FrameDamaged | None, OSError | None]:
        """Writes contents in order until one cannot be written; returns why."""
        if len(bundle.content):
            filled = set(compress(bundle.rows["slot"].tolist(), bundle.has_content.tolist()))
            try:
                self._slots.announce(sorted(filled))
            except OSError as error:
                return NO_BUNDLE, None, error
            between()
        first = 0
        while True:
            wrote = self._slots.write(bundle.part(first, len(bundle)), Placement.BEHIND, is_over)
            first += wrote.frames
            if wrote.misplaced_at is None:
                return bundle.part(0, first), None, wrote.failure
            # Beyond the end there is nothing; before it there may be what a failed write left, or a
            # frame.
            copy = bundle.part(first, first + 1).only()
            if is_taken(self.reader, copy):
                return bundle.part(0, first), lies_there(copy.seq), None
            try:
                self._write(copy)
            except OSError as error:
                return bundle.part(0, first), None, error
            first += 1
            if is_over is not None and is_over():
                return bundle.part(0, first), None, None

    def _write(self, copy: FrameCopy) -> None:
        wrote = self._slots.write(FrameBundle.of_copies([copy]), Placement.ANYWHERE)
        if wrote.failure is not None:
            raise wrote.failure

    def _count(self, bundle: FrameBundle) -> None:
        self._note_rows(bundle)
        if self._dial is not None:
            self._dial.add(bundle.rows if bundle.is_whole else bundle.rows[bundle.has_content])

    def _count_late(self, first_seq: int, rows: NDArray[Any]) -> None:
        """Counts frames that had no rows when others were counted, and have them now."""
        if self._dial is not None:
            self._dial.add(rows[self.not_counted.marks(first_seq, len(rows))])
        self.not_counted -= SeqSet.where(first_seq, ~is_hole(rows))

    def _note_rows(self, bundle: FrameBundle) -> None:
        rows = bundle.rows
        lengths = rows["length"].tolist()
        self.top_slot = max([self.top_slot, *compress(rows["slot"].tolist(), lengths)])
        if 0 in lengths:
            holes = is_hole(rows)
            seqs = SeqSet.of(bundle.seqs[holes].tolist())
            self._missing.add(seqs)
            self._searched |= seqs  # nothing of them was ever here
            self.not_counted |= seqs

    def _mend_all(
        self, copies: list[FrameCopy], between: Callable[[], object]
    ) -> dict[int, FrameDamaged]:
        """Writes missing frames and their rows; returns by seq why some are in vain."""
        unread = {}
        for copy in copies:
            fault = self._mend(copy)
            if fault is not None:
                unread[copy.seq] = fault
            between()
        for slot in {copy.slot for copy in copies if copy.seq in unread}:
            for seq in self._move(slot):
                unread.pop(seq, None)
            between()
        return unread

    def _mend(self, copy: FrameCopy) -> FrameDamaged | None:
        """Writes one missing frame and its row; returns why that was in vain, if it was.

        What cannot be read stays missing: who does not get back what is due has to let another node
        lead.
        """
        try:
            self._write(copy)
        except OSError as error:
            if not is_medium_error(error):
                raise
            self._refused.put(copy)
            return FrameDamaged(DamageReason.UNREADABLE, f"seq {copy.seq}: {error}")
        return self._written_in_place(copy)

    def _written_in_place(self, copy: FrameCopy) -> FrameDamaged | None:
        """Writes the row of a missing frame that is in its place; as `_mend`."""
        try:
            self._write_row(copy)
        except OSError as error:
            if not is_medium_error(error):
                raise
            return FrameDamaged(DamageReason.UNREADABLE, f"seq {copy.seq}: {error}")
        # In this order: a reader that looks at both in between must find it in one.
        seqs = SeqSet.of([copy.seq])
        self._medium.rewritten(seqs)
        damaged = self._damage(copy.seq)
        if damaged is not None:
            return FrameDamaged(damaged.reason, f"seq {copy.seq}: written, and not returned")
        self._missing.remove(seqs)
        self._not_returned -= seqs
        return None

    def _move(self, slot: int) -> list[int]:
        """Rewrites a slot's file if the medium refuses it, and all of it is at hand.

        Returns the frames that are in their places now.
        """
        try:
            copies = self._rewrite(slot)
        except OSError as error:
            if not (is_medium_error(error) or error.errno in _LEFT_IN_PLACE):
                raise
            return []  # it does not take a new file either
        return [copy.seq for copy in copies if self._written_in_place(copy) is None]

    def _rewrite(self, slot: int) -> list[FrameCopy]:
        """Replaces a slot's file if nothing that the medium does not return of it is absent.

        Returns the refused frames that it has now. If others are absent, they are missing then.
        """
        path = layout.slot_path(self._folder, slot)
        copies = self._refused.of_slot(slot)
        end = max((copy.offset + len(copy.content) for copy in copies), default=0)
        found = read_file(self._disk, path, end) if copies else None
        if found is None:
            return []
        content, unread = found
        if unread and self.reader.holes_anywhere(self.last_seq, self._searched):
            return []  # the frame of such a row may lie there, and perhaps nowhere else
        seqs, rows = self.reader.slot_places(slot)
        absent = SeqSet.of(seqs[meeting(rows, unread)].tolist())
        absent -= SeqSet.of(copy.seq for copy in copies)
        if absent:
            self._note_missing(absent - self._missing.seqs)
            return []
        for copy in copies:
            content[copy.offset : copy.offset + len(copy.content)] = copy.content
        self._slots.reopen({slot})
        try:
            beside = layout.moving_path(self._folder)
            self._disk.replace_file(path, bytes(content), beside=beside)
        finally:  # if it fails, it may have its name all the same, and only for now
            self._slots.mark_unsynced({slot})
        self._refused.drop_slot(slot)
        return copies

    def _note_unread(self, following: FrameBundle) -> None:
        """Notes as missing what cannot be read in the page that refused the next frame."""
        refused = following.following(self.last_seq + 1, self.last_seq + 1)
        if not len(refused):
            return
        copy = refused.only()
        page = copy.offset // PAGE_BYTES * PAGE_BYTES
        seqs, rows = self.reader.slot_places(copy.slot)
        there = seqs[meeting(rows, [(page, copy.offset)])].tolist()
        bad = SeqSet.of(seq for seq in there if isinstance(self.reader.frame(seq), DamagedFrame))
        self._note_missing(bad - self._missing.seqs)

    def _note_missing(self, seqs: SeqSet) -> None:
        if not seqs:
            return
        self._missing.add(seqs)
        with self._medium.lock:
            self._medium.note_missing(seqs)

    def _write_row(self, copy: FrameCopy) -> None:
        old, bundle = self.reader.rows(copy.seq, copy.seq), FrameBundle.of_copies([copy])
        if old.tobytes() != copy.row:
            try:
                self._index.rewrite(copy.seq, copy.row)
            except OSError as error:
                self._move_rows({copy.seq: copy.row}, error)
            self._table.change({copy.slot, int(old["slot"][0])})
            self._note_rows(bundle)
        self._count_late(copy.seq, bundle.rows)

    def _append_rows(self, rows: NDArray[Any]) -> None:
        first_seq, last_seq = self._index.last_seq + 1, self._index.last_seq + len(rows)
        try:
            self._index.append(rows)
        except OSError as error:
            seq = self._index.last_seq + 1
            end_seq = min(last_seq, -(-seq // ROWS_PER_SEGMENT) * ROWS_PER_SEGMENT)
            left = {each: rows[each - first_seq].tobytes() for each in range(seq, end_seq + 1)}
            self._move_rows(left, error)
            self._index.last_seq = end_seq
            self._append_rows(rows[end_seq + 1 - first_seq :])

    def _move_rows(self, rows: dict[int, bytes], refusal: OSError) -> None:
        """Puts rows that the medium has refused in a new file, with their whole segment.

        Raises OSError if the medium does not take that either, or was not the cause.
        """
        if not is_medium_error(refusal):
            raise refusal
        try:
            move_rows(self._disk, self._folder, rows)
        finally:  # if it fails, a segment may have been replaced all the same
            self._reopen_index()

    def _reopen_index(self) -> None:
        """Opens the index again when it is next used: a segment of it lies in a new file."""
        self._index.close()
        self.reader.close()

    def _finished(self, seqs: SeqSet) -> SeqSet:
        """Returns which of these are of slots below the floor."""
        finished = NO_SEQS
        for first_seq, rows in self.reader.rows_of(seqs):
            is_done = (rows["slot"] < self.floor) & ~is_hole(rows)
            finished |= SeqSet.where(first_seq, is_done)
        return finished

    def _cut(self, final_seq: int, between: Callable[[], object]) -> None:
        beyond = self.reader.rows(final_seq + 1, self.last_seq)
        self._slots.close()
        self._index.close()
        self.reader.close()
        try:
            for _ in cut_beyond(self._disk, self._folder, final_seq, self._table):
                between()
        finally:
            for _ in self._read_index():
                between()
            if self._dial is not None:
                self._dial.remove(beyond[self.last_seq - final_seq :])
            self._missing.cut_behind(self.last_seq)
            self._refused.cut_behind(self.last_seq)
