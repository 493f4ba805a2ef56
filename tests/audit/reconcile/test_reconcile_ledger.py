"""What the names of a ledger's files prove; without Spark, under two seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel_audit.job import _refuse_nothing
from delaywheel_audit.kafka.control import Done
from delaywheel_audit.sources.ledger_files import (
    HOUR_MS,
    Hole,
    LedgerFile,
    LedgerFolder,
    LedgerUnreadableError,
    Listing,
    parse_path,
)
from delaywheel_replica.server.ledger.place import SCHEMA

HOUR = 500_000 * HOUR_MS
WHEEL = WheelId("n1", 1)


def file(first: int, last: int, *, hour: int = HOUR, wheel: WheelId = WHEEL) -> LedgerFile:
    return LedgerFile(wheel, first, last, hour, f"{wheel}-{first}-{last}")


def holes(listing: Listing) -> set[tuple[str, int, int]]:
    return {(str(b.wheel), first, last) for b, first, last, _ in listing.inner_holes()}


ranges = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1])),
    min_size=1,
    max_size=12,
)


@given(ranges, ranges)
def test_holes_are_the_seqs_between_names_that_nothing_has(
    files: list[tuple[int, int]], given_up: list[tuple[int, int]]
) -> None:
    listing = Listing(
        [file(*names) for names in set(files)],
        [Hole(str(WHEEL), first, last, 0, 0, "given up") for first, last in set(given_up)],
    )
    covered = {seq for first, last in files for seq in range(first, last + 1)}
    between = set(range(min(covered), max(covered) + 1))
    said = {seq for first, last in given_up for seq in range(first, last + 1)}
    found = [seq for _, first, last in holes(listing) for seq in range(first, last + 1)]
    assert sorted(found) == sorted(between - covered - said)


@given(ranges)
def test_every_seq_is_read_exactly_once_however_names_overlap(files: list[tuple[int, int]]) -> None:
    listing = Listing([file(*names) for names in set(files)])
    read = [
        seq
        for part in listing.reads()
        for one in part.files
        for seq in range(one.first_seq, one.last_seq + 1)
        if seq > part.behind_seq
    ]
    assert sorted(read) == sorted({s for first, last in files for s in range(first, last + 1)})


def test_wheels_do_not_fill_each_others_holes() -> None:
    other = WheelId("n1", 10)
    listing = Listing([file(1, 4), file(9, 9), file(1, 20, wheel=other)])
    assert holes(listing) == {("n1.1", 5, 8)}


def test_hours_are_chosen_as_a_whole() -> None:
    listing = Listing([file(n, n, hour=HOUR + n * HOUR_MS) for n in range(1, 5)])
    chosen = listing.between(HOUR + 2 * HOUR_MS + 1, HOUR + 3 * HOUR_MS + 1)
    assert [f.first_seq for f in chosen.files] == [2, 3]
    assert [f.first_seq for f in listing.between(HOUR + 2 * HOUR_MS, HOUR + 3 * HOUR_MS).files] == [
        2
    ]


def test_files_are_chosen_by_the_dues_in_their_names() -> None:
    folder = "/x/date=2026-01-02/hour=03"
    names = {1: "-1800000000-1800000059", 2: "-1800000060-1800003600", 3: ""}
    files = [
        parse_path(f"{folder}/n1.1-{n:019}-{n:019}{dues}.parquet") for n, dues in names.items()
    ]
    listing = Listing(file for file in files if file is not None)
    for from_s, to_s, wanted in (
        (1_800_000_000, 1_800_000_060, [1, 3]),
        (1_800_000_059.999, 1_800_000_060, [1, 3]),
        (1_800_000_059, 1_800_000_061, [1, 2, 3]),
        (1_800_003_601, 1_800_007_200, [3]),
        (0, 1_800_000_000, [3]),
    ):
        chosen = listing.due_between(round(from_s * 1000), to_s * 1000)
        assert [file.first_seq for file in chosen.files] == wanted
        rest = listing.without(chosen)
        assert sorted(file.first_seq for file in (*chosen.files, *rest.files)) == [1, 2, 3]


@pytest.mark.parametrize(
    "path",
    [
        "/x/date=2026-01-02/hour=03/.n1.tmp",
        f"/x/date=2026-01-02/hour=03/n1.1-{1:019}-{2:019}-1800000000.parquet",
        "/x/date=2026-01-02/hour=03/n1.1-1-2.parquet",
        "/x/n1.1-0000000000000000001-0000000000000000002.parquet",
        "/x/date=2026-02-30/hour=03/n1.1-0000000000000000001-0000000000000000002.parquet",
        "/x/date=2026-01-02/hour=77/n1.1-0000000000000000001-0000000000000000002.parquet",
        "/x/date=2026-01-02/hour=03/n1-0000000000000000001-0000000000000000002.parquet",
    ],
)
def test_what_is_no_ledger_file_is_left_alone(path: str) -> None:
    assert parse_path(path) is None


def write(folder: Path, first: int, last: int, accepted: list[int]) -> None:
    hour = folder / "date=2027-01-15" / "hour=08"
    hour.mkdir(parents=True, exist_ok=True)
    rows = {
        "id": [b"i" * 16] * len(accepted),
        "due_ms": accepted,
        "accepted_at_ms": accepted,
        "topic": ["t"] * len(accepted),
        "wheel": [str(WHEEL)] * len(accepted),
        "seq": list(range(first, first + len(accepted))),
    }
    name = f"{WHEEL}-{first:019}-{last:019}.parquet"
    pq.write_table(pa.table(rows, schema=SCHEMA), hour / name)


def test_a_lost_file_is_a_hole_with_the_times_around_it(tmp_path: Path) -> None:
    write(tmp_path, 1, 4, [1_800_000_000_001, 1_800_000_000_004])
    write(tmp_path, 9, 12, [1_800_000_000_009, 1_800_000_000_012])
    write(tmp_path, 20, 22, [1_800_000_000_020])
    (tmp_path / "gaps").mkdir()
    reported = {
        "wheel": "n1.1", "first_seq": 13, "last_seq": 19, "accepted_from_ms": 13,
        "accepted_to_ms": 19, "messages": 70, "reason": "disk full", "node": "n1",
        "recorded_at_ms": 1,
    }  # fmt: skip
    name = f"n1.1-{13:019}-{19:019}.json"
    (tmp_path / "gaps" / name).write_text(json.dumps(reported))
    folder = LedgerFolder(str(tmp_path))
    lost, given_up = folder.holes(folder.listing())
    assert (lost.first_seq, lost.last_seq) == (5, 8)
    assert (lost.from_ms, lost.to_ms) == (1_800_000_000_004, 1_800_000_000_009)
    assert (given_up.first_seq, given_up.from_ms) == (13, 13)
    assert "disk full" in given_up.why
    extent = folder.extents(folder.listing())["n1.1"]
    assert (extent.first_seq, extent.last_seq) == (1, 22)
    assert (extent.from_ms, extent.to_ms) == (13, 1_800_000_000_020)


def test_what_comes_and_goes_while_one_looks_is_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ledger_seen_in_part(
        tmp_path, monkeypatch, seen=[(1, 2), (7, 8)], then=[(3, 4), (5, 6), (7, 8), (11, 12)]
    )
    listing = folder.listing()
    assert [(f.first_seq, f.last_seq) for f in listing.files] == [(3, 4), (5, 6), (7, 8)]
    assert folder.holes(listing) == []


def test_what_is_not_there_at_the_second_look_either_is_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqs = [(1, 2), (7, 8)]
    folder = ledger_seen_in_part(tmp_path, monkeypatch, seen=seqs, then=[*seqs, (11, 12)])
    assert [(hole.first_seq, hole.last_seq) for hole in folder.holes(folder.listing())] == [(3, 6)]


def ledger_seen_in_part(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    seen: list[tuple[int, int]],
    then: list[tuple[int, int]],
) -> LedgerFolder:
    """A first listing sees some files; more exist by then."""
    look = LedgerFolder._look
    for seqs in then:
        write(folder, *seqs, [1_800_000_000_000 + seq for seq in seqs])

    def first(_: LedgerFolder) -> Listing:
        monkeypatch.setattr(LedgerFolder, "_look", look)
        return Listing([file(*seqs) for seqs in seen])

    monkeypatch.setattr(LedgerFolder, "_look", first)
    return LedgerFolder(str(folder))


def test_a_place_that_is_not_there_is_an_error_and_no_empty_ledger(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(LedgerUnreadableError, match="file"):
        LedgerFolder(str(file)).listing()
    # Where all messages went out directly no node has made it.
    assert not LedgerFolder(str(tmp_path / "nowhere")).listing().files
    done = Done(1, {"n1.2": 0}, {}, 0, {"n1.1": 0}, {"n1": 2})
    _refuse_nothing(Listing([]), done, "nowhere")
    with pytest.raises(LedgerUnreadableError, match="wheels have taken messages"):
        _refuse_nothing(Listing([]), replace(done, closed={"n1.1": 1}), "nowhere")
    with pytest.raises(LedgerUnreadableError):
        LedgerFolder("gopher://x/y")


def test_spark_finds_a_ledger_below_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "date=2027-01-15/hour=08/n1.1-0000000000000000001-0000000000000000002.parquet"
    file = tmp_path / "books" / name
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.chdir(tmp_path)
    folder = LedgerFolder("books")
    assert folder.spark_paths(folder.listing().files) == [f"file://{file}"]


@pytest.mark.parametrize(
    ("uri", "path", "read"),
    [
        ("/books [1]/{a}*?", "/books [1]/{a}*?/f", r"file:///books \[1\]/\{a\}\*\?/f"),
        ("s3://bucket/books", "bucket/books/f", "s3a://bucket/books/f"),
        ("hdfs://name:8020/books", "/books/f", "hdfs://name:8020/books/f"),
        (
            "abfs://box@mine.dfs.core.windows.net/books", "box/books/f",
            "abfs://box@mine.dfs.core.windows.net/books/f",
        ),
        (
            "abfss://mine.blob.core.windows.net/box/books", "box/books/f",
            "abfss://box@mine.dfs.core.windows.net/books/f",
        ),
        ("abfs://mine:secret@box/books", "box/books/f", "abfs://box@mine.dfs.core.windows.net/books/f"),
    ],
)  # fmt: skip
def test_spark_finds_each_file_where_pyarrow_found_it(
    monkeypatch: pytest.MonkeyPatch, uri: str, path: str, read: str
) -> None:
    anywhere = SimpleNamespace(from_uri=lambda _: (None, "anywhere"))
    systems = SimpleNamespace(FileSystem=anywhere, LocalFileSystem=object)
    monkeypatch.setattr("delaywheel_audit.sources.ledger_files.fs", systems)
    folder = LedgerFolder(uri)
    assert folder.spark_paths([LedgerFile(WHEEL, 1, 2, HOUR, path)]) == [read]
