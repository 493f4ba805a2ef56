"""The files of a published ledger, and what their names prove.

Files and gaps of a wheel follow one another without hole or overlap in seqs. So a hole between
two names is a file that was lost; where names overlap, readers drop the rows that a file before
has already.

Losses before the first name of a wheel, or behind the last, show in no name: retention deletes old
hours, and the newest part may not be published yet. There, only messages in Kafka that no row
mentions are evidence (`Extent`, and `reconcile`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from delaywheel.identity import WheelId
from delaywheel_audit.sources.hiding import without_secrets
from delaywheel_replica.hiding import shown

HOUR_MS: Final = 3_600_000
END_MS: Final = (1 << 62) - 1
"""Later than any time."""

_FILE = re.compile(
    r"(?:.*/)?date=(?P<date>\d{4}-\d{2}-\d{2})/hour=(?P<hour>\d{2})/"
    r"(?P<wheel>[a-z0-9][a-z0-9-]*\.[1-9]\d*)-(?P<first>\d{19})-(?P<last>\d{19})"
    r"(?:-(?P<first_due>\d{10})-(?P<last_due>\d{10}))?\.parquet"
)
_GAP = re.compile(r"(?:.*/)?gaps/(?P<wheel>.+)-(?P<first>\d{19})-(?P<last>\d{19})\.json")
_GLOB = re.compile(r"[\\{}\[\]*?]")
"""What Spark takes for a pattern in a path."""
_ROW_BYTES: Final = 24
"""Of a published row, about: ids do not compress."""


class LedgerUnreadableError(Exception):
    """The ledger, or part of it, cannot be read in its present state."""


@dataclass(frozen=True, slots=True, order=True)
class LedgerFile:
    """A file, as described by its path.

    Attributes:
        wheel: The wheel of its rows.
        first_seq: Its rows have this seq or a greater one.
        last_seq: Or a lesser one.
        hour_ms: They were accepted in this hour, Unix ms of its beginning.
        path: Where it is.
        size: In bytes.
        first_due_ms: All are due then or later.
        end_due_ms: And before.
    """

    wheel: WheelId
    first_seq: int
    last_seq: int
    hour_ms: int
    path: str
    size: int = 0
    first_due_ms: int = 0
    end_due_ms: int = END_MS


@dataclass(frozen=True, slots=True)
class Hole:
    """Seqs of a wheel that are in no file of the ledger.

    Attributes:
        wheel: Whose.
        first_seq: From here
        last_seq: To here; None: not known.
        from_ms: What is in it was accepted between here
        to_ms: And here, both included.
        why: How it is known.
    """

    wheel: str
    first_seq: int
    last_seq: int | None
    from_ms: int
    to_ms: int
    why: str

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Extent:
    """The range covered by one wheel's names.

    Attributes:
        first_seq: The first seq of all.
        last_seq: The last.
        from_ms: When the first row was accepted.
        to_ms: When the last was.
    """

    first_seq: int
    last_seq: int
    from_ms: int
    to_ms: int


@dataclass(frozen=True, slots=True)
class LedgerRead:
    """A read of one or more files: their rows after a seq.

    Attributes:
        files: They.
        behind_seq: Rows up to this seq are in a file before; 0: all rows count.
    """

    files: tuple[LedgerFile, ...]
    behind_seq: int


class Listing:
    """The names in a ledger at one moment.

    Attributes:
        files: All, by wheel and seq.
        given_up: Gaps that the service has recorded.
    """

    def __init__(self, files: Iterable[LedgerFile], given_up: Iterable[Hole] = ()) -> None:
        self.files = sorted(files)
        self.given_up = sorted(given_up, key=lambda hole: (hole.wheel, hole.first_seq))

    def between(self, from_ms: int, to_ms: int) -> Listing:
        """Returns files that may have rows accepted from `from_ms` to before `to_ms`."""
        chosen = [f for f in self.files if f.hour_ms + HOUR_MS > from_ms and f.hour_ms < to_ms]
        return Listing(chosen, self.given_up)

    def due_between(self, from_ms: int, to_ms: int) -> Listing:
        """Returns files that may have rows due from `from_ms` to before `to_ms`."""
        chosen = [f for f in self.files if f.end_due_ms > from_ms and f.first_due_ms < to_ms]
        return Listing(chosen, self.given_up)

    def without(self, other: Listing) -> Listing:
        """Returns the files that another one does not have."""
        known = set(other.files)
        return Listing([file for file in self.files if file not in known], self.given_up)

    def ends(self) -> dict[str, int]:
        """Returns the greatest seq of each wheel's names."""
        ends: dict[str, int] = {}
        for file in self.files:
            ends[str(file.wheel)] = max(file.last_seq, ends.get(str(file.wheel), 0))
        for hole in self.given_up:
            ends[hole.wheel] = max(hole.last_seq or hole.first_seq, ends.get(hole.wheel, 0))
        return ends

    def up_to(self, ends: Mapping[str, int]) -> Listing:
        """Returns files that end at or before these seqs; wheels not given have none."""
        return Listing(
            [file for file in self.files if file.last_seq <= ends.get(str(file.wheel), 0)],
            [
                hole
                for hole in self.given_up
                if (hole.last_seq or hole.first_seq) <= ends.get(hole.wheel, 0)
            ],
        )

    @property
    def rows_guess(self) -> int:
        """Estimates the number of rows."""
        return sum(file.size for file in self.files) // _ROW_BYTES

    def reads(self) -> list[LedgerRead]:
        """Returns how to read the files so that each row is read once."""
        clean: list[LedgerFile] = []
        overlapping: list[LedgerRead] = []
        for file, behind in self._with_what_is_before():
            if file.first_seq > behind:
                clean.append(file)
            elif file.last_seq > behind:
                overlapping.append(LedgerRead((file,), behind))
        return [LedgerRead(tuple(clean), 0), *overlapping] if clean else overlapping

    def reads_of_files(self) -> list[LedgerRead]:
        """Returns how to read the files one by one so that each row is read once, in order."""
        return [
            LedgerRead((file,), behind if file.first_seq <= behind else 0)
            for file, behind in self._with_what_is_before()
            if file.last_seq > behind
        ]

    def _with_what_is_before(self) -> Iterator[tuple[LedgerFile, int]]:
        """Returns each file with the greatest last seq of those before it."""
        for _, files in groupby(self.files, key=lambda file: file.wheel):
            behind = 0
            for file in files:
                yield file, behind
                behind = max(behind, file.last_seq)

    def inner_holes(self) -> list[tuple[LedgerFile, int, int, LedgerFile]]:
        """Yields seqs between files that are in neither a file nor a recorded gap.

        Returns:
            The file before, the first and last seq that are not there, the file behind.
        """
        holes = []
        for wheel, grouped in groupby(self.files, key=lambda file: file.wheel):
            given_up = [
                (hole.first_seq, hole.last_seq or hole.first_seq)
                for hole in self.given_up
                if hole.wheel == str(wheel)
            ]
            files = list(grouped)
            before = files[0]
            for file in files[1:]:
                wanted = (before.last_seq + 1, file.first_seq - 1)
                holes += [(before, *part, file) for part in _less(wanted, given_up)]
                before = max(before, file, key=lambda one: one.last_seq)
        return holes


def _less(wanted: tuple[int, int], taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the parts of a range of seqs that others leave over."""
    left = []
    first, last = wanted
    for taken_first, taken_last in sorted(taken):
        if taken_last < first or taken_first > last:
            continue
        if taken_first > first:
            left.append((first, taken_first - 1))
        first = max(first, taken_last + 1)
    return [*left, (first, last)] if first <= last else left


def parse_path(path: str, size: int = 0) -> LedgerFile | None:
    """Parses a path; None if it is no file of a ledger."""
    match = _FILE.fullmatch(path)
    if match is None:
        return None
    try:
        hour = datetime.fromisoformat(f"{match['date']}T{match['hour']}:00:00+00:00")
        wheel = WheelId.parse(match["wheel"])
    except ValueError:  # a day that no calendar has: the service writes none
        return None
    return LedgerFile(
        wheel,
        int(match["first"]),
        int(match["last"]),
        int(hour.timestamp()) * 1000,
        path,
        size,
        *_dues_ms(match["first_due"], match["last_due"]),
    )


def _dues_ms(first_s: str | None, last_s: str | None) -> tuple[int, int]:
    """Returns between which times a file's rows are due; its name may not say that."""
    if first_s is None or last_s is None:
        return 0, END_MS
    return int(first_s) * 1000, (int(last_s) + 1) * 1000


class LedgerFolder:
    """A ledger's folder on any file system of pyarrow, read-only."""

    def __init__(self, uri: str) -> None:
        """Finds the file system.

        Raises:
            LedgerUnreadableError: Pyarrow does not understand the URI.
        """
        self.uri = uri.rstrip("/")
        try:
            if "://" in uri:
                self._fs, folder = fs.FileSystem.from_uri(uri)
            else:
                # Spark takes the first part of a relative path for a host.
                self._fs, folder = fs.LocalFileSystem(), str(Path(uri).absolute())
        except (OSError, pa.ArrowException, ValueError) as error:
            cause = without_secrets(str(error), uri)
            # No cause: what pyarrow says shows the URI as it is.
            raise LedgerUnreadableError(f"{shown(uri)}: {cause}") from None
        self._folder = folder.rstrip("/")

    def listing(self) -> Listing:
        """Returns all names, as of a single moment.

        While a folder is listed, nodes publish and delete: a name may be seen and not the
        one before it. Names of a wheel come and go in order of their seqs, so a second look, no
        further than the first one saw, has all that was there before it.

        Raises:
            LedgerUnreadableError: The place does not answer, or is no folder. One that is not
                there is empty: it is made with the first file, and what goes out directly is in
                none.
        """
        first = self._look()
        if not first.given_up and not first.inner_holes():
            return first
        return self._look().up_to(first.ends())

    def _look(self) -> Listing:
        try:
            infos = self._fs.get_file_info(_all_below(self._folder))
            files = [
                file
                for info in infos
                if info.is_file and (file := parse_path(info.path, info.size)) is not None
            ]
            gaps = [self._gap(info.path) for info in infos if _GAP.fullmatch(info.path)]
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            cause = without_secrets(str(error), self.uri)
            raise LedgerUnreadableError(f"{shown(self.uri)}: {cause}") from error
        return Listing(files, [gap for gap in gaps if gap is not None])

    def _gap(self, path: str) -> Hole | None:
        try:
            with self._fs.open_input_stream(path) as stream:
                gap = json.loads(stream.read())
        except FileNotFoundError:  # retention was faster
            return None
        return Hole(
            gap["wheel"],
            gap["first_seq"],
            gap["last_seq"],
            gap["accepted_from_ms"],
            gap["accepted_to_ms"],
            f"given up by {gap['node']}, {gap['messages']} messages: {gap['reason']}",
        )

    def holes(self, listing: Listing) -> list[Hole]:
        """Returns lost files, as far as names prove them, and recorded gaps."""
        found = [
            Hole(
                str(before.wheel),
                first,
                last,
                self._accepted(before)[1],
                self._accepted(behind)[0],
                "no file of the ledger has these seqs, though later ones are there",
            )
            for before, first, last, behind in listing.inner_holes()
        ]
        return sorted([*found, *listing.given_up], key=lambda hole: (hole.wheel, hole.first_seq))

    def extents(self, listing: Listing) -> dict[str, Extent]:
        """Returns the range that each wheel's names cover."""
        found = {}
        for wheel, grouped in groupby(listing.files, key=lambda file: file.wheel):
            files = list(grouped)
            last = max(files, key=lambda file: file.last_seq)
            found[str(wheel)] = Extent(
                files[0].first_seq,
                last.last_seq,
                self._accepted(files[0])[0],
                self._accepted(last)[1],
            )
        for hole in listing.given_up:
            known = found.get(hole.wheel)
            last_seq = hole.last_seq or hole.first_seq
            if known is None:
                found[hole.wheel] = Extent(hole.first_seq, last_seq, hole.from_ms, hole.to_ms)
            else:
                found[hole.wheel] = Extent(
                    min(known.first_seq, hole.first_seq),
                    max(known.last_seq, last_seq),
                    min(known.from_ms, hole.from_ms),
                    max(known.to_ms, hole.to_ms),
                )
        return found

    def spark_paths(self, files: Iterable[LedgerFile]) -> list[str]:
        """Returns the paths as Spark's file systems name them; each matches itself alone."""
        scheme, separator, rest = self.uri.partition("://")
        authority = rest.partition("?")[0].partition("/")[0]
        paths = [_GLOB.sub(r"\\\g<0>", file.path) for file in files]
        if not separator or scheme == "file":
            return [f"file://{path}" for path in paths]
        name = {"s3": "s3a", "gcs": "gs"}.get(scheme, scheme)
        if scheme in ("s3", "gs", "gcs"):  # there the bucket is the first part of pyarrow's paths
            return [f"{name}://{path}" for path in paths]
        if scheme in ("abfs", "abfss"):
            host = _azure_host(authority)
            parts = [path.lstrip("/").partition("/") for path in paths]
            return [f"{name}://{container}@{host}/{path}" for container, _, path in parts]
        return [f"{name}://{authority}/{path.lstrip('/')}" for path in paths]

    def rows(self, read: LedgerRead) -> pa.Table:
        """Returns the rows of a read of one file.

        Raises:
            LedgerUnreadableError: It cannot be read.
        """
        (file,) = read.files
        try:
            rows = pq.ParquetFile(file.path, filesystem=self._fs).read()
        except (OSError, pa.ArrowException) as error:
            cause = without_secrets(str(error), self.uri)
            raise LedgerUnreadableError(f"{shown(self.uri)}: {cause}") from error
        return rows.filter(pc.field("seq") > read.behind_seq) if read.behind_seq else rows

    def _accepted(self, file: LedgerFile) -> tuple[int, int]:
        """Returns when a file's first and last rows were accepted, from its footer."""
        try:
            footer = pq.ParquetFile(file.path, filesystem=self._fs).metadata
            column = footer.schema.names.index("accepted_at_ms")
            groups = [
                footer.row_group(number).column(column).statistics
                for number in range(footer.num_row_groups)
            ]
        except (OSError, pa.ArrowException, ValueError) as error:
            raise LedgerUnreadableError(f"{file.path}: {error}") from error
        known = [(s.min, s.max) for s in groups if s is not None]
        if not known or len(known) < len(groups):
            return file.hour_ms, file.hour_ms + HOUR_MS - 1
        ends: list[int] = [end for pair in known for end in pair if end is not None]
        return (min(ends), max(ends)) if ends else (file.hour_ms, file.hour_ms + HOUR_MS - 1)


def _all_below(folder: str) -> fs.FileSelector:
    return fs.FileSelector(folder, allow_not_found=True, recursive=True)


def _azure_host(authority: str) -> str:
    """Returns the host that Spark asks, from any of the forms of URI that pyarrow takes.

    The container is the first part of pyarrow's paths, whichever form it was given in.
    """
    given, _, host = authority.rpartition("@")
    if "." not in host:  # it is the container, and the account stands before it
        return f"{given.partition(':')[0]}.dfs.core.windows.net"
    return host.replace(".blob.", ".dfs.")


def moment(ms: int) -> str:
    """Formats a time in UTC for people."""
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}Z"
