"""Errors in finding the frames of a second by the slot table and the index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.index import IndexReader, list_segments
from delaywheel.storage.files.slot_files import delete_slots_below
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.folder.steps import Steps
from delaywheel.storage.frames import rows
from delaywheel.storage.frames.bundle import FrameBundle, FrameCopy
from delaywheel.storage.frames.rows import INDEX_ROW, Places
from delaywheel.storage.reading import places
from delaywheel.storage.reading.places import Returned, SlotPlaces
from delaywheel.storage.reading.reader import DamagedFrame
from delaywheel.storage.reading.unlisted import with_unlisted
from delaywheel.storage.reading.unreadable_rows import UnreadableRows
from delaywheel.storage.recovery import found_rows, recover
from delaywheel.storage.writing import mirror, restoring, table_writer
from delaywheel.storage.writing.medium import CopyMedium
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel.storage.writing.restoring import Restored
from delaywheel.storage.writing.wheel import OriginWheel
from delaywheel_replica.cleaner.due import given_up
from delaywheel_replica.core.leader import holders as holding
from delaywheel_replica.core.member.own_heartbeat import OwnHeartbeat
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.wheels.verifying import Verifying
from delaywheel_replica.server.store import copies
from sim.mutants.mutant import Mutant, Patch, everywhere, instead

_ROW_BYTES = INDEX_ROW.itemsize

_NOTHING: Places = (np.empty(0, np.int64), np.empty(0, INDEX_ROW))


def recovery_forgets() -> list[Patch]:
    real = recover._cut_torn_row

    def cut(disk: Disk, folder: Path) -> Steps[Any]:
        found = yield from real(disk, folder)
        for segment in list_segments(disk, folder)[-1:]:
            file = disk.open(layout.index_path(folder, segment))
            file.truncate(max(0, file.size() - _ROW_BYTES))
            file.close()
        return found

    def none_announced(*_: Any) -> Steps[list[Any]]:
        yield
        return []

    return [
        instead(recover, "_cut_torn_row", cut),
        instead(recover, "_announced_sizes", none_announced),
    ]


def trusts_the_file() -> list[Patch]:
    def walked(self: SlotPlaces, slot: int, last_seq: int) -> Places:
        try:
            file = self._disk.open_read(layout.slot_path(self._folder, slot))
        except FileNotFoundError:
            return _NOTHING
        return self._walk(file, slot, last_seq)[0]

    return [instead(SlotPlaces, "_walked", walked)]


def walks_end_at_gaps() -> list[Patch]:
    def listed_or_next(*arguments: Any) -> Places:
        return with_unlisted(*arguments[:-1])

    return [instead(places, "with_unlisted", listed_or_next)]


def ignores_rows_behind_the_table() -> list[Patch]:
    real = SlotPlaces._walked

    def walked(self: SlotPlaces, slot: int, last_seq: int) -> Places | None:
        places, (entries, is_known) = real(self, slot, last_seq), self._entries(np.array([slot]))
        if places is None or not is_known[0]:
            return places
        counted = int(entries["frames"][0])
        return places[0][:counted], places[1][:counted]

    return [instead(SlotPlaces, "_walked", walked)]


def mirrors_pass_over_gaps() -> list[Patch]:
    def following(self: FrameBundle, next_seq: int, limit: int | None) -> FrameBundle:
        first, last = int(self.seqs.searchsorted(next_seq)), len(self)
        if limit is not None:
            last = int(self.seqs.searchsorted(limit, side="right"))
        return self.part(first, last)

    return [instead(FrameBundle, "following", following)]


def zeros_are_of_deleted_segments() -> list[Patch]:
    real = rows.flawed_rows

    def flawed(found: NDArray[Any]) -> NDArray[np.bool_]:
        are_zeros = ~np.array([any(row.tobytes()) for row in found], np.bool_)
        return real(found) & ~are_zeros

    return [instead(rows, "flawed_rows", flawed)]


def unreadable_is_lost() -> list[Patch]:
    def is_waited_for(self: DamagedFrame, now_ms: int) -> bool:
        return bool(self.seq < 0 > now_ms)

    return [instead(DamagedFrame, "is_waited_for", is_waited_for)]


def unreadable_rows_are_lost() -> list[Patch]:
    def waited_for(*_: object) -> SeqSet:
        return NO_SEQS

    return [instead(UnreadableRows, "waited_for", waited_for)]


def finished_is_lost() -> list[Patch]:
    real = given_up.look_at

    def look_at(*arguments: Any, floor: int, **more: Any) -> given_up.Looked:
        return real(*arguments, floor=min(0, floor), **more)

    return [everywhere(real, look_at)]


def written_is_held() -> list[Patch]:
    real = MirrorWheel._mend

    def mend(self: MirrorWheel, copy: FrameCopy) -> bool:
        real(self, copy)
        self._missing.remove(SeqSet.of([copy.seq]))
        return True

    return [instead(MirrorWheel, "_mend", mend)]


def missing_segments_are_finished() -> list[Patch]:
    def lost_behind(*_: object, **__: object) -> None:
        return None

    return [instead(recover, "lost_behind", lost_behind)]


def slots_of_unread_rows_are_unknown() -> list[Patch]:
    real, looked = MirrorWheel._read_index, places.returned

    def read_index(self: MirrorWheel) -> Steps[None]:
        head = self._table.head
        self._table.head = head._replace(holes=NO_SEQS)
        try:
            yield from real(self)
        finally:
            self._table.head = head

    def returned(index: IndexReader, holes: SeqSet) -> Returned:
        return looked(index, holes)._replace(slots=frozenset())

    return [
        instead(MirrorWheel, "_read_index", read_index),
        instead(table_writer, "returned", returned),
    ]


def segments_stay() -> list[Patch]:
    def move(*_: object, **_options: object) -> None:
        pass

    return [instead(module, "move_rows", move) for module in (found_rows, mirror, restoring)]


def slot_files_stay() -> list[Patch]:
    def move(*_: object) -> list[int]:
        return []

    return [instead(MirrorWheel, "_move", move)]


def deleted_segments_are_not_noted() -> list[Patch]:
    def note_first(*_: object) -> None:
        pass

    return [
        instead(OriginWheel, "_note_first", note_first),
        instead(CopyMedium, "note_first", note_first),
    ]


def a_closed_wheel_is_swept() -> list[Patch]:
    def delete_finished(self: OriginWheel, undeletable: Undeletable) -> Iterator[int | None]:
        yield from delete_slots_below(self._disk, self._folder, self._floor, undeletable)
        for _ in self._index.delete_below(self._floor, self._note_first, undeletable):
            yield None

    return [instead(OriginWheel, "delete_finished", delete_finished)]


def searched_once() -> list[Patch]:
    real = restoring.restoring

    def searched(
        disk: Disk, folder: Path, wheel: WheelId, seqs: SeqSet, **options: Any
    ) -> Steps[Restored]:
        restored = yield from real(disk, folder, wheel, seqs, **options)
        return restored._replace(nowhere=seqs, unread_slot=-1)

    return [everywhere(real, searched)]


def fences_are_answered() -> list[Patch]:
    return [instead(Verifying, "bears_on", lambda *_: False)]


def complete_while_it_verifies() -> list[Patch]:
    real = OwnHeartbeat.heartbeat

    def heartbeat(self: OwnHeartbeat) -> Heartbeat:
        return replace(real(self), complete=self._known.is_complete)

    return [instead(OwnHeartbeat, "heartbeat", heartbeat)]


def holds_what_was_taken() -> list[Patch]:
    real = holding.held_prefix

    def held_prefix(state: Any, wheel: Any, heartbeat: Heartbeat) -> int:
        taken = 0 if state.progress is None else state.progress.seq(wheel)
        return (
            max(taken, real(state, wheel, heartbeat))
            if wheel in heartbeat.verifying
            else real(state, wheel, heartbeat)
        )

    return [everywhere(real, held_prefix)]


def starts_do_not_wait() -> list[Patch]:
    return [instead(copies, "UNREADABLE_WAIT_MS", 0)]


WHEEL: dict[str, Mutant] = {
    "what cannot be read is lost": Mutant(
        "a frame that the medium does not return for a moment is given up like a damaged one",
        unreadable_is_lost,
        "committed to be lost|progress is ahead|never delivered",
        ("unreadable_alone",),
    ),
    "rows that cannot be read are lost": Mutant(
        "a frame whose row the medium does not return for a moment is given up like a damaged one",
        unreadable_rows_are_lost,
        "committed to be lost",
        ("unreadable_rows_of_the_past",),
    ),
    "what is finished is lost": Mutant(
        "a leader gives up frames whose seconds are finished, since their files are deleted",
        finished_is_lost,
        "committed to be lost",
        ("unreadable_rows_of_the_past",),
    ),
    "what was written is held": Mutant(
        "a frame counts as repaired although the medium does not return what was written",
        written_is_held,
        "for a medium that others do not need",
        ("unreadable_leader",),
    ),
    "a missing segment is finished": Mutant(
        "a start takes an index segment that the medium has lost for one that was deleted",
        missing_segments_are_finished,
        "committed to be lost|progress is ahead|never delivered",
        ("segment_gone_alone",),
    ),
    "slots of rows counted unread are unknown": Mutant(
        "rows that were unreadable when the slot table counted them have no slot for ever",
        slots_of_unread_rows_are_unknown,
        "progress is ahead|never delivered",
        ("counted_while_unreadable",),
    ),
    "deleted segments are not noted": Mutant(
        "finished segments of an index are deleted, and no checkpoint says so before",
        deleted_segments_are_not_noted,
        "committed to be lost",
        ("deleted_segments",),
    ),
    "a closed wheel is swept": Mutant(
        "an origin that is closed goes on deleting its segments, which its copy does not note",
        a_closed_wheel_is_swept,
        "committed to be lost",
        ("closed_while_it_is_swept",),
    ),
    "lost rows are looked for once": Mutant(
        "a row is not restored any more once a search found its slot file unreadable",
        searched_once,
        "are pending",
        ("restored_later",),
    ),
    "rows that are not taken stay lost": Mutant(
        "an index segment stays where the medium neither returns nor takes rows of it",
        segments_stay,
        "are pending",
        ("worn_rows", "worn_rows_alone"),
    ),
    "a slot file stays on a bad page": Mutant(
        "a slot file stays where the medium neither returns a page nor takes one frame of it",
        slot_files_stay,
        "not drained .* lacks",
        ("refused_page",),
    ),
    "a zeroed row passes for a deleted one": Mutant(
        "a start takes the zeros that a crash left of a repair for the row of a deleted segment",
        zeros_are_of_deleted_segments,
        "progress is ahead|never delivered",
        ("crashed_repair",),
    ),
    "a gap is passed over": Mutant(
        "a mirror takes frames as the next ones whatever is left out before them",
        mirrors_pass_over_gaps,
        "than its origin wrote",
        ("links",),
    ),
    "a second is what its file holds": Mutant(
        "neither slot table nor index is asked whether a frame is missing in a slot's file",
        trusts_the_file,
        "progress is ahead|never delivered|pending",
        ("deleted_copy", "bad_copy", "deleted_slot"),
    ),
    "a second ends at a gap": Mutant(
        "the frame of a hole is not sought behind what is no frame in a slot's file",
        walks_end_at_gaps,
        "progress is ahead|never delivered",
        ("zeroed_index_behind_a_gap",),
    ),
    "a second is what the slot table counts": Mutant(
        "frames whose rows came after the last refresh are passed over",
        ignores_rows_behind_the_table,
        "progress is ahead|never delivered|pending|is reported not found",
        ("calm",),
    ),
    "a wheel ends where it can be read": Mutant(
        "a start does not wait for slot files that say where a wheel ends whose last rows are lost",
        starts_do_not_wait,
        "is closed at .* acknowledged were",
        ("segment_gone_unreadable",),
    ),
    "a fence is answered while it verifies": Mutant(
        "a member answers a fence by what it has found so far of what it ever took",
        fences_are_answered,
        "closed at|was never delivered|beyond",
        ("unverified_answer",),
    ),
    "complete while it verifies": Mutant(
        "a member that does not know its wheels yet counts as one that has nothing of them",
        complete_while_it_verifies,
        "reported not found",
        ("unverified_answer",),
    ),
    "a recovery forgets its last row": Mutant(
        "a lone node takes an acknowledged frame for one that it had not finished",
        recovery_forgets,
        "was never delivered|committed to be lost|is closed at|beyond|wrote|above",
        ("churn",),
        nodes=1,
    ),
    "holds what it verifies": Mutant(
        "a leader takes what its node found in its folder for what it held before",
        holds_what_was_taken,
        "progress is ahead|was never delivered|delivered twice|twice|pending",
        ("unverified_leader",),
    ),
}
