"""The books: rows at commit, sealed, published once, and read again from the frames."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from delaywheel.disk import PosixDisk
from delaywheel.format import Kind
from delaywheel.identity import WheelId
from delaywheel.slotfiles import HandleCache
from delaywheel.wheel import OriginWheel, WheelMeta
from delaywheel_replica.core.beat import Beat, WheelBeat
from delaywheel_replica.core.control import WheelRecord
from delaywheel_replica.core.status import CleanerStatus, Role, ServerStatus
from delaywheel_replica.server.ledger import (
    Ledger,
    block_of,
    encode_block,
    read_blocks,
    rows_folder,
)
from delaywheel_replica.server.publish import Books, publishable
from support.messages import BASE_SLOT, Message, columns_of, message

WHEEL = WheelId("n1", 1)
ACCEPTED_AT_MS = 1_763_699_999_000


class Bench:
    """A wheel, its ledger and its books, without a server."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.disk = PosixDisk()
        meta = WheelMeta(WHEEL, {"n1": "s"}, 1, 7200)
        self.wheel = OriginWheel.create(self.disk, data, meta, HandleCache(self.disk, 8))
        self.high_watermark = 0
        self.published: dict[WheelId, int] = {}
        self.ledger = Ledger(self.disk, data)
        self.books = self.new_books()

    def new_books(self) -> Books:
        place = str(self.data / "published")
        return Books(
            self.disk,
            self.data,
            self.ledger,
            uri=place,
            seal_seconds=60,
            publishable=lambda: {WHEEL: self.high_watermark},
            on_published=self.published.__setitem__,
        )

    def write(self, *messages: Message, kind: Kind = Kind.MESSAGES, enter: bool = True) -> None:
        columns = columns_of(list(messages))
        places = self.wheel.append(columns, kind=kind, accepted_at_ms=ACCEPTED_AT_MS)
        self.high_watermark = places[-1].seq
        if enter:
            entered = columns if kind is Kind.MESSAGES else None
            self.ledger.enter(WHEEL, entered, places, ACCEPTED_AT_MS)

    def restart(self) -> None:
        """The rows' files stay as they are; all memory is gone."""
        self.published = {}
        self.ledger = Ledger(self.disk, self.data)
        self.books = self.new_books()
        for path in rows_folder(self.data, WHEEL).glob("*.rows"):
            self.books._files.setdefault(WHEEL, []).append(path)

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.data / "published").glob("*.parquet"))

    def rows(self) -> list[tuple[bytes, int, int, str, str, int]]:
        tables = [pq.read_table(self.data / "published" / name) for name in self.files()]
        return [tuple(row.values()) for table in tables for row in table.to_pylist()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def row_of(message: Message, seq: int) -> tuple[bytes, int, int, str, str, int]:
    return (message.id, message.due_ms, ACCEPTED_AT_MS, message.topic, "n1.1", seq)


def three(first: int) -> list[Message]:
    """Of three seconds, two topics."""
    return [
        replace(message(first + number, slot=BASE_SLOT + number), topic="ab"[number % 2])
        for number in range(3)
    ]


def test_what_was_accepted_is_published_once_with_all_it_says(bench: Bench) -> None:
    first, second = three(0), three(10)
    bench.write(*first)
    bench.books.work()
    bench.books.work()
    bench.write(*second)
    bench.write(second[0])
    bench.books.work()
    assert bench.files() == [
        "n1.1-0000000000000000001-0000000000000000003.parquet",
        "n1.1-0000000000000000004-0000000000000000007.parquet",
    ]
    expected = [row_of(message, seq) for seq, message in enumerate([*first, *second], 1)]
    assert bench.rows() == [*expected, row_of(second[0], 7)]
    assert bench.published == {WHEEL: 7}
    assert list(rows_folder(bench.data, WHEEL).iterdir()) == []


def test_cancels_pass_without_rows(bench: Bench) -> None:
    bench.write(message(1))
    bench.write(message(1), kind=Kind.CANCELS)
    bench.books.work()
    bench.write(message(1), kind=Kind.CANCELS)
    bench.books.work()
    assert len(bench.files()) == 1
    assert bench.rows() == [row_of(message(1), 1)]
    assert bench.published == {WHEEL: 3}


def test_after_a_restart_rows_that_are_missing_are_read_from_the_frames(bench: Bench) -> None:
    bench.write(message(1))
    bench.write(message(2))
    bench.books.work()
    bench.write(message(3))
    bench.write(message(4), enter=False)
    bench.write(message(4), kind=Kind.CANCELS, enter=False)
    bench.restart()
    bench.books.work()
    assert bench.rows() == [row_of(message(number), number) for number in (1, 2, 3, 4)]
    assert bench.published == {WHEEL: 5}


def test_gaps_between_blocks_are_read_from_the_frames(bench: Bench) -> None:
    bench.write(message(1), enter=False)
    bench.write(message(2))
    bench.write(message(3), enter=False)
    bench.write(message(4))
    bench.books.work()
    assert bench.rows() == [row_of(message(number), number) for number in (1, 2, 3, 4)]


@pytest.mark.parametrize("cut", [1, 40, 60])
def test_a_torn_block_is_read_from_the_frames(bench: Bench, cut: int) -> None:
    bench.write(message(1))
    bench.write(message(2))
    (path,) = rows_folder(bench.data, WHEEL).iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    bench.restart()
    bench.books.work()
    assert bench.rows() == [row_of(message(number), number) for number in (1, 2)]


def test_a_block_that_is_not_what_was_written_is_not_believed(bench: Bench) -> None:
    bench.write(message(1))
    (path,) = rows_folder(bench.data, WHEEL).iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert list(read_blocks(bench.disk, path)) == []
    bench.restart()
    bench.books.work()
    assert bench.rows() == [row_of(message(1), 1)]


def test_what_ended_in_the_middle_of_a_file_is_begun_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(message(1))
    with monkeypatch.context() as broken:
        broken.setattr(pq.ParquetWriter, "write_table", _fail)
        with pytest.raises(OSError, match="gone"):
            bench.books.work()
    assert bench.files() == []
    assert bench.published == {}
    bench.write(message(2))
    bench.books.work()
    assert bench.rows() == [row_of(message(1), 1), row_of(message(2), 2)]
    assert [path.name for path in (bench.data / "published").iterdir()] == bench.files()


def _fail(*_: object, **__: object) -> None:
    raise OSError("the place is gone")


def test_only_what_enough_members_hold_is_published(bench: Bench) -> None:
    bench.write(message(1))
    bench.write(message(2))
    bench.high_watermark = 1
    bench.books.work()
    assert bench.rows() == [row_of(message(1), 1)]
    bench.high_watermark = 2
    bench.books.work()
    assert bench.rows() == [row_of(message(1), 1), row_of(message(2), 2)]


def test_a_frame_that_cannot_be_read_leaves_a_gap_and_no_more(bench: Bench) -> None:
    bench.write(message(1), enter=False)
    bench.write(message(2, slot=BASE_SLOT + 1), enter=False)
    bench.write(message(3), enter=False)
    next((bench.data / "wheels").rglob(f"{BASE_SLOT + 1}.slot")).unlink()
    bench.books.work()
    assert bench.rows() == [row_of(message(1), 1), row_of(message(3), 3)]
    assert bench.published == {WHEEL: 3}


def test_a_file_of_rows_does_not_grow_without_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.ledger = Ledger(bench.disk, bench.data, max_file_bytes=100)
    for number in range(4):
        bench.write(message(number))
    assert len(list(rows_folder(bench.data, WHEEL).iterdir())) == 2


def test_a_medium_that_refuses_rows_costs_no_rows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = columns_of([message(1)])
    places = bench.wheel.append(columns, accepted_at_ms=ACCEPTED_AT_MS)
    with monkeypatch.context() as broken:
        broken.setattr(PosixDisk, "open", _fail)
        bench.ledger.enter(WHEEL, columns, places, ACCEPTED_AT_MS)
    assert bench.ledger.failure
    bench.write(message(2))
    assert not bench.ledger.failure
    bench.books.work()
    assert bench.rows() == [row_of(message(number), number) for number in (1, 2)]


def test_a_group_of_many_frames_is_one_block(bench: Bench, tmp_path: Path) -> None:
    messages = [message(number, slot=BASE_SLOT + number % 5) for number in range(50)]
    columns = columns_of(messages)
    places = bench.wheel.append(columns, accepted_at_ms=ACCEPTED_AT_MS)
    path = tmp_path / "one.rows"
    path.write_bytes(encode_block(block_of(columns, places, ACCEPTED_AT_MS)))
    (block,) = read_blocks(bench.disk, path)
    assert (block.first_seq, block.last_seq) == (1, 5)
    assert {(row["id"].tobytes(), int(row["due_ms"]), int(row["seq"])) for row in block.rows} == {
        (message.id, message.due_ms, message.due_ms // 1000 % 5) for message in messages
    }


def test_a_place_that_has_all_is_told_of_at_once(bench: Bench) -> None:
    bench.write(message(1))
    bench.books.work()
    bench.restart()
    bench.books.work()
    assert bench.published == {WHEEL: 1}
    assert len(bench.files()) == 1


OPEN, LEFT, CLOSED, ENDED, SPARE = (WheelId("n1", number) for number in (5, 2, 3, 4, 6))
THEIRS = WheelId("n2", 1)


def test_own_wheels_are_published_as_far_as_they_are_acknowledged_or_closed() -> None:
    def held(applied: int, high_watermark: int, *lacking: int) -> WheelBeat:
        return WheelBeat(applied, high_watermark, 0, 0, 0, 0, lacking)

    wheels = {
        OPEN: held(9, 7),
        LEFT: held(9, 8),
        CLOSED: held(9, 2, 6),
        ENDED: held(4, 0),
        SPARE: held(0, 0),
        THEIRS: held(9, 9),
    }
    beat = Beat("n1", "s", "b", 0, OPEN, SPARE, 6, draining=False, complete=True, wheels=wheels)
    status = ServerStatus(beat, 1, 0)
    ends = {CLOSED: 9, ENDED: 6, LEFT: None}
    records = {wheel: WheelRecord({"n1": "s"}, 1, 0, end) for wheel, end in ends.items()}
    cleaner = CleanerStatus(
        "n1", "b", 1, 0, 0, Role.LEADING, wheels=records, lost=frozenset({(ENDED, 5), (ENDED, 6)})
    )
    own = {OPEN: 7, LEFT: 8}
    # What is lacking may still come; what is lost does not.
    assert publishable(status, cleaner) == {**own, CLOSED: 5, ENDED: 6}
    assert publishable(status, None) == {**own, CLOSED: 2, ENDED: 0}
