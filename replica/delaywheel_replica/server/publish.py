"""Publishes the ledger: sealed rows, as Parquet, into a folder on any pyarrow file system.

    <wheel>-<first seq>-<last seq>.parquet        seqs with 19 digits, so that names sort

The files of a wheel follow one another without gap or overlap, and a file is there whole or not
at all: so its names say what is published, and nothing is published twice, whatever ends in
between. What was published is found from the names at start; what local rows lack (a restart, a
full disk) is read again from the frames. Frames that cannot be read leave a gap in the rows of
their file, and a warning.

A frame counts as published once a file with its seq is in place, or when its file would have no
rows at all (cancels). Then the machine is told, which tells it to all: the floor waits for it.

========================  ======================================================================
a wheel of this node      is published up to
========================  ======================================================================
open, or left             what W members hold: its high watermark
closed at T               T, as far as it is held here; lost frames are gaps
========================  ======================================================================

Wheels of other nodes are not published here, though this node may hold them: that a leader
publishes what a lost node left unpublished is still to come, and belongs into ``publishable``.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import structlog
from pyarrow import fs

from delaywheel.disk import Disk
from delaywheel.format import Frame, Kind
from delaywheel.identity import WheelId
from delaywheel.reader import WheelReader
from delaywheel_replica.core.status import CleanerStatus, ServerStatus
from delaywheel_replica.server.ledger import (
    LEDGER_ROW,
    Block,
    Ledger,
    read_blocks,
    rows_folder,
)

_log = structlog.get_logger(__name__)

_FIELDS: Final[Mapping[str, pa.DataType]] = {
    "id": pa.binary(16),
    "due_ms": pa.int64(),
    "accepted_at_ms": pa.int64(),
    "topic": pa.dictionary(pa.int32(), pa.string()),
    "wheel": pa.dictionary(pa.int32(), pa.string()),
    "seq": pa.int64(),
}
SCHEMA: Final = pa.schema(_FIELDS)
_FILE = re.compile(r"(?P<wheel>.+)-(?P<first>\d{19})-(?P<last>\d{19})\.parquet")
_ROWS_PER_GROUP: Final = 100_000
_RETRY_S: Final = 5.0
# File systems where a file appears whole when its stream is closed, and where moving copies.
_OBJECT_STORES: Final = {"s3", "gcs", "abfs"}


class Place:
    """The folder where the ledger is published."""

    def __init__(self, uri: str) -> None:
        if "://" in uri:
            self._fs, self._folder = fs.FileSystem.from_uri(uri)
        else:
            self._fs, self._folder = fs.LocalFileSystem(), uri
        self._moves = self._fs.type_name not in _OBJECT_STORES

    def published(self) -> dict[WheelId, int]:
        """Up to which seq each wheel is published, from the names of the files."""
        self._fs.create_dir(self._folder, recursive=True)
        found: dict[WheelId, int] = {}
        for info in self._fs.get_file_info(fs.FileSelector(self._folder)):
            match = _FILE.fullmatch(info.base_name)
            if match is not None:
                wheel = WheelId.parse(match["wheel"])
                found[wheel] = max(int(match["last"]), found.get(wheel, 0))
        return found

    def publish(self, wheel: WheelId, tables: Iterable[pa.Table], first: int, last: int) -> None:
        """Puts one file in place, whole or not at all, and durably."""
        final = f"{self._folder}/{wheel}-{first:019}-{last:019}.parquet"
        # One name a node: what a crash leaves is overwritten by the next file.
        writing = f"{self._folder}/.{wheel.node}.tmp" if self._moves else final
        with (
            self._fs.open_output_stream(writing) as stream,
            pq.ParquetWriter(stream, SCHEMA, compression="zstd") as writer,
        ):
            for table in tables:
                writer.write_table(table)
        if self._moves:
            self._sync(writing)
            self._fs.move(writing, final)
            self._sync(self._folder)

    def _sync(self, path: str) -> None:
        """The floor hangs on what is published: after it, the frames are gone."""
        if not isinstance(self._fs, fs.LocalFileSystem):
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publishable(status: ServerStatus, cleaner: CleanerStatus | None) -> dict[WheelId, int]:
    """The wheels of this node that are here, and up to which seq each may be published."""
    beat = status.beat
    found: dict[WheelId, int] = {}
    for wheel, told in beat.wheels.items():
        if wheel.node != beat.node or wheel == beat.spare:
            continue
        record = None if cleaner is None else cleaner.wheels.get(wheel)
        closed_at = None if record is None else record.closed_at
        end = told.prefix
        while cleaner is not None and (wheel, end + 1) in cleaner.lost:
            end += 1
        found[wheel] = min(end, told.high_watermark if closed_at is None else closed_at)
    return found


class Books:
    """Publishes now and then, on a thread of its own: the place may be far away, or gone."""

    def __init__(
        self,
        disk: Disk,
        data: Path,
        ledger: Ledger,
        *,
        uri: str,
        seal_seconds: float,
        publishable: Callable[[], Mapping[WheelId, int]],
        on_published: Callable[[WheelId, int], None],
    ) -> None:
        """Prepares; ``start`` starts the thread.

        Args:
            disk: where the data folder lies.
            data: the data folder.
            ledger: writes the rows.
            uri: where they are published.
            seal_seconds: how often.
            publishable: which wheels of this node there are, and up to where.
            on_published: a wheel is published up to a seq.
        """
        self._disk = disk
        self._data = data
        self._ledger = ledger
        self._uri = uri
        self._seal_seconds = seal_seconds
        self._publishable = publishable
        self._on_published = on_published
        self._published: dict[WheelId, int] = {}
        self._place: Place | None = None
        self._files: dict[WheelId, list[Path]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="books", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Publishes once more, if the place answers, and ends the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        for wheel in self._wheels_with_rows():
            folder = rows_folder(self._data, wheel)
            names = self._disk.list_folder(folder)
            self._files[wheel] = sorted((folder / name for name in names), key=_first_seq)
        while True:
            wait_s = self._seal_seconds
            try:
                self.work()
            except OSError as error:
                _log.warning("ledger not published", place=self._uri, error=str(error))
                wait_s = min(_RETRY_S, wait_s)
            if self._ended.is_set():
                return
            self._ended.wait(wait_s)

    def work(self) -> None:
        """Seals and publishes what there is.

        Raises:
            OSError: the place does not answer; nothing is lost, the next call goes on.
        """
        # Before sealing: what is held now has its rows in the files sealed then.
        wheels = self._publishable()
        for sealed in self._ledger.seal():
            self._files.setdefault(sealed.wheel, []).append(sealed.path)
        if self._place is None:
            place = Place(self._uri)
            self._published = place.published()
            self._place = place
            for wheel in wheels:
                self._tell(wheel)
        for wheel, last_seq in wheels.items():
            if last_seq > self._published.get(wheel, 0):
                self._publish(wheel, last_seq)
        self._forget_wheels()

    def _tell(self, wheel: WheelId) -> None:
        published = self._published.get(wheel, 0)
        if published:
            self._on_published(wheel, published)

    def _publish(self, wheel: WheelId, last_seq: int) -> None:
        assert self._place is not None
        first_seq = self._published.get(wheel, 0) + 1
        source = _Source(self._disk, self._data, wheel, self._files.get(wheel, []))
        tables = source.tables(first_seq, last_seq)
        # A file without rows says nothing: frames of cancels pass without one.
        first_table = next(tables, None)
        if first_table is not None:
            self._place.publish(wheel, _chain(first_table, tables), first_seq, last_seq)
        self._published[wheel] = last_seq
        self._tell(wheel)
        for path in source.read_whole(last_seq):
            self._disk.delete(path)
            self._files[wheel].remove(path)

    def _forget_wheels(self) -> None:
        """Wheels that are gone leave nothing behind; the open one may have no rows yet."""
        wheels = self._publishable()
        for wheel in [wheel for wheel in self._files if wheel not in wheels]:
            self._disk.delete_folder(rows_folder(self._data, wheel))
            del self._files[wheel]

    def _wheels_with_rows(self) -> list[WheelId]:
        names = self._disk.list_folder(rows_folder(self._data))
        return [WheelId.parse(name) for name in names]


class _Source:
    """The rows of one wheel: from the local files, and from the frames where those have gaps."""

    def __init__(self, disk: Disk, data: Path, wheel: WheelId, files: list[Path]) -> None:
        self._disk = disk
        self._data = data
        self._wheel = wheel
        self._files = files
        self._ends: dict[Path, int] = {}

    def tables(self, first_seq: int, last_seq: int) -> Iterator[pa.Table]:
        """All rows of the frames ``first_seq`` to ``last_seq``, some at a time."""
        blocks: list[Block] = []
        rows = 0
        for block in self._blocks(first_seq, last_seq):
            if not len(block.rows):
                continue
            blocks.append(block)
            rows += len(block.rows)
            if rows >= _ROWS_PER_GROUP:
                yield _table(self._wheel, blocks)
                blocks, rows = [], 0
        if blocks:
            yield _table(self._wheel, blocks)

    def read_whole(self, last_seq: int) -> list[Path]:
        """The files all of whose blocks lie within what was read."""
        return [path for path, end in self._ends.items() if end <= last_seq]

    def _blocks(self, first_seq: int, last_seq: int) -> Iterator[Block]:
        next_seq = first_seq
        for path in self._files:
            self._ends[path] = 0
            for block in read_blocks(self._disk, path):
                self._ends[path] = block.last_seq
                if block.first_seq < next_seq or block.last_seq > last_seq:
                    continue  # published before, or not yet held by enough members
                yield from self._from_frames(next_seq, block.first_seq - 1)
                yield block
                next_seq = block.last_seq + 1
        yield from self._from_frames(next_seq, last_seq)

    def _from_frames(self, first_seq: int, last_seq: int) -> Iterator[Block]:
        if first_seq > last_seq:
            return
        reader = WheelReader(self._disk, self._data, self._wheel)
        try:
            for seq in range(first_seq, last_seq + 1):
                frame = reader.frame(seq) if reader.has(seq) else None
                if isinstance(frame, Frame):
                    if frame.kind is Kind.MESSAGES:
                        yield _block_of_frame(frame)
                elif frame is None or frame.messages:
                    _log.warning("gap in the ledger", wheel=str(self._wheel), seq=seq)
        finally:
            reader.close()


def _block_of_frame(frame: Frame) -> Block:
    columns = frame.columns
    rows = np.zeros(len(columns), dtype=LEDGER_ROW)
    rows["due_ms"] = columns.due_ms
    rows["topic"] = columns.topic_numbers
    rows["id"] = columns.ids
    return Block(frame.seq, frame.seq, frame.accepted_at_ms, list(columns.topics), rows)


def _table(wheel: WheelId, blocks: list[Block]) -> pa.Table:
    topics: dict[str, int] = {}
    numbers = []
    for block in blocks:
        table = [topics.setdefault(topic, len(topics)) for topic in block.topics]
        numbers.append(np.array(table, dtype=np.int32)[block.rows["topic"]])
    rows = np.concatenate([block.rows for block in blocks])
    counts = [len(block.rows) for block in blocks]
    columns: Mapping[str, Any] = {
        "id": pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), len(rows), [None, pa.py_buffer(rows["id"].tobytes())]
        ),
        "due_ms": rows["due_ms"],
        "accepted_at_ms": np.repeat([block.accepted_at_ms for block in blocks], counts),
        "topic": pa.DictionaryArray.from_arrays(np.concatenate(numbers), list(topics)),
        "wheel": pa.DictionaryArray.from_arrays(np.zeros(len(rows), np.int32), [str(wheel)]),
        "seq": np.repeat([block.first_seq for block in blocks], counts) + rows["seq"],
    }
    return pa.table(columns, schema=SCHEMA)


def _chain(first: pa.Table, others: Iterator[pa.Table]) -> Iterator[pa.Table]:
    yield first
    yield from others


def _first_seq(path: Path) -> int:
    return int(path.stem)
