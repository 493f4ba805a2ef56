"""Keeps an index small and quick, beside the query: merges, takes in the ledger, deletes.

| what | when |
|---|---|
| batches that no merge has yet, of any hour | are 60, so that a search opens few files |
| all of an hour, into one set | the hour is over, and has more than one file that counts |
| the ledger's rows of an hour | it is over by ten minutes; what comes later, when it is there |
| what counts no more | is deleted once a minute has passed, in which searches may have it open |
| hours older than `--keep` | are deleted |

Each step leaves an index that counts each event once (`layout.py`), so one that fails is tried
again, and a crash anywhere costs the step's work. An hour that cannot be merged, as a file of it is
damaged or of a later release, stays as it is, and keeps nothing else from being done.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from delaywheel_audit.sources.ledger_files import (
    LedgerFolder,
    LedgerRead,
    LedgerUnreadableError,
    Listing,
)
from delaywheel_trace.index.events import (
    GROUP_ROWS,
    of_ledger,
    places_in_seqs,
    with_all_columns,
)
from delaywheel_trace.index.folder import UNREACHED, IndexFolder, IndexUnreadableError
from delaywheel_trace.index.layout import (
    HOUR_MS,
    MOST_SPANS,
    AcceptedFile,
    BatchFile,
    EventFile,
    Layout,
    MergedFile,
    hour_name,
    parse_path,
    seconds_of,
    spans_of,
)
from delaywheel_trace.job.health import IndexHealth, say
from delaywheel_trace.job.sorting import PART_ROWS, Part, Unsorted, sorted_parts

_TICK_S: Final = 5.0
_MANY_BATCHES: Final = 60
_OPEN_MS: Final = 120_000
"""How long after its end an hour may still get batches that were planned in it."""
_LEDGER_OPEN_MS: Final = 600_000
_LEDGER_LOOK_S: Final = 300.0
_GRACE_S: Final = 60.0
_AGAIN_S: Final = 60.0
"""After this an hour that could not be merged is tried again: reading it may take long."""
_MOST_FAILURES: Final = 3
"""Are named at once."""
_STOP_S: Final = 10.0
_POLITE: Final = 10
"""Of this thread: batches are not to wait for a merge."""


class IndexKeeper:
    """Does the steps on a thread of its own, one after another."""

    def __init__(
        self,
        folder: IndexFolder,
        ledger: LedgerFolder,
        cluster: str,
        keep_ms: int,
        health: IndexHealth,
    ) -> None:
        self._folder = folder
        self._ledger = ledger
        self._cluster = cluster
        self._keep_ms = keep_ms
        self._health = health
        self._stale_since: dict[str, float] = {}
        self._failed_s: dict[int, float] = {}
        self._looked_s = float("-inf")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        """Starts; what a crash has left half-written is deleted first."""
        self._folder.clear_aside()
        self._thread.start()

    def stop(self) -> None:
        """Stops; a merge that is far is given up."""
        self._ended.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _POLITE)
        said_s = float("-inf")
        while not self._ended.wait(_TICK_S):
            try:
                self.step(int(time.time() * 1000))
            except (*UNREACHED, IndexUnreadableError, LedgerUnreadableError) as error:
                if not self._ended.is_set() and time.monotonic() - said_s > _GRACE_S:
                    say(f"not merged, and tried again: {error}")
                    said_s = time.monotonic()

    def step(self, now_ms: int) -> None:
        """Does what is to be done now."""
        layout = self._listed()
        self._delete_old(layout, now_ms)
        self._delete_stale(layout)
        failures = self._merge_hours(layout, now_ms)
        if time.monotonic() - self._looked_s > _LEDGER_LOOK_S:
            self._take_ledger(layout, now_ms)
            self._looked_s = time.monotonic()
        if failures:
            raise IndexUnreadableError("; ".join(failures))

    def _listed(self) -> Layout:
        """Returns what is there: with a batch, all before it.

        A listing in whose midst two batches appear may have the later one alone. What was there
        before it began it has: so there are two, and the second is believed as far as the first.
        """
        seen: dict[str, int] = {}
        for path in self._folder.paths():
            if isinstance(file := parse_path(path), BatchFile):
                seen[file.query] = max(file.batch, seen.get(file.query, -1))

        def is_sure(path: str) -> bool:
            file = parse_path(path)
            return not isinstance(file, BatchFile) or file.batch <= seen.get(file.query, -1)

        return Layout.of(filter(is_sure, self._folder.paths()))

    # --- what is deleted

    def _delete_old(self, layout: Layout, now_ms: int) -> None:
        oldest_ms = now_ms - self._keep_ms
        events: Iterable[EventFile] = (*layout.counting, *layout.stale)
        for hour_ms in sorted({f.hour_ms for f in events if f.hour_ms + HOUR_MS < oldest_ms}):
            self._folder.delete_folder(hour_name(hour_ms))
        for bad in layout.bad:
            if bad.hour_ms + HOUR_MS < oldest_ms:
                self._folder.delete(bad.path)
        for gap in layout.gaps:
            if gap.to_ms < oldest_ms:
                self._folder.delete(gap.path)

    def _delete_stale(self, layout: Layout) -> None:
        now_s = time.monotonic()
        self._stale_since = {
            file.path: self._stale_since.get(file.path, now_s) for file in layout.stale
        }
        for path, since_s in self._stale_since.items():
            if now_s - since_s >= _GRACE_S:
                self._folder.delete(path)

    # --- what is merged

    def _merge_hours(self, layout: Layout, now_ms: int) -> list[str]:
        """Merges what is to be merged; returns which hours could not be, and why."""
        hours = sorted({file.hour_ms for file in layout.counting})
        self._failed_s = {hour: at for hour, at in self._failed_s.items() if hour in hours}
        failures = []
        for hour_ms in hours:
            if time.monotonic() - self._failed_s.get(hour_ms, float("-inf")) < _AGAIN_S:
                continue
            try:
                self._merge_hour(layout, hour_ms, now_ms)
            except (*UNREACHED, IndexUnreadableError) as error:
                self._failed_s[hour_ms] = time.monotonic()
                failures.append(f"{hour_name(hour_ms)}: {error}")
        return failures[:_MOST_FAILURES]

    def _merge_hour(self, layout: Layout, hour_ms: int, now_ms: int) -> None:
        inputs = [f for f in layout.inputs(hour_ms) if len(f[0].spans) < MOST_SPANS]
        if hour_ms + HOUR_MS + _OPEN_MS < now_ms:
            wanted = inputs
            is_due = len(inputs) > 1 or any(isinstance(f, BatchFile) for f in _flat(inputs))
        else:
            wanted = [files for files in inputs if isinstance(files[0], BatchFile)]
            is_due = len(wanted) >= _MANY_BATCHES
        if is_due:
            merged = set(_flat(wanted))
            others = [f for f in _flat(layout.inputs(hour_ms)) if f not in merged]
            others += [f for f in layout.broken if f.hour_ms == hour_ms]
            self._merge(hour_ms, wanted, others)

    def _merge(
        self,
        hour_ms: int,
        wanted: Sequence[list[BatchFile | MergedFile]],
        others: Sequence[BatchFile | MergedFile],
    ) -> None:
        """Merges files of an hour: as many as one name takes."""
        files = [*wanted]
        left = [*others]
        while len(spans := spans_of(_flat(files), left)) > MOST_SPANS:
            left += files.pop()
        if len(files) == 1 and isinstance(files[0][0], MergedFile):
            return
        with self._folder.room() as room:
            parts = sorted_parts(self._unsorted([f.path for f in _flat(files)]), room)
            count = len(parts)
            named = [
                MergedFile(hour_ms, spans, n, count, *seconds_of(p.earliest_ms, p.latest_ms)).path
                for n, p in enumerate(parts, 1)
            ]
            self._place(parts, named)
        self._merged()

    def _unsorted(self, paths: Sequence[str]) -> Unsorted:
        """Returns the rows of files of the index."""

        def files() -> Iterator[pq.ParquetFile]:
            for path in paths:
                with self._folder.filesystem.open_input_file(self._folder.full(path)) as source:
                    with _named(path):
                        file = pq.ParquetFile(source)
                    yield file

        def groups(columns: list[str] | None) -> Iterator[pa.Table]:
            for path, file in zip(paths, files(), strict=True):
                for number in range(file.num_row_groups):
                    self._go_on()
                    with _named(path):
                        rows = file.read_row_group(number, columns=columns, use_threads=False)
                        rows = rows if columns else with_all_columns(rows)
                    yield rows

        return Unsorted(
            sum(file.metadata.num_rows for file in files()),
            lambda: (chunk for table in groups(["id"]) for chunk in table["id"].chunks),
            lambda: groups(None),
        )

    def _place(self, parts: Sequence[Part], paths: Sequence[str]) -> None:
        """Puts parts in place; the set counts from the last one on."""
        for part, path in zip(parts, paths, strict=True):
            self._folder.put_file(path, part.file)

    def _go_on(self) -> None:
        if self._ended.is_set():
            raise InterruptedError("the job ends")

    # --- the ledger

    def _take_ledger(self, layout: Layout, now_ms: int) -> None:
        """Takes in files of the ledger that are not in the index yet, the newest hours first."""
        taken: dict[tuple[int, str], list[AcceptedFile]] = {}
        for known in layout.counting:
            if isinstance(known, AcceptedFile):
                taken.setdefault((known.hour_ms, known.wheel), []).append(known)
        oldest_ms = now_ms - self._keep_ms
        new = []
        for read in self._ledger.listing().reads_of_files():
            (file,) = read.files
            if oldest_ms <= file.hour_ms < now_ms - HOUR_MS - _LEDGER_OPEN_MS:
                behind = [
                    one.last_seq
                    for one in taken.get((file.hour_ms, str(file.wheel)), ())
                    if one.first_seq <= file.last_seq and file.first_seq <= one.last_seq
                ]
                if (behind_seq := max([read.behind_seq, *behind])) < file.last_seq:
                    new.append(LedgerRead((file,), behind_seq))
        new.sort(key=lambda read: (-read.files[0].hour_ms, read.files[0]))
        for run in _runs(new):
            self._take(run)
            if self._ended.is_set():
                return

    def _take(self, run: Sequence[LedgerRead]) -> None:
        first, last = run[0].files[0], run[-1].files[0]
        first_seq = max(first.first_seq, run[0].behind_seq + 1)
        file = AcceptedFile(first.hour_ms, str(first.wheel), first_seq, last.last_seq)

        def tables() -> Iterator[pa.Table]:
            for read in run:
                rows = self._ledger.rows(read)
                places = places_in_seqs(rows)
                for at in range(0, len(rows), GROUP_ROWS):
                    self._go_on()
                    end = at + GROUP_ROWS
                    yield of_ledger(rows.slice(at, GROUP_ROWS), places[at:end], self._cluster)

        def ids() -> Iterator[Any]:
            return (c for read in run for c in self._ledger.rows(read)["id"].chunks)

        rows = Listing(read.files[0] for read in run).rows_guess
        with self._folder.room() as room:
            parts = sorted_parts(Unsorted(min(rows, PART_ROWS), ids, tables), room)
            self._place(parts, [file.path])
        self._merged()

    def _merged(self) -> None:
        pa.default_memory_pool().release_unused()
        self._health.merged()


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Says of which file it is what pyarrow says of a content."""
    try:
        yield
    except pa.ArrowException as error:
        raise IndexUnreadableError(f"{path}: {error}") from error


def _flat(groups: Iterable[list[BatchFile | MergedFile]]) -> list[BatchFile | MergedFile]:
    return list(chain.from_iterable(groups))


def _runs(reads: Iterable[LedgerRead]) -> Iterator[list[LedgerRead]]:
    """Returns files that follow one another, of one wheel and hour, as many as make one file."""
    run: list[LedgerRead] = []
    for read in reads:
        (file,) = read.files
        if run:
            last = run[-1].files[0]
            is_next = (last.hour_ms, last.wheel) == (file.hour_ms, file.wheel)
            follows = max(file.first_seq, read.behind_seq + 1) == last.last_seq + 1
            size = Listing(r.files[0] for r in (*run, read)).rows_guess
            if not (is_next and follows and size <= PART_ROWS):
                yield run
                run = []
        run.append(read)
    if run:
        yield run
