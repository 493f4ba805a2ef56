"""Searches indexes, by a process of its own, and knows how much of them that was."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from delaywheel.trace.sampling import Sampling
from delaywheel_trace.index.events import IDENTITY, SCHEMA
from delaywheel_trace.index.folder import IndexFolder, IndexUnreadableError
from delaywheel_trace.index.layout import (
    CLOCKS_DIFFER_MS,
    HOUR_MS,
    AcceptedFile,
    BatchFile,
    EventFile,
    Gap,
    Layout,
    hour_name,
)

CHUNK_FILES: Final = 64
"""So many files are searched at once; what was found is known after each."""
_LISTINGS: Final = 3
"""Files that are gone were merged: the folder is listed again, so often."""
END_MS: Final = 1 << 62
_TYPES: Final = {
    "string": "VARCHAR",
    "int64": "BIGINT",
    "double": "DOUBLE",
    "fixed_size_binary[16]": "BLOB",
}
COLUMNS: Final = {field.name: _TYPES[str(field.type)] for field in SCHEMA}
"""Of events, with their types as DuckDB names them."""


@dataclass(slots=True)
class Missing:
    """A part of the answer that is not there.

    Attributes:
        part: An index, one of its files, or `nodes`.
    """

    part: str
    reason: str
    message: str


@dataclass(slots=True)
class SearchedIndex:
    """How much of one index was searched.

    Attributes:
        uri: Where it is.
        from_ms: The beginning of the time whose files were searched; None: it has no file.
        to_ms: Its end.
        files: How many were to be searched.
        gaps: Times in it that were never read.
        bad: How many records of it could not be read when they came.
        ledger_to_ms: How far it has rows of the ledger; None: it has none.
        arrived_ms: The end of the hour in which the last of its events arrived that were searched.
        newest_ms: The time of its newest event, as far as clocks are believed; None: unknown.
        shares: Clients that trace a share of ways only, with that; None: unknown, as a search
            that was cut has not asked.
        dropped: How many events reporters have dropped; None: unknown.
    """

    uri: str
    from_ms: int | None = None
    to_ms: int | None = None
    files: int = 0
    gaps: Sequence[Gap] = ()
    bad: int = 0
    ledger_to_ms: int | None = None
    arrived_ms: int = 0
    newest_ms: int | None = None
    shares: dict[str, float] | None = None
    dropped: int | None = None

    def would_have(self, id_: str) -> bool:
        """Whether a way that began in its time with this id would be in it."""
        if self.gaps or self.bad or self.dropped != 0:
            return False
        if self.newest_ms is None or self.shares is None:
            return False
        return all(_is_sampled(id_, one) for one in self.shares.values())


@dataclass(slots=True)
class SearchedIndexes:
    """What was found in indexes.

    Attributes:
        events: By their columns, with `index`: the place of their index.
        more: There is more than what was wanted.
        cut: Why the search ended before it was done; empty: it was.
    """

    indexes: list[SearchedIndex]
    events: list[dict[str, Any]] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    more: bool = False
    cut: str = ""


def search_indexes(
    uris: Sequence[str],
    question: Mapping[str, Any],
    *,
    window: tuple[int, int] | None,
    limit: int,
    timeout_s: float,
) -> SearchedIndexes:
    """Searches indexes.

    Args:
        uris: Their folders.
        question: `id`, `place` or `having`: see `lookups.Lookups`.
        window: Only files that may have events of this time; None: all.
        limit: Of ways, at most.
        timeout_s: For all of it.
    """
    until_s = time.monotonic() + timeout_s
    for _ in range(_LISTINGS):
        searched, chunks = _listed(uris, window)
        asked = {**question, "limit": limit, "columns": COLUMNS, "identity": IDENTITY}
        asked["arrived_ms"] = [index.arrived_ms for index in searched.indexes]
        request = json.dumps({**asked, "chunks": [chunk.request for chunk in chunks]})
        if not chunks or _looked(searched, chunks, request, until_s - time.monotonic()):
            return searched
    searched.cut = "files were merged again and again while they were searched; try again"
    return searched


@dataclass(frozen=True, slots=True)
class _Chunk:
    index: int
    files: Sequence[EventFile]
    folder: IndexFolder

    @property
    def request(self) -> tuple[int, list[str]]:
        return self.index, [self.folder.full(file.path) for file in self.files]


def _listed(
    uris: Sequence[str], window: tuple[int, int] | None
) -> tuple[SearchedIndexes, list[_Chunk]]:
    """Lists the folders; returns what is to be searched, what arrived last first."""
    searched = SearchedIndexes([])
    chunks: list[_Chunk] = []
    for number, uri in enumerate(uris):
        searched.indexes.append(index := SearchedIndex(uri))
        try:
            folder = IndexFolder(uri)
            layout = folder.listing() if folder.is_local else Layout.of(())
        except IndexUnreadableError as error:
            searched.missing.append(Missing(uri, "INDEX_UNREADABLE", str(error)))
            continue
        if not folder.is_local:
            text = "it is on no file system of this machine: mount it"
            searched.missing.append(Missing(uri, "INDEX_UNREADABLE", text))
            continue
        if not layout.counting:
            text = "no file of an index is there"
            searched.missing.append(Missing(uri, "INDEX_EMPTY", text))
            continue
        files = _files_of(index, layout, window)
        searched.missing += _broken(index, layout)
        chunks += [
            _Chunk(number, files[begin : begin + CHUNK_FILES], folder)
            for begin in range(0, len(files), CHUNK_FILES)
        ]
    return searched, chunks


def _files_of(
    index: SearchedIndex, layout: Layout, window: tuple[int, int] | None
) -> list[EventFile]:
    files = layout.between(*(window or (0, END_MS)))
    hours = [file.hour_ms for file in layout.counting]  # older ones are deleted
    from_ms, to_ms = window or (0, END_MS)
    to_ms = max(hours) + HOUR_MS if to_ms == END_MS else to_ms
    index.from_ms, index.to_ms = max(from_ms, min(*hours, to_ms)), to_ms
    index.files = len(files)
    arrived = (file.hour_ms + HOUR_MS for file in files if not isinstance(file, AcceptedFile))
    index.arrived_ms = max(arrived, default=0)
    index.gaps = layout.gaps_between(index.from_ms, index.to_ms)
    index.bad = layout.bad_between(index.from_ms, index.to_ms)
    index.ledger_to_ms = max(layout.ends_ms().values(), default=None)
    return sorted(files, key=_by_arrival)


def _broken(index: SearchedIndex, layout: Layout) -> Iterator[Missing]:
    """Yields which files somebody has taken away."""
    parts = Counter((one.hour_ms, one.spans, one.parts) for one in layout.broken)
    for (hour_ms, spans, count), there in parts.items():
        if index.from_ms is None or hour_ms + HOUR_MS + CLOCKS_DIFFER_MS > index.from_ms:
            name = f"{index.uri}: {hour_name(hour_ms)}/c-{'+'.join(map(str, spans))}"
            yield Missing(name, "FILE_MISSING", f"{count - there} of its {count} parts are gone")


def _by_arrival(file: EventFile) -> tuple[int, int, str]:
    """Orders files, what arrived last first: an hour's batches before those that were merged."""
    return -file.hour_ms, -file.batch if isinstance(file, BatchFile) else 0, file.path


def _looked(
    searched: SearchedIndexes, chunks: Sequence[_Chunk], request: str, timeout_s: float
) -> bool:
    """Has the process search; False: files were merged meanwhile."""
    process = subprocess.Popen(
        [sys.executable, "-m", "delaywheel_trace.search.lookups"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    is_late = False
    with process:
        try:
            said, failed = process.communicate(request.encode(), max(0.1, timeout_s))
        except subprocess.TimeoutExpired:
            is_late = True
            process.kill()
            said, failed = process.communicate()
        except BaseException:
            process.kill()
            raise
    done: int | None = 0
    for line in said.split(b"\n")[:-1]:  # the last one is empty, or was cut
        ((what, value),) = json.loads(line).items()
        match what:
            case "gone":
                return False
            case "chunk":
                done = value
            case "end":
                done = None
            case _:
                _take(searched, what, value)
    if done is not None:
        searched.cut = _cut_text(chunks, done, is_late=is_late, failed=failed)
    return True


def _take(searched: SearchedIndexes, what: str, value: Any) -> None:
    match what:
        case "row":
            searched.events.append(value)
        case "more":
            searched.more = True
        case "unread":
            number, path, why = value
            name = f"{searched.indexes[number].uri}: {path}"
            searched.missing.append(Missing(name, "FILE_UNREADABLE", why))
        case "told":
            index = searched.indexes[value["index"]]
            index.shares, index.dropped = value["shares"], value["dropped"]
            index.newest_ms = value["newest_ms"]


def _cut_text(chunks: Sequence[_Chunk], done: int, *, is_late: bool, failed: bytes) -> str:
    files = sum(len(chunk.files) for chunk in chunks)
    looked = sum(len(chunk.files) for chunk in chunks[:done])
    if looked == files:
        far = "what was found was not followed to its end"
    else:
        far = f"{looked} of {files} files were searched, those of the latest hours"
    if is_late:
        return f"the time is over: {far}; a longer --timeout, or a range by --from and --to"
    last = failed.decode(errors="replace").strip().splitlines()[-1:] or ["it was ended"]
    return f"the process of the search has failed ({last[0]}): {far}"


def _is_sampled(id_: str, share: float) -> bool:
    """Whether reporters of this share tell of a way, as `Sampling` decides."""
    return Sampling(share).of_others([bytes.fromhex(id_)], []).rows != []
