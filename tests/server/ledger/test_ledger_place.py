"""The place: names and how they are found, object stores, secrets, and deletion of old files."""

from __future__ import annotations

import errno
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pytest
from pyarrow import fs

from delaywheel.identity import WheelId
from delaywheel_replica.hiding import shown
from delaywheel_replica.server.ledger import place as ledger_place
from delaywheel_replica.server.ledger.notes import Gap, GapReason
from delaywheel_replica.server.ledger.place import HOUR_MS, LedgerStorage
from delaywheel_replica.server.ledger.retention import Retention
from support.wheels.books import ACCEPTED_AT_MS, WHEEL, Bench
from support.wheels.messages import message

OTHER, GONE = WheelId("n2", 7), WheelId("n3", 1)
HOUR = ACCEPTED_AT_MS // HOUR_MS * HOUR_MS


@pytest.fixture
def place(tmp_path: Path) -> LedgerStorage:
    return LedgerStorage(str(tmp_path / "place"), node="n1", staging=tmp_path / "staging")


def put(place: LedgerStorage, wheel: WheelId, first: int, last: int, at_ms: int) -> None:
    with place.begin() as writer:
        rows: list[dict[str, Any]] = [
            {
                "id": bytes(16),
                "due_ms": at_ms,
                "accepted_at_ms": at_ms,
                "topic": "t",
                "wheel": str(wheel),
                "seq": first,
            }
        ]
        writer.write_table(pa.Table.from_pylist(rows, schema=ledger_place.SCHEMA))
    place.put_file(wheel, first, last, at_ms)


def gap_of(wheel: WheelId, first: int, last: int, at_ms: int) -> Gap:
    return Gap(wheel, first, last, at_ms, at_ms, 1, GapReason.DISK_RESERVE, "n1", at_ms)


def names(place: LedgerStorage) -> list[tuple[str, int]]:
    files = [file for hour_ms in place.hours() for file in place.files(hour_ms)]
    return sorted((str(name.wheel), name.last_seq) for name in (*files, *place.gaps()))


def test_the_newest_name_of_each_wheel_is_found(place: LedgerStorage, tmp_path: Path) -> None:
    put(place, WHEEL, 1, 4, HOUR)
    put(place, WHEEL, 5, 9, HOUR + HOUR_MS)
    put(place, WHEEL, 10, 12, HOUR + HOUR_MS)
    put(place, OTHER, 1, 1, HOUR - 30 * HOUR_MS)
    place.put_gap(gap_of(OTHER, 2, 30, HOUR))
    (tmp_path / "place" / "_temporary").mkdir()
    (tmp_path / "place" / "date=2025-11-21" / "hour=04" / "notes.txt").touch()
    assert place.newest({WHEEL: HOUR, OTHER: HOUR - 30 * HOUR_MS, GONE: HOUR}) == {
        WHEEL: 12,
        OTHER: 30,
    }


def test_no_more_hours_are_looked_into_than_a_wheel_is_old(
    place: LedgerStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a year of hours."""
    for hours in range(0, 24 * 20, 6):
        put(place, OTHER, 1 + hours, 6 + hours, HOUR - (24 * 20 - hours) * HOUR_MS)
    looked: list[int] = []
    files = LedgerStorage.files

    def counted(self: LedgerStorage, hour_ms: int) -> list[ledger_place.Name]:
        looked.append(hour_ms)
        return files(self, hour_ms)

    monkeypatch.setattr(LedgerStorage, "files", counted)
    assert place.newest({WHEEL: HOUR}) == {}
    assert len(looked) == 3  # a day, for clocks that were set back
    looked.clear()
    assert place.newest({OTHER: 0}) == {OTHER: 24 * 20}
    assert len(looked) == 1


def test_an_empty_place_has_no_names_and_is_not_made_by_looking(
    place: LedgerStorage, tmp_path: Path
) -> None:
    place.reach()
    assert place.newest({WHEEL: 0}) == {}
    assert not (tmp_path / "place").exists()


def test_what_is_written_beside_is_no_file_until_it_is_put(
    place: LedgerStorage, tmp_path: Path
) -> None:
    writer = place.begin()
    assert [path.name for path in (tmp_path / "place").iterdir()] == [".n1.tmp"]
    assert names(place) == []
    writer.close()
    put(place, WHEEL, 1, 1, HOUR)
    assert names(place) == [("n1.1", 1)]
    assert not (tmp_path / "place" / ".n1.tmp").exists()


def test_folders_and_files_that_the_service_never_made_are_left_alone(
    place: LedgerStorage, tmp_path: Path
) -> None:
    """No node ends by them, whichever made them."""
    put(place, WHEEL, 1, 4, HOUR)
    for folder in ("date=2026-02-30/hour=03", "date=2025-11-21/hour=77", "date=0000-01-01/hour=00"):
        (tmp_path / "place" / folder).mkdir(parents=True)
    file = f"{'n' * 200}.1-{1:019}-{2:019}.parquet"
    (tmp_path / "place" / "date=2025-11-21" / "hour=04" / file).touch()
    assert list(place.hours()) == [HOUR]
    assert place.newest({WHEEL: HOUR, OTHER: 0}) == {WHEEL: 4}
    assert retained(place, 5, [], HOUR + 100 * HOUR_MS) == []


# --- an object store: no folders to move in, and a file is there when its stream is closed


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LedgerStorage:
    monkeypatch.setattr(ledger_place, "_OBJECT_STORES", {"local"})
    return LedgerStorage(
        str(tmp_path / "bucket"), node="n1", staging=tmp_path / "staging" / "up.parquet"
    )


def test_an_object_store_is_sent_what_is_whole_here(store: LedgerStorage, tmp_path: Path) -> None:
    put(store, WHEEL, 1, 2, HOUR)
    store.put_gap(gap_of(WHEEL, 3, 4, HOUR))
    assert names(store) == [("n1.1", 2), ("n1.1", 4)]
    assert [path.name for path in (tmp_path / "bucket").iterdir() if path.is_file()] == []


def test_what_broke_while_it_was_sent_never_counts(store: LedgerStorage, tmp_path: Path) -> None:
    """Also if nothing can be deleted by then, or the process ends."""
    kept, store._fs = store._fs, _NothingIsDeleted(store._fs)  # type: ignore[assignment]
    with pytest.raises(OSError, match="refused"):
        _put_broken(store, tmp_path)
    store._fs = kept
    assert names(store) == []
    others = tmp_path / "bucket" / ".n2.n1.1-7-8.parquet.tmp"
    others.touch()
    store.reach()
    assert [path for path in (tmp_path / "bucket").iterdir() if path.is_file()] == [others]


def test_what_was_sent_counts_though_its_other_name_stays(store: LedgerStorage) -> None:
    refusing = _NothingIsDeleted(store._fs)
    store._fs = refusing  # type: ignore[assignment]
    put(store, WHEEL, 1, 2, HOUR)
    put(store, WHEEL, 3, 4, HOUR)
    assert names(store) == [("n1.1", 2), ("n1.1", 4)]
    assert refusing.refused == 2
    store.reach()
    assert refusing.refused == 3, "however many there are, one is tried"


class _NothingIsDeleted:
    """A file system that refuses every deletion."""

    def __init__(self, kept: fs.FileSystem) -> None:
        self._kept = kept
        self.refused = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._kept, name)

    def delete_file(self, path: str) -> None:
        self.refused += 1
        raise OSError(f"{path} is not deleted")


def _put_broken(store: LedgerStorage, tmp_path: Path) -> None:
    with store.begin():
        pass
    staged = tmp_path / "staging" / "up.parquet"

    class Broken:
        """Reads half of a file, then breaks."""

        def __init__(self) -> None:
            self.file = fs.LocalFileSystem().open_input_stream(str(staged))
            self.was_read = False

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def read(self, length: int) -> bytes:
            del length
            if self.was_read:
                raise OSError("refused")
            self.was_read = True
            return self.file.read(10)

    class Beside:
        """Returns a stream that breaks."""

        def open_input_stream(self, path: str) -> Broken:
            assert path == str(staged)
            return Broken()

    store._beside_fs = Beside()  # type: ignore[assignment]
    store.put_file(WHEEL, 1, 1, HOUR)


@pytest.mark.parametrize(
    ("uri", "seen"),
    [
        ("/srv/books", "/srv/books"),
        ("s3://key:secret@bucket/books?region=x&secret_key=y", "s3://bucket/books"),
        ("hdfs://namenode:8020/books", "hdfs://namenode:8020/books"),
        ("file:///srv/books", "file:///srv/books"),
        ("s3://key:sec[ret@bucket/books", "s3://bucket/books"),
    ],
)
def test_a_place_is_shown_without_its_secrets(uri: str, seen: str) -> None:
    assert shown(uri) == seen


# --- retention


def retained(
    place: LedgerStorage, hours: int, registered: Collection[WheelId] | None, now_ms: int
) -> list[tuple[str, int]]:
    Retention(hours, registered=lambda: registered).look(place, now_ms)
    return names(place)


def test_what_is_too_old_goes_with_its_folders(place: LedgerStorage, tmp_path: Path) -> None:
    for hours in range(30):
        put(place, GONE, 1 + hours, 1 + hours, HOUR + hours * HOUR_MS)
    place.put_gap(gap_of(GONE, 50, 60, HOUR))
    now_ms = HOUR + 30 * HOUR_MS
    assert len(retained(place, 0, [], now_ms)) == 31
    assert len(retained(place, 28, None, now_ms)) == 31  # what is registered is unknown
    assert retained(place, 28, [], now_ms) == [("n3.1", seq) for seq in range(3, 31)]
    assert retained(place, 5, [], now_ms) == [("n3.1", seq) for seq in range(26, 31)]
    assert [path.name for path in (tmp_path / "place").iterdir()] == ["gaps", "date=2025-11-22"]


def test_what_says_how_far_a_registered_wheel_is_published_stays(place: LedgerStorage) -> None:
    """It may be written no longer, but registered for long: its messages are due in a week."""
    for hours in range(3):
        put(place, WHEEL, 1 + hours, 1 + hours, HOUR + hours * HOUR_MS)
        put(place, GONE, 1 + hours, 1 + hours, HOUR + hours * HOUR_MS)
    place.put_gap(gap_of(OTHER, 1, 4, HOUR))
    later_ms = HOUR + 100 * HOUR_MS
    assert retained(place, 30, [WHEEL, OTHER], later_ms) == [("n1.1", 3), ("n2.7", 4)]
    assert place.newest({WHEEL: HOUR, OTHER: HOUR}) == {WHEEL: 3, OTHER: 4}
    assert retained(place, 30, [], later_ms) == []


def test_what_is_left_of_a_wheel_never_has_a_hole(
    place: LedgerStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader may look at any moment: a hole is a file that was lost."""
    place.put_gap(gap_of(WHEEL, 1, 1, HOUR))
    for number in range(1, 9):
        put(place, GONE, number, number, HOUR + number // 3 * HOUR_MS)
        put(place, WHEEL, 1 + number, 1 + number, HOUR + number // 3 * HOUR_MS)
    looks: list[list[tuple[str, int]]] = []
    delete = LedgerStorage.delete

    def looked_at(self: LedgerStorage, name: ledger_place.Name) -> None:
        delete(self, name)
        looks.append(names(self))

    monkeypatch.setattr(LedgerStorage, "delete", looked_at)
    retained(place, 5, [], HOUR + 100 * HOUR_MS)
    assert len(looks) == 17
    for look in looks:
        for wheel, last in ((GONE, 8), (WHEEL, 9)):
            seqs = [seq for of, seq in look if of == str(wheel)]
            assert seqs == [*range(last + 1 - len(seqs), last + 1)]


def test_a_gap_stays_as_long_as_the_files_of_its_hour(place: LedgerStorage) -> None:
    put(place, GONE, 1, 1, HOUR)
    place.put_gap(gap_of(GONE, 2, 2, HOUR + 1))
    put(place, GONE, 3, 3, HOUR + HOUR_MS)
    soon_ms = HOUR + 5 * HOUR_MS + HOUR_MS // 2
    assert len(retained(place, 5, [], soon_ms)) == 3
    assert retained(place, 5, [], soon_ms + HOUR_MS // 2) == [("n3.1", 3)]


def test_it_is_not_looked_at_all_the_time(place: LedgerStorage) -> None:
    asked: list[None] = []

    def registered() -> list[WheelId]:
        asked.append(None)
        return []

    retention = Retention(30, registered=registered)
    for minutes in range(61):
        retention.look(place, HOUR + minutes * 60_000)
    assert len(asked) == 5
    retention.look(place, HOUR)  # a clock that was set back
    assert len(asked) == 6


def test_a_gap_that_nobody_understands_stays(place: LedgerStorage, tmp_path: Path) -> None:
    place.put_gap(gap_of(GONE, 1, 2, HOUR))
    (path,) = (tmp_path / "place" / "gaps").iterdir()
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"reason": "OF_A_LATER_RELEASE"}))
    assert retained(place, 30, [], HOUR + 100 * HOUR_MS) == [("n3.1", 2)]


def test_a_full_disk_keeps_no_more_of_the_books_than_is_needed(place: LedgerStorage) -> None:
    is_full = False
    retention = Retention(168, registered=list, hours_when_full=27, is_full=lambda: is_full)
    for hours in (0, 100, 141):
        place.put_gap(gap_of(GONE, hours + 1, hours + 1, HOUR + hours * HOUR_MS))
    now_ms = HOUR + 168 * HOUR_MS

    def left() -> list[int]:
        retention.look(place, now_ms)
        return sorted(gap.last_seq for gap in place.gaps())

    assert left() == [1, 101, 142]
    is_full = True
    # At once: it is not looked only four times an hour.
    assert left() == [142]


def test_a_full_disk_is_made_room_on_before_more_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.write(message(1), at_ms=HOUR)
    bench.books.work()
    bench.registered = []
    bench.restart(retention_hours=0, full_retention_hours=27)
    bench.is_full = True
    bench.write(message(2), at_ms=HOUR)
    monkeypatch.setattr(bench.place, "_make_beside", no_room)
    assert not bench.books.work()
    assert bench.files() == []


def no_room() -> None:
    raise OSError(errno.ENOSPC, "full")


def test_the_books_look_after_what_is_too_old(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write(message(1), at_ms=HOUR)
    bench.books.work()
    bench.registered = []
    bench.restart(retention_hours=30)
    bench.books.work()
    assert bench.files() == []
