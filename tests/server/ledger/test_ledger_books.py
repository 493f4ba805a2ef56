"""The books: published once, in files that follow one another, and read again from the frames."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.server.ledger import pages as ledger_pages
from delaywheel_replica.server.ledger import publisher as publish
from delaywheel_replica.server.ledger.publisher import Books, BooksConfig
from delaywheel_replica.server.ledger.rows import Ledger, rows_folder
from sim.machine.disk import SimulatedDisk
from support.wheels.books import (
    ACCEPTED_AT_MS,
    FIVE,
    HOUR_MS,
    WHEEL,
    Bench,
    BenchMember,
    Died,
    FragilePlace,
    file_name,
    three,
)
from support.wheels.messages import BASE_SLOT, message

# --- what is published


def test_what_was_accepted_is_published_once_with_all_it_says(bench: Bench) -> None:
    bench.write(*three(0))
    assert bench.books.work()
    assert bench.books.work()
    bench.write(*three(10))
    bench.write(three(10)[0])
    assert bench.books.work()
    assert bench.files() == [file_name(1, 3), file_name(4, 7)]
    assert bench.rows() == bench.all_written()
    assert bench.published == {WHEEL: 7}
    assert bench.local_files() == []
    schema = pq.ParquetFile(bench.path(file_name(1, 3))).schema_arrow
    assert [(field.name, str(field.type)) for field in schema] == [
        ("id", "fixed_size_binary[16]"),
        ("due_ms", "int64"),
        ("accepted_at_ms", "int64"),
        ("topic", "dictionary<values=string, indices=int32, ordered=0>"),
        ("wheel", "dictionary<values=string, indices=int32, ordered=0>"),
        ("seq", "int64"),
    ]
    state = bench.books.state()
    assert (state.files, state.rows, state.failure, state.gaps) == (2, 7, None, 0)


def test_a_file_lies_in_one_hour_of_acceptance(bench: Bench) -> None:
    bench.write(message(1))
    bench.write(message(2), at_ms=ACCEPTED_AT_MS + 1)
    bench.write(message(3), kind=Kind.CANCELS, at_ms=ACCEPTED_AT_MS + HOUR_MS)
    bench.write(message(4), at_ms=ACCEPTED_AT_MS + HOUR_MS)
    bench.write(message(5), at_ms=ACCEPTED_AT_MS + HOUR_MS)
    bench.books.work()
    # Between them no hole: what has no rows is part of a range.
    assert bench.files() == [file_name(1, 3), file_name(4, 5, FIVE)]
    assert bench.rows() == bench.all_written()


def test_cancels_are_reported_at_once_and_become_part_of_the_next_files_range(bench: Bench) -> None:
    bench.write(message(1))
    bench.books.work()
    bench.write(message(1), kind=Kind.CANCELS)
    bench.books.work()
    assert bench.published == {WHEEL: 2}
    bench.restart()
    bench.books.work()
    assert bench.published == {WHEEL: 2}
    bench.write(message(2))
    bench.books.work()
    assert bench.files() == [file_name(1, 1), file_name(2, 3)]
    assert bench.rows() == bench.all_written()
    assert bench.local_files() == []


def test_names_say_between_which_seconds_their_rows_are_due(bench: Bench) -> None:
    for slots in ((50, 3, 7), (2, 90, 1)):
        for slot in slots:
            bench.write(message(slot, slot=BASE_SLOT + slot))
        bench.books.work()
    paths = sorted(bench.folder.rglob("*.parquet"))
    assert [path.stem.split("-")[-2:] for path in paths] == [
        [str(BASE_SLOT + first), str(BASE_SLOT + last)] for first, last in ((3, 50), (1, 90))
    ]
    bench.restart()
    bench.books.work()
    assert bench.files() == [file_name(1, 3), file_name(4, 6)], "they are known again"


@pytest.mark.parametrize("is_restarted", [True, False])
def test_the_names_of_a_closed_wheel_reach_its_end(bench: Bench, *, is_restarted: bool) -> None:
    bench.write(message(1))
    bench.write(message(1), kind=Kind.CANCELS)
    bench.write(message(2), kind=Kind.CANCELS)
    bench.high_watermark = 1
    bench.books.work()
    bench.high_watermark = 3
    bench.books.work()
    assert bench.files() == [file_name(1, 1)], "the next message's file would have the cancels"
    if is_restarted:
        bench.restart()
    bench.is_sole, bench.is_whole = False, True
    for _ in range(2):
        bench.books.work()
    assert [name.rpartition("/")[2] for name in bench.files()] == [
        file_name(first, last).rpartition("/")[2] for first, last in [(1, 1), (2, 3)]
    ]
    assert bench.rows() == bench.all_written()


def test_no_name_says_that_messages_which_it_does_not_have_are_none(bench: Bench) -> None:
    """Another node has published them in its own place, and was replaced."""
    bench.is_shared = False
    bench.books = bench.new_books()
    bench.write(message(1))
    bench.write(message(1), kind=Kind.CANCELS)
    bench.reported_seq = 2
    bench.is_sole, bench.is_whole = False, True
    bench.books.work()
    assert bench.files() == []


def test_only_what_enough_members_hold_is_published(bench: Bench) -> None:
    """A block may be held in part."""
    bench.write(message(1))
    bench.write(*three(2))
    bench.high_watermark = 2
    bench.books.work()
    assert bench.rows() == bench.all_written()[:2]
    bench.high_watermark = 4
    bench.books.work()
    assert bench.files() == [file_name(1, 2), file_name(3, 4)]
    assert bench.rows() == bench.all_written()


def test_what_is_in_memory_of_a_file_has_a_bound(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaywheel_replica.server.ledger.source._ROW_GROUP", 10)
    monkeypatch.setattr(ledger_pages, "MAX_FILE_ROWS", 25)
    for number in range(20):
        bench.write(message(2 * number), message(2 * number + 1))
    bench.books.work()
    assert bench.files() == [file_name(1, 13), file_name(14, 20)]
    metadata = pq.ParquetFile(bench.path(file_name(1, 13))).metadata
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert groups == [10, 10, 6]
    assert bench.rows() == bench.all_written()


# --- after a restart


def test_after_a_restart_rows_that_are_missing_are_read_from_the_frames(bench: Bench) -> None:
    bench.write(message(1))
    bench.write(message(2))
    bench.books.work()
    bench.write(message(3))
    bench.write(message(4), enter=False)
    bench.write(message(4), kind=Kind.CANCELS, enter=False)
    bench.restart()
    bench.books.work()
    assert bench.rows() == bench.all_written()
    assert bench.published == {WHEEL: 5}


def test_gaps_between_blocks_are_read_from_the_frames(bench: Bench) -> None:
    bench.write(message(1), enter=False)
    bench.write(message(2))
    bench.write(message(3), enter=False)
    bench.write(message(4))
    bench.books.work()
    assert bench.rows() == bench.all_written()


def test_what_is_published_is_reported_at_once_and_not_looked_for(bench: Bench) -> None:
    bench.write(message(1))
    bench.books.work()
    bench.restart()
    bench.place.is_away = True
    assert not bench.books.work()
    assert bench.published == {WHEEL: 1}


@pytest.mark.parametrize("notes_are_gone", [True, False])
def test_names_show_what_notes_do_not_know(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *, notes_are_gone: bool
) -> None:
    """The process ended between a file in its place and the note of it; or all notes are lost."""
    bench.write(message(1))
    bench.books.work()
    bench.write(message(2))
    with monkeypatch.context() as broken:
        broken.setattr("delaywheel_replica.server.ledger.notes.Notes.place", _die)
        with pytest.raises(Died):
            bench.books.work()
    if notes_are_gone:
        (bench.data / "ledger" / "books.json").unlink()
    bench.restart()
    bench.write(message(3))
    bench.books.work()
    assert bench.files() == [file_name(1, 1), file_name(2, 2), file_name(3, 3)]
    assert bench.rows() == bench.all_written()


def test_another_place_goes_on_where_the_first_one_ended(bench: Bench) -> None:
    bench.write(message(1))
    bench.books.work()
    bench.folder = bench.data / "moved"
    bench.restart()
    bench.write(message(2))
    bench.books.work()
    assert bench.files() == [file_name(2, 2)]


def _die(*_: object, **__: object) -> None:
    raise Died


# --- frames that cannot be read


def test_a_frame_that_may_come_back_is_waited_for_and_reported(bench: Bench) -> None:
    bench.write(message(1), enter=False)
    bench.write(message(2, slot=BASE_SLOT + 1), enter=False)
    bench.write(message(3), enter=False)
    path = next((bench.data / "wheels").rglob(f"{BASE_SLOT + 1}.slot"))
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    bench.books.work()
    assert bench.files() == [file_name(1, 1)]
    assert bench.published == {WHEEL: 1}
    assert bench.unreadable == [(WHEEL, 2)]
    path.write_bytes(content)  # repaired
    bench.books.work()
    assert bench.rows() == bench.all_written()
    assert bench.published == {WHEEL: 3}


def test_a_lost_frame_is_a_gap_and_no_more(bench: Bench) -> None:
    bench.write(message(1), enter=False)
    bench.write(message(2, slot=BASE_SLOT + 1), message(3, slot=BASE_SLOT + 1), enter=False)
    bench.write(message(3), kind=Kind.CANCELS, enter=False)
    bench.write(message(4), enter=False, at_ms=ACCEPTED_AT_MS + 5)
    next((bench.data / "wheels").rglob(f"{BASE_SLOT + 1}.slot")).unlink()
    bench.lost = frozenset({2})
    bench.books.work()
    assert bench.files() == [file_name(1, 1), file_name(4, 4)]
    (name,) = bench.gaps()
    assert name == f"n1.1-{2:019}-{3:019}.json"
    gap = json.loads((bench.folder / "gaps" / name).read_text())
    assert gap.pop("recorded_at_ms") > ACCEPTED_AT_MS
    assert gap == {
        "wheel": "n1.1",
        "first_seq": 2,
        "last_seq": 3,
        "accepted_from_ms": ACCEPTED_AT_MS,
        "accepted_to_ms": ACCEPTED_AT_MS + 5,
        "messages": 2,
        "reason": "FRAMES_LOST",
        "node": "n1",
    }
    assert bench.published == {WHEEL: 4}
    state = bench.books.state()
    assert (state.gaps, state.gap_messages) == (1, 2)
    bench.restart()
    bench.write(message(5))
    bench.books.work()
    assert bench.files()[-1] == file_name(5, 5)


def test_a_lost_frame_whose_row_is_there_is_no_gap(bench: Bench) -> None:
    bench.write(message(1))
    bench.write(message(2, slot=BASE_SLOT + 1))
    next((bench.data / "wheels").rglob(f"{BASE_SLOT + 1}.slot")).unlink()
    bench.lost = frozenset({2})
    bench.books.work()
    assert bench.rows() == bench.all_written()
    assert bench.gaps() == []


# --- two nodes that might publish


def test_who_comes_back_looks_at_the_names_before_it_publishes(bench: Bench) -> None:
    """The wheel was closed while its node was away, and the leader's node published the rest."""
    bench.write(message(1))
    bench.books.work()
    bench.write(message(2))
    bench.write(message(3))
    bench.is_sole = False
    leaders = bench.new_books(node="n2")
    bench.high_watermark = 2
    assert leaders.work()
    assert bench.files() == [file_name(1, 1), file_name(2, 2)]
    bench.high_watermark = 3
    assert bench.books.work()  # of the node that was away, and continues with what it knew
    assert bench.files() == [file_name(1, 1), file_name(2, 2), file_name(3, 3)]
    bench.restart()
    assert leaders.work()
    assert bench.files() == [file_name(1, 1), file_name(2, 2), file_name(3, 3)]
    assert bench.rows() == bench.all_written()


def test_what_is_published_elsewhere_is_not_published_again(bench: Bench) -> None:
    """Nodes with places of their own: the leader finds no name of another's wheel in its own."""
    bench.write(message(1), enter=False)
    bench.write(message(2), enter=False)
    bench.reported_seq = 1
    bench.is_sole = False
    bench.books.work()
    assert bench.files() == [file_name(2, 2)]
    assert bench.published == {WHEEL: 2}


def test_what_another_gave_up_and_is_gone_is_a_gap(bench: Bench) -> None:
    """Its gap was reported, not yet in place, and its disk died: the frames are deleted."""
    bench.write(message(1))
    bench.books.work()
    bench.write(message(2, slot=BASE_SLOT + 1), enter=False)
    bench.write(message(3), enter=False)
    next((bench.data / "wheels").rglob(f"{BASE_SLOT + 1}.slot")).unlink()
    bench.reported_seq, bench.is_sole = 2, False
    bench.new_books(node="n2").work()
    assert bench.gaps() == [f"n1.1-{2:019}-{2:019}.json"]
    assert bench.files() == [file_name(1, 1), file_name(3, 3)]


# --- what is finished and deleted


def finished(bench: Bench, *slots: int) -> None:
    """The floor passes these slots, all the others lie above."""
    for slot in slots:
        next((bench.data / "wheels").rglob(f"{slot}.slot")).unlink()
    bench.floor = max(slots) + 1


def written_of_a_replaced_node(bench: Bench) -> None:
    """Three frames: that node published them in its own place, and the floor passed the first two.

    Its wheel is closed, and the leader's node publishes what of it is not published.
    """
    bench.is_sole = bench.is_shared = False
    bench.write(message(1), enter=False)
    bench.write(message(2, slot=BASE_SLOT + 1), enter=False)
    bench.write(message(3, slot=BASE_SLOT + 9), enter=False)
    finished(bench, BASE_SLOT, BASE_SLOT + 1)


@pytest.mark.parametrize("release", ["this", "one that noted no reports"])
def test_what_a_replaced_node_published_is_not_waited_for_once_all_were_stopped(
    bench: Bench, release: str
) -> None:
    written_of_a_replaced_node(bench)
    bench.reported_seq = 3
    bench.restart()
    bench.books.work()  # of a node that holds the wheel, whether it publishes it or not
    bench.reported_seq = 0  # all nodes are stopped, and none remembers
    if release != "this":
        (bench.data / "ledger" / "books.json").unlink()
    bench.restart()
    assert bench.books.work()
    assert bench.published == {WHEEL: 3}
    assert bench.unreadable == []
    assert bench.gaps() == []
    assert bench.files() == ([] if release == "this" else [file_name(3, 3)])


def test_what_another_node_published_in_its_own_place_is_no_gap(bench: Bench) -> None:
    """This node led and published the first frame, then another node the second."""
    bench.is_sole = bench.is_shared = False
    for number in range(3):
        bench.write(message(number, slot=BASE_SLOT + number), enter=False)
    bench.high_watermark = 1
    bench.restart()
    assert bench.books.work()
    assert bench.files() == [file_name(1, 1)]
    bench.high_watermark, bench.reported_seq = 3, 2
    finished(bench, BASE_SLOT, BASE_SLOT + 1)
    assert bench.books.work()
    assert bench.gaps() == []
    assert bench.unreadable == []
    assert bench.files() == [file_name(1, 1), file_name(3, 3)]


def test_what_is_deleted_and_was_never_in_a_shared_place_is_a_gap(bench: Bench) -> None:
    bench.write(message(1))
    bench.books.work()
    bench.write(message(2, slot=BASE_SLOT + 1), enter=False)
    bench.write(message(3, slot=BASE_SLOT + 9), enter=False)
    finished(bench, BASE_SLOT + 1)
    bench.restart()
    assert bench.books.work()
    assert bench.gaps() == [f"n1.1-{2:019}-{2:019}.json"]
    assert bench.files() == [file_name(1, 1), file_name(3, 3)]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("published", [2, 3, 4])
def test_a_gap_that_another_node_could_fill_is_none(bench: Bench, published: int) -> None:
    """Its frames were still there when the leader's node published them from its copy."""
    for number in range(4):
        bench.write(message(number))
    bench.high_watermark, bench.is_full, bench.place.is_away = 3, True, True
    assert not bench.books.work()
    assert bench.published == {WHEEL: 3}
    bench.is_full, bench.is_sole, bench.place.is_away = False, False, False
    bench.high_watermark = published
    leaders = bench.data / "n2"
    shutil.copytree(bench.data / "wheels", leaders / "wheels")
    others = Books(
        bench.disk,
        leaders,
        Ledger(bench.disk, leaders),
        BooksConfig("n2", "", 60),
        BenchMember(bench),
        place_at=lambda: FragilePlace(bench.folder, node="n2"),
    )
    assert others.work()
    bench.high_watermark = 4
    assert bench.books.work()
    expected = [f"n1.1-{published + 1:019}-{3:019}.json"] if published < 3 else []
    assert bench.gaps() == expected
    assert bench.published == {WHEEL: 4}
    rows = bench.all_written()
    assert bench.rows() == [*rows[:published], *rows[max(3, published) :]]


# --- wheels that are gone


def test_a_wheel_that_is_gone_leaves_nothing_behind_but_gaps_that_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_PATIENCE_S", 0.0)
    bench.place.is_away = bench.is_full = True
    bench.write(message(1))
    bench.books.work()
    bench.restart()
    monkeypatch.setattr(bench, "publishable", dict)
    monkeypatch.setattr(bench, "reported", dict)
    assert bench.books.work()
    assert bench.gaps() == [f"n1.1-{1:019}-{1:019}.json"]
    assert not rows_folder(bench.data, WHEEL).exists()
    assert json.loads((bench.data / "ledger" / "books.json").read_text()) == {
        "placed": {},
        "gaps": [],
        "reported": {},
    }


@pytest.mark.parametrize("notes_are_gone", [True, False])
def test_what_was_published_beyond_the_end_of_a_wheel_disturbs_nobody(
    bench: Bench, *, notes_are_gone: bool
) -> None:
    """All disks lost it to a crash of the machines, and the wheel was closed below."""
    for number in range(3):
        bench.write(message(number))
    bench.books.work()
    files = bench.files()
    bench.high_watermark, bench.is_sole = 2, False
    if notes_are_gone:
        (bench.data / "ledger" / "books.json").unlink()
    bench.restart()
    assert bench.books.work()
    assert bench.published[WHEEL] >= 2
    assert bench.files() == files


@pytest.mark.usefixtures("impatient")
def test_a_disk_without_a_byte_left_has_room_for_the_gap_that_frees_it(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    bench = Bench(Path("/data"), disk=disk, folder=tmp_path)
    bench.books.work()
    bench.write(message(1))
    disk.capacity_bytes = disk.used_bytes
    bench.is_full = bench.place.is_away = True
    assert not bench.books.work()
    assert bench.published == {WHEEL: 1}
    assert bench.books.state().gap_messages == 1
    # Once there is room, it is taken again.
    disk.capacity_bytes = None
    bench.is_full = bench.place.is_away = False
    assert bench.books.work()
    assert disk.exists(Path("/data/ledger/ballast"))
