"""Publishes the ledger: sealed rows, as Parquet, to any pyarrow file system.

What is published is known from the names there (``place.py``) and from a note of the node's own
(``notes.py``); rows that are missing locally (after a restart, on a full disk, of another node's
wheel) are read again from the frames. Each wheel is processed in order, so its names follow one
another without hole or overlap, whatever is interrupted. Which wheels this node publishes, and how
far, is in ``assignment.py``.

A frame counts as published once a file or a gap with its seq is in place, or when everything before
it is published and it has no rows (cancels become part of the next file's range). Then it is
reported to the machine, which reports it to all nodes: the floor waits for it. What was reported is
noted by every node that holds the wheel, so that it is still known after all were stopped.

A wheel is published from here on:

=============================  =====================================================================
its names here, or its notes   behind them; in a place of this node alone, also behind what was
                               reported, which then is in the place of another node
none                           behind what was reported, or lies below the floor: the floor passes
                               only what was published or given up
=============================  =====================================================================

What is gone, or lost, behind the names of a place that nodes share is a gap: otherwise it would be
in place.

========================================  ========================================================
while the place does not answer           then
========================================  ========================================================
and the disk has room                     rows and frames are kept: the floor waits
and the disk is at its reserve            what is publishable is given up: the gap is noted here,
                                          durably, and counts as published; the floor moves on
and it answers again                      gaps go there first, then the rows after them
========================================  ========================================================
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import Disk
from delaywheel_replica.hiding import shown
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.ledger.assignment import Publishable
from delaywheel_replica.server.ledger.notes import Gap, GapReason, Notes
from delaywheel_replica.server.ledger.pages import LedgerPages
from delaywheel_replica.server.ledger.place import UNREACHED, LedgerStorage
from delaywheel_replica.server.ledger.retention import Retention
from delaywheel_replica.server.ledger.rows import Ledger, rows_folder
from delaywheel_replica.server.ledger.source import LedgerSource, UnreadableFrame
from delaywheel_replica.server.node.node_view import wall_ms

_RETRY_S: Final = 5.0
_PATIENCE_S: Final = 10.0
"""A shorter failure of the place has no consequences: no rows are given up for it."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BooksState:
    """The state of the publication; counts are since the process started.

    Attributes:
        place: Where files are published, without secrets.
        failure: Why the last attempt failed; None: it did not.
        failing_since_ms: Since when every attempt fails, Unix milliseconds.
        gaps: How often rows were given up, plus earlier gaps that are not in place yet.
    """

    place: str
    failure: str | None = None
    failing_since_ms: int | None = None
    gaps: int = 0
    gap_messages: int = 0
    files: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class BooksConfig:
    """The operator's settings of the ledger.

    Attributes:
        seal_seconds: How often rows are sealed and published.
        retention_hours: How long files are kept there; 0: forever.
        full_retention_hours: How long while the disk is full; None: the same.
        is_shared: Other nodes publish at the same place.
    """

    node: str
    uri: str
    seal_seconds: float
    retention_hours: int = 0
    full_retention_hours: int | None = None
    is_shared: bool = False


class PublishingNode(Protocol):
    """What the ledger needs of the node, and reports to it; called on the ledger's thread."""

    def publishable(self) -> Mapping[WheelId, Publishable]:
        """Returns which wheels this node publishes, and how far."""

    def reported(self) -> Mapping[WheelId, int]:
        """Returns every wheel with files here, and up to where any node reported it published."""

    def registered(self) -> Collection[WheelId] | None:
        """Returns the registered wheels; None: they are unknown now."""

    def is_full(self) -> bool:
        """Whether the disk is at its reserve."""

    def published(self, wheel: WheelId, seq: int) -> None:
        """Notes that a wheel is published, or given up, up to a seq."""

    def unreadable(self, wheel: WheelId, seq: int) -> None:
        """Notes that a frame cannot be read that is not known to be lost."""


class Books:
    """Publishes regularly on its own thread, since the place may be far away or gone.

    Of each wheel it knows up to which seq

    | it is | which means |
    |---|---|
    | placed | files and gaps reach it, whoever made them; a gap may still have to be put there |
    | noted | the same by this node's own notes, which outlive the process |
    | needless | this node need not publish it: others have, or it was finished before |
    | reported | the member machine heard that it is published, or given up: the floor may pass |
    """

    def __init__(
        self,
        disk: Disk,
        data: Path,
        ledger: Ledger,
        config: BooksConfig,
        member: PublishingNode,
        *,
        place_at: Callable[[], LedgerStorage] | None = None,
    ) -> None:
        """Does nothing before ``start``; makes the place as `config` says, without `place_at`."""
        self._disk = disk
        self._data = data
        self._ledger = ledger
        self._config = config
        self._member = member
        self._place_at = place_at or self._configured
        self._place: LedgerStorage | None = None
        self._notes = Notes(disk, data)
        self._retention = Retention(
            config.retention_hours,
            registered=member.registered,
            hours_when_full=config.full_retention_hours,
            is_full=member.is_full,
        )
        # For each wheel: up to where names reach, and up to where the machine was informed.
        self._placed: dict[WheelId, int] = {}
        self._reported: dict[WheelId, int] = {}
        # Closed wheels whose names reach their ends, as far as they can.
        self._ended_names: set[WheelId] = set()
        self._files = self._files_found()
        waiting = self._notes.gaps.values()
        self._state = BooksState(
            shown(config.uri), gaps=len(waiting), gap_messages=sum(gap.messages for gap in waiting)
        )
        self._failing_since_s: float | None = None
        # While the thread works: when it last made progress.
        self._moved_s: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="books", daemon=True)

    def state(self) -> BooksState:
        """Returns the state, also while the place hangs. For any thread."""
        state, moved_s = self._state, self._moved_s
        if moved_s is None or state.failure is not None:
            return state
        if self._place is not None:
            moved_s = max(moved_s, self._place.answered_s)
        hanging_s = time.monotonic() - moved_s
        if hanging_s <= _PATIENCE_S:
            return state
        since_ms = wall_ms() - int(hanging_s * 1000)
        return replace(state, failure="does not answer", failing_since_ms=since_ms)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Publishes a last time if the place responds, then ends the thread.

        If the place hangs, the thread ends with the process, which loses and duplicates nothing.
        """
        self._ended.set()
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            _log.warning(
                "the ledger's place does not answer: not waited for", place=self._state.place
            )

    def _run(self) -> None:
        while True:
            wait_s = self._config.seal_seconds
            if not self.work():
                wait_s = min(_RETRY_S, wait_s)
            if self._ended.is_set():
                return
            self._ended.wait(wait_s)

    # --- one go

    def work(self) -> bool:
        """Seals and publishes all rows; returns whether all could be published.

        If not, nothing is lost: the next call continues.
        """
        self._moved_s = time.monotonic()
        try:
            return self._publish_once()
        finally:
            self._moved_s = None

    def _publish_once(self) -> bool:
        # Before sealing: what is held now has its rows in the files sealed then.
        wheels = self._member.publishable()
        for wheel, path in self._ledger.seal():
            self._files.setdefault(wheel, []).append(path)
        for wheel in wheels:
            self._report(wheel, self._noted(wheel))
        self._remind()
        try:
            self._work(wheels)
        except UNREACHED as error:
            self._failed(str(error).replace(self._config.uri, self._state.place))
            try:
                self._give_up(wheels)
            except OSError as refused:
                _log.warning("rows not given up", error=str(refused))
            return False
        finally:
            self._remember()
        if self._failing_since_s is not None:
            _log.info("ledger published again", place=self._state.place)
        self._failing_since_s = None
        self._state = replace(self._state, failure=None, failing_since_ms=None)
        return True

    def _work(self, wheels: Mapping[WheelId, Publishable]) -> None:
        if self._place is None:
            self._place = self._place_at()
        place = self._place
        place.reach()
        self._retention.look(place, wall_ms())  # first: it may make room for what follows
        self._put_gaps(place)
        open_ends = {w: p for w, p in wheels.items() if p.last_seq > self._reported.get(w, 0)}
        self._look_at_names(place, open_ends)
        for wheel, found in open_ends.items():
            self._publish(place, wheel, found)
        self._name_ends(place, wheels)
        if not self._member.is_full():
            self._notes.take_ballast()

    def _name_ends(self, place: LedgerStorage, wheels: Mapping[WheelId, Publishable]) -> None:
        """Puts an empty file in place for the cancels at the end of each closed wheel.

        So names that end before a closed wheel does prove that a file is missing.
        """
        ended = {
            wheel: found
            for wheel, found in wheels.items()
            if found.is_whole
            and wheel not in self._ended_names
            and self._reported.get(wheel, 0) >= found.last_seq
        }
        names = place.newest({w: found.born_ms for w, found in ended.items()}) if ended else {}
        for wheel, found in ended.items():
            first_seq = names.get(wheel, 0) + 1
            if first_seq <= found.last_seq and self._has_no_rows(wheel, first_seq, found):
                place.begin().close()
                place.put_file(wheel, first_seq, found.last_seq, wall_ms())
            self._ended_names.add(wheel)

    def _has_no_rows(self, wheel: WheelId, first_seq: int, found: Publishable) -> bool:
        """Whether no file has these frames because they have no messages."""
        source = self._source(wheel)
        finished_to = 0
        if self._config.is_shared:  # the floor passed them: if they had rows, a name would show it
            finished_to = source.finished_to(first_seq, found.floor, found.lost.seqs(wheel))
        first_seq = max(first_seq, finished_to + 1)
        return first_seq > found.last_seq or not source.may_have_messages(first_seq, found.last_seq)

    def _look_at_names(self, place: LedgerStorage, wheels: Mapping[WheelId, Publishable]) -> None:
        """Reads the published names of a wheel; if no other node publishes it, they are cached."""
        asked = {
            wheel: found.born_ms
            for wheel, found in wheels.items()
            if wheel not in self._placed or not found.is_sole
        }
        names = place.newest(asked) if asked else {}
        for wheel in asked:
            known = max(names.get(wheel, 0), self._noted(wheel), self._placed.get(wheel, 0))
            self._placed[wheel] = self._passed_over(wheel, known, wheels[wheel])

    def _passed_over(self, wheel: WheelId, known: int, found: Publishable) -> int:
        """Returns up to where a wheel is done with, if names and notes reach up to `known`."""
        if known and self._config.is_shared:
            return known
        return max(known, self._needless(wheel, known + 1, found))

    def _needless(self, wheel: WheelId, first_seq: int, found: Publishable) -> int:
        """Returns up to where nothing needs to be published here, as far as that is known."""
        finished = self._source(wheel).finished_to(first_seq, found.floor, found.lost.seqs(wheel))
        reported = max(found.reported_seq, self._notes.reported.get(wheel, 0))
        return min(found.last_seq, max(reported, finished))

    def _noted(self, wheel: WheelId) -> int:
        """Returns up to where notes say that it is published, or given up."""
        gap = self._notes.gaps.get(wheel)
        return self._notes.placed(wheel) if gap is None else gap.last_seq

    def _publish(self, place: LedgerStorage, wheel: WheelId, found: Publishable) -> None:
        pages = LedgerPages(
            place,
            wheel,
            self._placed[wheel] + 1,
            node=self._config.node,
            born_ms=found.born_ms,
            now_ms=wall_ms(),
            on_file=lambda last_seq, rows: self._filed(wheel, last_seq, rows),
            on_gap=lambda gap: self._gapped(wheel, gap),
        )
        source = self._source(wheel)
        last_seq, gone_to = found.last_seq, 0
        try:
            for piece in source.blocks(self._placed[wheel] + 1, last_seq):
                self._moved_s = time.monotonic()
                if isinstance(piece, UnreadableFrame) and (wheel, piece.seq) not in found.lost:
                    if piece.seq > gone_to:
                        gone_to = self._needless(wheel, piece.seq, found)
                    if piece.seq > gone_to:
                        # Another member may have it: it is fetched, or declared lost.
                        self._member.unreadable(wheel, piece.seq)
                        last_seq = piece.seq - 1
                        break
                pages.add(piece)
            pages.finish(last_seq)
        finally:
            pages.abandon()
        self._report(wheel, last_seq)
        self._delete_files(wheel, source.files_up_to(self._placed[wheel]))

    def _filed(self, wheel: WheelId, last_seq: int, rows: int) -> None:
        state = self._state
        self._state = replace(state, files=state.files + 1, rows=state.rows + rows)
        self._note_placed(wheel, last_seq)

    def _gapped(self, wheel: WheelId, gap: Gap) -> None:
        self._count(gap)
        self._note_placed(wheel, gap.last_seq)

    def _note_placed(self, wheel: WheelId, seq: int) -> None:
        self._placed[wheel] = seq
        self._notes.place(wheel, seq)
        self._report(wheel, seq)

    def _report(self, wheel: WheelId, seq: int) -> None:
        if seq > self._reported.get(wheel, 0):
            self._reported[wheel] = seq
            self._member.published(wheel, seq)

    # --- gaps

    def _put_gaps(self, place: LedgerStorage) -> None:
        """Puts gaps in place, except where another node has published the rows."""
        gaps = dict(self._notes.gaps)
        names = place.newest({w: gap.accepted_from_ms for w, gap in gaps.items()}) if gaps else {}
        for wheel, gap in gaps.items():
            placed = names.get(wheel, 0)
            if placed < gap.last_seq:
                place.put_gap(replace(gap, first_seq=max(placed + 1, gap.first_seq)))
            self._note_placed(wheel, max(placed, gap.last_seq))

    def _give_up(self, wheels: Mapping[WheelId, Publishable]) -> None:
        """Gives up the rows at hand, so that later ones can be published."""
        assert self._failing_since_s is not None
        if time.monotonic() - self._failing_since_s < _PATIENCE_S or not self._member.is_full():
            return
        for wheel, found in wheels.items():
            if found.last_seq > self._reported.get(wheel, 0):
                self._give_up_wheel(wheel, found)

    def _give_up_wheel(self, wheel: WheelId, found: Publishable) -> None:
        known = max(self._placed.get(wheel, 0), self._noted(wheel))
        known = self._passed_over(wheel, known, found)
        source = self._source(wheel)
        gap = self._gap(source, wheel, known + 1, found.last_seq)
        if gap.messages:
            self._notes.give_up(gap)
            self._placed[wheel] = gap.last_seq
            self._count(gap)
            self._delete_files(wheel, source.files_up_to(gap.last_seq))
        self._report(wheel, found.last_seq)

    def _gap(self, source: LedgerSource, wheel: WheelId, first_seq: int, last_seq: int) -> Gap:
        """Returns what would be missing, counted from the rows."""
        now_ms = wall_ms()
        messages, from_ms, to_ms = 0, now_ms, 0
        for piece in source.blocks(first_seq, last_seq):
            if isinstance(piece, UnreadableFrame):
                messages += piece.messages
            elif len(piece):
                messages += len(piece)
                from_ms = min(piece.accepted_at_ms, from_ms)
                to_ms = max(piece.accepted_at_ms, to_ms)
        return Gap(
            wheel=wheel,
            first_seq=first_seq,
            last_seq=last_seq,
            accepted_from_ms=from_ms,
            accepted_to_ms=to_ms or now_ms,
            messages=messages,
            reason=GapReason.DISK_RESERVE,
            node=self._config.node,
            recorded_at_ms=now_ms,
        )

    def _count(self, gap: Gap) -> None:
        state = self._state
        self._state = replace(
            state, gaps=state.gaps + 1, gap_messages=state.gap_messages + gap.messages
        )
        _log.error(
            "gap in the ledger",
            wheel=str(gap.wheel),
            first_seq=gap.first_seq,
            last_seq=gap.last_seq,
            messages=gap.messages,
            reason=gap.reason.value,
        )

    def _failed(self, failure: str) -> None:
        if self._failing_since_s is None:
            self._failing_since_s = time.monotonic()
            self._state = replace(self._state, failing_since_ms=wall_ms())
        self._state = replace(self._state, failure=failure)
        _log.warning("ledger not published", place=self._state.place, error=failure)

    # --- local rows

    def _configured(self) -> LedgerStorage:
        staging = self._data / "ledger" / "upload.parquet"
        return LedgerStorage(self._config.uri, node=self._config.node, staging=staging)

    def _source(self, wheel: WheelId) -> LedgerSource:
        return LedgerSource(self._disk, self._data, wheel, self._files.get(wheel, []))

    def _delete_files(self, wheel: WheelId, files: Collection[Path]) -> None:
        """Deletes local files; one that cannot be deleted goes with the folder of its wheel."""
        for path in files:
            try:
                self._disk.delete(path)
            except OSError as error:
                _log.warning("file cannot be deleted", path=str(path), error=str(error))
            self._files[wheel].remove(path)

    def _files_found(self) -> dict[WheelId, list[Path]]:
        found = {}
        for name in self._disk.list_folder(rows_folder(self._data)):
            folder = rows_folder(self._data) / name
            paths = [folder / each for each in self._disk.list_folder(folder)]
            found[WheelId.parse(name)] = sorted(paths, key=lambda path: int(path.stem))
        return found

    def _remind(self) -> None:
        """Reports again what was reported before nodes were restarted."""
        reported = self._member.reported()
        for wheel, seq in self._notes.reported.items():
            if seq > reported.get(wheel, seq):
                self._member.published(wheel, seq)

    def _remember(self) -> None:
        """Notes what any node reported, and forgets wheels that are gone."""
        reported = self._member.reported()
        for wheel in [wheel for wheel in self._files if wheel not in reported]:
            try:
                self._disk.delete_folder(rows_folder(self._data, wheel))
            except OSError as error:  # the next start tries again
                _log.warning("ledger rows not deleted", wheel=str(wheel), error=str(error))
            del self._files[wheel]
        for known in (self._placed, self._reported):
            for wheel in known.keys() - reported.keys():
                del known[wheel]
        own = self._reported
        try:
            self._notes.keep({w: max(seq, own.get(w, 0)) for w, seq in reported.items()})
        except OSError as error:
            _log.warning("reports of published frames not noted", error=str(error))
