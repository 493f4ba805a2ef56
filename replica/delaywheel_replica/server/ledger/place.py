"""The place where the ledger is published: a folder on any pyarrow file system.

    date=YYYY-MM-DD/hour=HH/<wheel>-<first seq>-<last seq>-<first due>-<last due>.parquet
    gaps/<wheel>-<first seq>-<last seq>.json                      rows that were given up

Date and hour are UTC, of acceptance; dues are the seconds of the earliest and the latest due in the
file, so that who asks for an hour of dues opens few files of a week. An empty file has none. Seqs
have 19 digits, so that names sort. Files and gaps of a wheel follow one another without hole
or overlap, and each exists completely or not at all: so the names show what is published.

- A file is written beside its final name, synced and moved there. An object store shows a file
  once its stream is closed, even one that broke: so it is completed on this disk, sent under a
  temporary name of its own, and copied there.
- A crash leaves at most one temporary file of this node: the next one overwrites it, or on an
  object store the next publication deletes it.
- Times of acceptance never decrease within a wheel, so its newest name is in the newest hour that
  has any of its names: the search goes back from the newest hour, to the wheel's birth at most.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from delaywheel.identity import NameInvalidError, WheelId
from delaywheel_replica.core.protocol.codec import decode, to_json
from delaywheel_replica.server.ledger.notes import Gap

_FIELDS: Final[Mapping[str, pa.DataType]] = {
    "id": pa.binary(16),
    "due_ms": pa.int64(),
    "accepted_at_ms": pa.int64(),
    "topic": pa.dictionary(pa.int32(), pa.string()),
    "wheel": pa.dictionary(pa.int32(), pa.string()),
    "seq": pa.int64(),
}
SCHEMA: Final = pa.schema(_FIELDS)

HOUR_MS: Final = 3_600_000
UNREACHED: Final = (OSError, pa.ArrowException)
"""What a pyarrow file system raises when it fails."""

# Clocks may have been set back since a wheel was born.
_SLACK_MS: Final = 24 * HOUR_MS
_NAME = re.compile(
    r"([a-z0-9][a-z0-9-]*)\.([1-9]\d*)-(\d{19})-(\d{19})(?:-\d{10}-\d{10})?\.(?:parquet|json)"
)
_DATE = re.compile(r"date=(\d{4}-\d{2}-\d{2})")
_HOUR = re.compile(r"hour=(\d{2})")
_GAPS: Final = "gaps"
# File systems where a file appears only when its stream is closed, and where moving copies.
_OBJECT_STORES: Final = {"s3", "gcs", "abfs"}
_COPIED_AT_ONCE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Name:
    """A file or a gap, as described by its name."""

    wheel: WheelId
    first_seq: int
    last_seq: int
    path: str


class LedgerStorage:
    """The place, for one thread; every method may raise one of `UNREACHED`."""

    def __init__(self, uri: str, *, node: str, staging: Path) -> None:
        """Finds the file system of a folder, or of a pyarrow URI; creates nothing yet.

        `staging` is a local file, for what goes to an object store.
        """
        if "://" in uri:
            self._fs, self._folder = fs.FileSystem.from_uri(uri)
        else:
            self._fs, self._folder = fs.LocalFileSystem(), uri
        self._folder = self._folder.rstrip("/")
        self._moves = self._fs.type_name not in _OBJECT_STORES
        self._beside = f"{self._folder}/.{node}.tmp" if self._moves else str(staging)
        self._sent_prefix = f".{node}."  # a node's name has no dots
        self._beside_fs = self._fs if self._moves else fs.LocalFileSystem()
        self._answered_s = time.monotonic()

    @property
    def answered_s(self) -> float:
        """When the place last responded, by the monotonic clock; for any thread."""
        return self._answered_s

    def reach(self) -> None:
        """Checks that the place responds, and deletes what a crash has left there of a sending."""
        names = self._list("")
        if self._moves:
            return
        # Where nothing may be deleted there are ever more of them: only one is tried then.
        with contextlib.suppress(*UNREACHED):
            for name in names:
                if name.startswith(self._sent_prefix):
                    self._fs.delete_file(f"{self._folder}/{name}")

    # --- names

    def newest(self, wheels: Mapping[WheelId, int]) -> dict[WheelId, int]:
        """Returns the seq up to which each wheel is published; unpublished ones are absent.

        Each is given with a time, Unix ms: nothing of it was accepted before.
        """
        found = _greatest(gap for gap in self.gaps() if gap.wheel in wheels)
        wanted = dict(wheels)
        for hour_ms in self.hours():
            wanted = {w: born for w, born in wanted.items() if hour_ms > born - _SLACK_MS}
            if not wanted:
                break
            names = _greatest(file for file in self.files(hour_ms) if file.wheel in wanted)
            for wheel, seq in names.items():
                del wanted[wheel]
                found[wheel] = max(seq, found.get(wheel, 0))
        return found

    def hours(self) -> Iterator[int]:
        """Returns the beginnings of all hours with a folder, in Unix ms, newest first."""
        dates = {m[1]: name for name in self._list("") if (m := _DATE.fullmatch(name))}
        for date, folder in sorted(dates.items(), reverse=True):
            for name in sorted(self._list(folder), reverse=True):
                match = _HOUR.fullmatch(name)
                if match and (began_ms := _began_ms(date, match[1])) is not None:
                    yield began_ms

    def files(self, hour_ms: int) -> list[Name]:
        """Returns the files of an hour."""
        return list(self._names(_hour_folder(hour_ms)))

    def gaps(self) -> list[Name]:
        """Returns all gaps."""
        return list(self._names(_GAPS))

    # --- writing

    def begin(self) -> pq.ParquetWriter:
        """Begins a temporary file; `put_file` puts it in place once it is closed."""
        self._make_beside()
        return pq.ParquetWriter(
            self._beside, SCHEMA, filesystem=self._beside_fs, compression="zstd"
        )

    def put_file(
        self,
        wheel: WheelId,
        first_seq: int,
        last_seq: int,
        accepted_at_ms: int,
        dues_ms: tuple[int, int] | None = None,
    ) -> None:
        """Puts a finished file in place: completely or not at all, and durably.

        Its rows are of the hour of `accepted_at_ms`. Without the earliest and the latest due it is
        empty.
        """
        dues = "" if dues_ms is None else f"-{dues_ms[0] // 1000:010}-{dues_ms[1] // 1000:010}"
        name = f"{wheel}-{first_seq:019}-{last_seq:019}{dues}.parquet"
        self._put(_hour_folder(accepted_at_ms), name)

    def put_gap(self, gap: Gap) -> None:
        """Puts a gap in place, completely or not at all, and durably."""
        self._make_beside()
        with self._beside_fs.open_output_stream(self._beside) as stream:
            stream.write(json.dumps(to_json(gap), indent=1).encode() + b"\n")
        self._put(_GAPS, f"{gap.wheel}-{gap.first_seq:019}-{gap.last_seq:019}.json")

    # --- taking away

    def read_gap(self, name: Name) -> Gap:
        """Reads a gap; a MalformedError says that it is something else."""
        with self._fs.open_input_stream(name.path) as stream:
            return decode(Gap, stream.read())

    def delete(self, name: Name) -> None:
        """Deletes a file or gap, if it exists."""
        with contextlib.suppress(FileNotFoundError):  # another node was faster
            self._fs.delete_file(name.path)
        self._answered_s = time.monotonic()

    def delete_hour(self, hour_ms: int) -> None:
        """Deletes an hour's folder, and that of its date, if they are empty."""
        folder = f"{self._folder}/{_hour_folder(hour_ms)}"
        for path in (folder, folder.rpartition("/")[0]):
            if self._fs.get_file_info(fs.FileSelector(path, allow_not_found=True)):
                return
            with contextlib.suppress(FileNotFoundError):
                self._fs.delete_dir(path)

    # --- how

    def _list(self, folder: str) -> list[str]:
        selector = fs.FileSelector(f"{self._folder}/{folder}".rstrip("/"), allow_not_found=True)
        names = [info.base_name for info in self._fs.get_file_info(selector)]
        self._answered_s = time.monotonic()
        return names

    def _names(self, folder: str) -> Iterator[Name]:
        for base_name in self._list(folder):
            if match := _NAME.fullmatch(base_name):
                node, number, first, last = match.groups()
                path = f"{self._folder}/{folder}/{base_name}"
                with contextlib.suppress(NameInvalidError):
                    yield Name(WheelId(node, int(number)), int(first), int(last), path)

    def _make_beside(self) -> None:
        self._beside_fs.create_dir(self._beside.rpartition("/")[0], recursive=True)

    def _put(self, folder: str, name: str) -> None:
        inside = f"{self._folder}/{folder}"
        self._fs.create_dir(inside, recursive=True)
        if not self._moves:
            self._upload(f"{self._folder}/{self._sent_prefix}{name}.tmp", f"{inside}/{name}")
            return
        self._sync(self._beside)
        self._fs.move(self._beside, f"{inside}/{name}")
        # Also the names of the folders: the floor depends on what is published.
        while inside.startswith(self._folder):
            self._sync(inside)
            inside = inside.rpartition("/")[0]
        self._answered_s = time.monotonic()

    def _upload(self, sent: str, final: str) -> None:
        with (
            self._beside_fs.open_input_stream(self._beside) as source,
            self._fs.open_output_stream(sent) as target,
        ):
            while part := source.read(_COPIED_AT_ONCE_BYTES):
                target.write(part)
                self._answered_s = time.monotonic()
        self._fs.copy_file(sent, final)
        self._answered_s = time.monotonic()
        with contextlib.suppress(*UNREACHED):  # it counts for nothing
            self._fs.delete_file(sent)

    def _sync(self, path: str) -> None:
        """Syncs the file, since its frames may be deleted once they count as published."""
        if not isinstance(self._fs, fs.LocalFileSystem):
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _hour_folder(unix_ms: int) -> str:
    moment = datetime.fromtimestamp(unix_ms // 1000, UTC)
    return f"date={moment:%Y-%m-%d}/hour={moment:%H}"


def _began_ms(date: str, hour: str) -> int | None:
    """Returns when an hour began; None for folders of invalid dates, which are not ours."""
    try:
        began = datetime.fromisoformat(f"{date}T{hour}:00:00+00:00")
    except ValueError:
        return None
    return int(began.timestamp()) * 1000


def _greatest(names: Iterable[Name]) -> dict[WheelId, int]:
    found: dict[WheelId, int] = {}
    for name in names:
        found[name.wheel] = max(name.last_seq, found.get(name.wheel, 0))
    return found
