"""A wheel, its ledger and its books, without a server."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta
from delaywheel.storage.folder.disk import Disk, PosixDisk
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.writing.wheel import OriginWheel
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.server.ledger.assignment import Publishable
from delaywheel_replica.server.ledger.place import LedgerStorage
from delaywheel_replica.server.ledger.publisher import Books, BooksConfig
from delaywheel_replica.server.ledger.rows import Ledger, rows_folder
from support.wheels.copies import rows_by_seq
from support.wheels.messages import BASE_SLOT, Message, columns_of, message

WHEEL = WheelId("n1", 1)
ACCEPTED_AT_MS = 1_763_699_999_000
"""21 November 2025, 04:39:59 UTC."""
HOUR_MS = 3_600_000
_DUES = re.compile(r"-\d{10}-\d{10}(?=\.parquet)")
FOUR, FIVE = (f"date=2025-11-21/hour=0{hour}" for hour in (4, 5))

Row = tuple[bytes, int, int, str, str, int]


class FragilePlace(LedgerStorage):
    """A folder that is away when the test says so, or that ends the process at a step.

    Attributes:
        is_away: nothing is answered.
        steps: that were done.
    """

    is_away = False

    def __init__(self, folder: Path, *, node: str = "n1") -> None:
        """Is there."""
        super().__init__(str(folder), node=node, staging=folder / "unused")
        self.steps = 0
        self.dies_before_step: int | None = None

    def step(self) -> None:
        """Called before every access, and every change."""
        if self.is_away:
            raise OSError(errno.EHOSTUNREACH, "the place is away")
        if self.steps == self.dies_before_step:
            raise Died
        self.steps += 1

    def _list(self, folder: str) -> list[str]:
        self.step()
        return super()._list(folder)

    def _make_beside(self) -> None:
        self.step()
        super()._make_beside()

    def _put(self, folder: str, name: str) -> None:
        self.step()
        super()._put(folder, name)
        self.step()


class Died(BaseException):
    """The process ended here. Not an `Exception`: no handler may catch it by accident."""


class BenchMember:
    """The node of a bench, as its ledger sees it."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def publishable(self) -> Mapping[WheelId, Publishable]:
        return self._bench.publishable()

    def reported(self) -> Mapping[WheelId, int]:
        return self._bench.reported()

    def registered(self) -> Collection[WheelId] | None:
        return self._bench.registered

    def is_full(self) -> bool:
        return self._bench.is_full

    def published(self, wheel: WheelId, seq: int) -> None:
        self._bench.published[wheel] = seq

    def unreadable(self, wheel: WheelId, seq: int) -> None:
        self._bench.unreadable.append((wheel, seq))


class Bench:
    """The environment of the books' tests.

    Attributes:
        data: the data folder.
        place: where the books publish; away on request.
        high_watermark: what may be published of the wheel.
        lost: frames of it that are lost.
        reported_seq: up to here some node reported it as published.
        floor: frames for earlier slots are finished.
        is_sole: no other node may publish it.
        is_whole: the wheel is closed at the high watermark.
        is_shared: other nodes publish at the same place.
        is_full: the disk is at its reserve.
        published: what was reported to the machine.
        unreadable: frames that were reported to it.
        written: what every frame holds, as it is to be found in the ledger.
    """

    def __init__(self, data: Path, *, disk: Disk | None = None, folder: Path | None = None) -> None:
        """Begins with an empty wheel."""
        self.data = data
        self.disk = disk or PosixDisk()
        self.name = WHEEL
        meta = WheelMeta(WHEEL, {"n1": "s"}, 1, 7200)
        self.wheel = OriginWheel.create(self.disk, data, meta, HandleCache(self.disk, 8))
        self.folder = folder or data / "published"
        self.high_watermark = 0
        self.reported_seq = 0
        self.floor = 0
        self.is_shared = True
        self.is_sole = True
        self.is_whole = False
        self.lost: frozenset[int] = frozenset()
        self.is_full = False
        self.registered: Collection[WheelId] | None = None
        self.published: dict[WheelId, int] = {}
        self.unreadable: list[tuple[WheelId, int]] = []
        self.written: list[list[Row]] = []
        self.place = FragilePlace(self.folder)
        self.ledger = Ledger(self.disk, data)
        self.books = self.new_books()

    def new_books(
        self,
        *,
        node: str = "n1",
        retention_hours: int = 0,
        full_retention_hours: int | None = None,
    ) -> Books:
        """Books that know only what is on the disk and in the place."""
        return Books(
            self.disk,
            self.data,
            self.ledger,
            BooksConfig(
                node,
                str(self.folder),
                60,
                retention_hours,
                full_retention_hours,
                is_shared=self.is_shared,
            ),
            BenchMember(self),
            place_at=lambda: self.place,
        )

    def publishable(self) -> dict[WheelId, Publishable]:
        """The one wheel to publish."""
        found = Publishable(
            self.high_watermark,
            reported_seq=self.reported_seq,
            born_ms=ACCEPTED_AT_MS - 60_000,
            is_sole=self.is_sole,
            is_whole=self.is_whole,
            lost=FrameSet.of((self.name, seq) for seq in self.lost),
            floor=self.floor,
        )
        return {self.name: found}

    def reported(self) -> dict[WheelId, int]:
        """The one wheel with files, and up to where it is known as published."""
        return {self.name: max(self.reported_seq, self.published.get(self.name, 0))}

    def write(
        self,
        *messages: Message,
        kind: Kind = Kind.MESSAGES,
        enter: bool = True,
        at_ms: int = ACCEPTED_AT_MS,
    ) -> None:
        """A group of callers' messages, or of cancels.

        Args:
            messages: of one group.
            kind: which of the two.
            enter: into the ledger, too; otherwise the disk refused the row.
            at_ms: when it is accepted.
        """
        columns = columns_of(list(messages))
        group = self.wheel.append(columns, kind=kind, accepted_at_ms=at_ms)
        entered = columns if kind is Kind.MESSAGES else None
        if enter:
            self.ledger.enter(self.name, entered, group, at_ms)
        # What ended before was not acknowledged to any caller.
        self.high_watermark = group.bundle.last_seq
        for seq, held in rows_by_seq(group).items():
            rows = [messages[row] for row in held] if entered is not None else []
            self.written.append(
                [(m.id, m.due_ms, at_ms, m.topic, str(self.name), seq) for m in rows]
            )

    def restart(self, **books: int) -> None:
        """Loses all memory; files and the place stay."""
        self.published = {}
        self.place = FragilePlace(self.folder)
        self.ledger = Ledger(self.disk, self.data)
        self.books = self.new_books(**books)  # type: ignore[arg-type]

    def local_files(self) -> list[str]:
        """The local rows."""
        return self.disk.list_folder(rows_folder(self.data, self.name))

    def files(self) -> list[str]:
        """The published paths inside the place, ascending, without the dues in their names."""
        return sorted(
            _DUES.sub("", path.relative_to(self.folder).as_posix())
            for path in self.folder.rglob("*.parquet")
        )

    def path(self, name: str) -> Path:
        """Where a file with such a name is."""
        folder, _, base_name = name.removesuffix(".parquet").rpartition("/")
        (path,) = (self.folder / folder).glob(f"{base_name}*.parquet")
        return path

    def gaps(self) -> list[str]:
        """The published gaps."""
        return sorted(path.name for path in (self.folder / "gaps").glob("*.json"))

    def rows(self) -> list[Row]:
        """The published files, in the order of their names without folders."""
        paths = sorted(self.folder.rglob("*.parquet"), key=lambda path: path.name)
        tables = [pq.ParquetFile(path).read() for path in paths]
        return [tuple(row.values()) for table in tables for row in table.to_pylist()]

    def all_written(self) -> list[Row]:
        """The expected rows of every frame."""
        return [row for frame in self.written for row in frame]


def three(first: int) -> list[Message]:
    """Messages of three seconds and two topics."""
    return [
        replace(message(first + number, slot=BASE_SLOT + number), topic="ab"[number % 2])
        for number in range(3)
    ]


def file_name(first: int, last: int, folder: str = FOUR) -> str:
    """The name of a published file with these frames."""
    return f"{folder}/n1.1-{first:019}-{last:019}.parquet"
