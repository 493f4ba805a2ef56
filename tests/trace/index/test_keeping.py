"""What is merged, taken from the ledger, and deleted: each event once at every moment of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from delaywheel_audit.sources.ledger_files import LedgerFolder
from delaywheel_trace.index.events import SCHEMA
from delaywheel_trace.index.folder import IndexFolder, IndexUnreadableError
from delaywheel_trace.index.layout import (
    HOUR_MS,
    AcceptedFile,
    BadFile,
    BatchFile,
    Gap,
    Layout,
    MergedFile,
)
from delaywheel_trace.job import keeping, sorting
from delaywheel_trace.job.health import IndexHealth
from delaywheel_trace.job.keeping import IndexKeeper
from support.wheels.indexes import QUERY, IndexMaker

HOUR = 1_900_000_800_000 // HOUR_MS * HOUR_MS
LATER = HOUR + 2 * HOUR_MS
WEEK_MS = 7 * 24 * HOUR_MS


class Crash(BaseException):
    """A crash: nothing of ours catches it."""


class Kept:
    """An index, what keeps it, and a ledger."""

    def __init__(self, folder: Path) -> None:
        self.maker = IndexMaker(folder / "index", HOUR)
        self.folder: IndexFolder = self.maker.folder
        self.ledger = folder / "ledger"
        self.again()

    def again(self) -> None:
        """Another process."""
        self.keeper = IndexKeeper(
            self.folder, LedgerFolder(str(self.ledger)), "shop", WEEK_MS, IndexHealth()
        )

    def layout(self) -> Layout:
        return self.folder.listing()

    def names(self) -> list[str]:
        return [Path(file.path).name[0] for file in self.layout().counting]

    def seen(self) -> list[tuple[str, int, int]]:
        rows: list[dict[str, Any]] = []
        for file in self.layout().counting:
            rows += pq.read_table(self.folder.full(file.path)).to_pylist()
        return sorted((row["reporter"], row["number"], row["row"]) for row in rows)

    def publish(self, wheel: str, seqs: Sequence[int], *, first: int | None = None) -> None:
        """Publishes rows of the ledger, two a seq."""
        rows = {
            "id": pa.array([seq.to_bytes(16, "big") for seq in seqs for _ in "ab"], pa.binary(16)),
            "due_ms": [HOUR + HOUR_MS] * 2 * len(seqs),
            "accepted_at_ms": [HOUR + 5] * 2 * len(seqs),
            "topic": pa.array(["orders"] * 2 * len(seqs)).dictionary_encode(),
            "wheel": pa.array([wheel] * 2 * len(seqs)).dictionary_encode(),
            "seq": pa.array([seq for seq in seqs for _ in "ab"], pa.int64()),
        }
        day, _, hour = AcceptedFile(HOUR, wheel, 0, 0).path.partition("/")[0].partition("T")
        folder = self.ledger / f"date={day}" / f"hour={hour}"
        folder.mkdir(parents=True, exist_ok=True)
        first_seq = seqs[0] if first is None else first
        pq.write_table(pa.table(rows), folder / f"{wheel}-{first_seq:019}-{seqs[-1]:019}.parquet")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(keeping, "_GRACE_S", 0.0)
    monkeypatch.setattr(keeping, "_LEDGER_LOOK_S", 0.0)
    return Kept(tmp_path)


def ids(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": bytes([number]) * 16} for number in numbers]


def test_an_hour_that_is_over_becomes_one_set(kept: Kept) -> None:
    kept.maker.batch(*ids(3, 1))
    twice = {**ids(2)[0], "number": 1, "row": 7}
    kept.maker.batch(twice)
    kept.maker.batch(twice)
    kept.keeper.step(HOUR + HOUR_MS)  # it may still get some
    assert kept.names() == ["b", "b", "b"]
    kept.keeper.step(LATER)
    assert len(kept.seen()) == 3
    (file,) = kept.layout().counting
    assert isinstance(file, MergedFile)
    found = pq.read_table(kept.folder.full(file.path))
    assert found["id"].to_pylist() == [bytes([number]) * 16 for number in (1, 2, 3)]
    kept.keeper.step(LATER)
    assert kept.layout().stale == ()
    assert kept.names() == ["c"]


def test_what_an_earlier_release_did_not_know_is_null(kept: Kept) -> None:
    kept.maker.lacks = "forwarded_ms", "next_id"
    kept.maker.batch(*ids(1))
    kept.maker.batch({**ids(2)[0], "forwarded_ms": 5})
    kept.keeper.step(LATER)
    (file,) = kept.layout().counting
    found = pq.read_table(kept.folder.full(file.path))
    assert found["forwarded_ms"].to_pylist() == [None, 5]
    assert found.schema.names == SCHEMA.names


@pytest.mark.parametrize("wrong", ["damaged", "later"])
def test_an_hour_that_cannot_be_merged_stays_and_others_go_on(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    kept.maker.batch(*ids(1))
    file = kept.maker.batch(*ids(2))
    path = kept.folder.full(file.path)
    whole = pq.read_table(path)
    if wrong == "damaged":
        Path(path).write_bytes(b"PAR1 what somebody wrote PAR1")
    else:
        pq.write_table(whole.append_column("mood", [["well"]]), path)
    kept.maker.hour_ms = HOUR + HOUR_MS
    kept.maker.batch(*ids(3))
    kept.publish("n1.1", [1])
    later = LATER + HOUR_MS
    with pytest.raises(IndexUnreadableError, match=file.path):
        kept.keeper.step(later)
    assert kept.names() == ["a", "b", "b", "c"]
    kept.keeper.step(later)  # not tried again at once
    pq.write_table(whole, path)
    monkeypatch.setattr(keeping, "_AGAIN_S", 0.0)
    kept.keeper.step(later)
    assert (kept.names(), len(kept.seen())) == (["a", "c", "c"], 5)


def test_batches_of_the_hour_are_merged_when_they_are_many(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_MANY_BATCHES", 3)
    for number in range(7):
        kept.maker.batch(*ids(number))
        kept.keeper.step(HOUR + 1)
        assert len(kept.seen()) == number + 1
    assert sorted(kept.names()) == ["b", "c", "c"]
    kept.keeper.step(LATER)
    assert (kept.names(), len(kept.seen())) == (["c"], 7)


def test_what_searches_may_have_open_is_not_deleted_at_once(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_GRACE_S", 60.0)
    for number in range(2):
        kept.maker.batch(*ids(number))
    for _ in range(3):
        kept.keeper.step(LATER)
    assert (len(kept.layout().stale), kept.names()) == (2, ["c"])


def test_a_crash_at_each_moment_loses_and_doubles_nothing(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "PART_ROWS", 2)
    monkeypatch.setattr(sorting, "RANGE_ROWS", 1)
    monkeypatch.setattr(sorting, "_SAMPLED", 1)
    expected = []
    for number in range(5):
        kept.maker.batch(*ids(number))
        expected = kept.seen()
    calls = ("put_file", "_move", "delete", "_sync")
    originals = {name: getattr(IndexFolder, name) for name in calls}
    for crash_at in range(100):
        left = [crash_at]

        def crashing(name: str, left: list[int] = left) -> Any:
            def call(self: IndexFolder, *arguments: Any) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise Crash
                originals[name](self, *arguments)

            return call

        for name in calls:
            monkeypatch.setattr(IndexFolder, name, crashing(name))
        with suppress(Crash):
            kept.keeper.step(LATER)
        assert kept.seen() == expected, crash_at
        kept.again()
        if left[0] >= 0 and not kept.layout().stale:
            break
    assert {type(file) for file in kept.layout().counting} == {MergedFile}


def test_many_queries_of_an_hour_are_merged_as_far_as_names_reach(kept: Kept) -> None:
    source = kept.folder.full(kept.maker.batch(*ids(1)).path)
    rows = pq.read_table(source)
    Path(source).unlink()
    for number in range(9):
        part = rows.set_column(rows.schema.get_field_index("number"), "number", [[number]])
        file = BatchFile(HOUR, f"{number:012x}", 0)
        kept.folder.put(file.path, partial(pq.write_table, part))
    for _ in range(4):
        kept.keeper.step(LATER)
        assert len(kept.seen()) == 9
    assert kept.names() == ["c", "c"]


def test_rows_of_the_ledger_are_taken_once_and_late_ones_when_they_come(kept: Kept) -> None:
    kept.publish("n1.1", [1, 2, 3])
    kept.publish("n1.1", [4, 5], first=4)
    kept.publish("n2.1", [1])
    kept.keeper.step(HOUR + HOUR_MS + 1)
    assert kept.names() == []
    kept.keeper.step(LATER)
    taken = [file for file in kept.layout().counting if isinstance(file, AcceptedFile)]
    assert [(f.wheel, f.first_seq, f.last_seq) for f in taken] == [("n1.1", 1, 5), ("n2.1", 1, 1)]
    assert len(kept.seen()) == 12
    # One that was lost and comes back, and one that another node has published, too.
    kept.publish("n1.1", [8])
    kept.keeper.step(LATER)
    kept.publish("n1.1", [6, 7])
    kept.publish("n2.1", [1, 2])
    kept.keeper.step(LATER)
    kept.keeper.step(LATER)
    expected = [("n1.1", seq, row) for seq in range(1, 9) for row in range(2)]
    expected += [("n2.1", seq, row) for seq in (1, 2) for row in range(2)]
    assert kept.seen() == expected


def test_old_hours_are_deleted(kept: Kept) -> None:
    kept.maker.batch(*ids(1))
    kept.folder.put(BadFile(HOUR, QUERY, 0, 1).path, lambda stream: stream.write(b"{}\n"))
    kept.folder.put(Gap(0, HOUR, QUERY).path, lambda stream: stream.write(b"{}\n"))
    kept.keeper.step(HOUR + WEEK_MS - 1)
    assert len(kept.seen()) == 1
    kept.keeper.step(HOUR + WEEK_MS + HOUR_MS + 1)
    assert kept.layout() == Layout((), (), (), ())


def test_it_goes_on_after_a_failure_and_stops_when_it_is_told(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keeping, "_TICK_S", 0.01)
    failed, went_on = threading.Event(), threading.Event()

    def step(_now_ms: int) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("the disk is full")
        went_on.set()

    monkeypatch.setattr(kept.keeper, "step", step)
    kept.keeper.start()
    assert went_on.wait(30)
    kept.keeper.stop()
    assert "the disk is full" in capfd.readouterr().err
