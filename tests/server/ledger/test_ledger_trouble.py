"""The ledger while its place is away or hangs, or the disk is full."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.server.ledger import publisher as publish
from delaywheel_replica.server.ledger.publisher import Books, BooksConfig
from delaywheel_replica.server.ledger.rows import rows_folder
from sim.machine.disk import Fault, SimulatedDisk
from support.services.waiting import wait_until
from support.wheels.books import (
    ACCEPTED_AT_MS,
    WHEEL,
    Bench,
    BenchMember,
    file_name,
)
from support.wheels.messages import message


def test_while_the_place_is_away_nothing_is_reported_and_nothing_is_lost(bench: Bench) -> None:
    bench.write(message(1))
    bench.books.work()
    bench.place.is_away = True
    for number in (2, 3):
        bench.write(message(number))
        assert not bench.books.work()
    state = bench.books.state()
    assert state.failure
    assert "away" in state.failure
    since_ms = state.failing_since_ms
    assert since_ms
    assert bench.published == {WHEEL: 1}
    assert not bench.books.work()
    assert bench.books.state().failing_since_ms == since_ms
    bench.place.is_away = False
    assert bench.books.work()
    assert (bench.books.state().failure, bench.books.state().failing_since_ms) == (None, None)
    assert bench.rows() == bench.all_written()
    assert bench.published == {WHEEL: 3}


@pytest.mark.parametrize(
    "fault", [Fault("open"), Fault("read", error=errno.EUCLEAN), Fault("read", countdown=1)]
)
def test_rows_that_cannot_be_read_are_taken_from_the_frames(tmp_path: Path, fault: Fault) -> None:
    """The place fills otherwise what no reading will end: the floor waits for it."""
    disk = SimulatedDisk()
    bench = Bench(Path("/data"), disk=disk, folder=tmp_path)
    for number in (1, 2):
        bench.write(message(number))
    disk.faults += [replace(fault, path_part=".rows") for _ in range(9)]
    assert bench.books.work()
    assert bench.rows() == bench.all_written()
    assert bench.published == {WHEEL: 2}
    assert not bench.local_files()


def test_rows_that_are_gone_are_taken_from_the_frames(bench: Bench) -> None:
    bench.write(message(1))
    bench.ledger.seal()
    (name,) = bench.local_files()
    bench.restart()
    (rows_folder(bench.data, WHEEL) / name).unlink()
    assert bench.books.work()
    assert bench.rows() == bench.all_written()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_node_starts_without_notes_that_cannot_be_read(
    tmp_path: Path, *, is_shared: bool
) -> None:
    disk = SimulatedDisk()
    bench = Bench(Path("/data"), disk=disk, folder=tmp_path)
    bench.is_shared = is_shared
    bench.write(message(1))
    bench.books.work()
    bench.write(message(2))
    disk.faults.append(Fault("read", error=errno.EBADMSG, path_part="books.json"))
    bench.restart()
    assert bench.books.work()
    assert bench.rows() == bench.all_written()
    assert bench.published == {WHEEL: 2}


@pytest.fixture
def hanging(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """A place that neither answers nor fails until the event is set."""
    answers, reach = Event(), bench.place.reach

    def hang() -> None:
        answers.wait(60)
        reach()

    monkeypatch.setattr(bench.place, "reach", hang)
    yield answers
    answers.set()
    bench.books.stop()


def test_a_place_that_hangs_is_reported(
    bench: Bench, hanging: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_PATIENCE_S", 0.1)
    began_ms = time.time_ns() // 1_000_000
    bench.write(message(1))
    bench.books.start()
    wait_until("it is reported", lambda: bench.books.state().failure)
    state = bench.books.state()
    assert state.failure == "does not answer"
    assert state.failing_since_ms is not None
    # The two clocks by which it is reckoned are read one after the other.
    assert began_ms - 100 <= state.failing_since_ms <= time.time_ns() // 1_000_000
    monkeypatch.setattr(publish, "_PATIENCE_S", 60.0)
    hanging.set()
    wait_until("it is published", lambda: bench.books.state().files)
    wait_until("it is well", lambda: bench.books.state().failure is None)


def test_a_place_that_is_slow_and_answers_is_well(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass may last long: many hours to list, a large file to send."""
    failures: list[str | None] = []
    reach = bench.place.reach

    def slow() -> None:
        assert bench.books._moved_s is not None
        bench.books._moved_s -= 60
        bench.place._answered_s -= 60
        failures.append(bench.books.state().failure)
        reach()
        failures.append(bench.books.state().failure)

    monkeypatch.setattr(bench.place, "reach", slow)
    assert bench.books.work()
    assert failures == ["does not answer", None]


def test_a_place_that_hangs_keeps_no_node_from_ending(
    bench: Bench, hanging: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(message(1))
    bench.books.start()
    with monkeypatch.context() as hasty:
        hasty.setattr(publish, "_PATIENCE_S", 0.1)
        bench.books.stop()
    assert not hanging.is_set()
    assert bench.published == {}
    hanging.set()
    bench.books.stop()
    assert bench.published == {WHEEL: 1}


@pytest.mark.parametrize("uri", ["s3://key:hidden@bucket/a b", "gopher://key:hidden@bucket/a"])
def test_why_a_place_fails_is_reported_without_its_secrets(bench: Bench, uri: str) -> None:
    books = Books(
        bench.disk, bench.data, bench.ledger, BooksConfig("n1", uri, 60), BenchMember(bench)
    )
    assert not books.work()
    assert "://bucket/a" in str(books.state().failure)
    assert "hidden" not in str(books.state())


def test_a_full_disk_and_a_place_that_was_there_just_now_give_up_nothing(bench: Bench) -> None:
    bench.write(message(1))
    bench.place.is_away = bench.is_full = True
    assert not bench.books.work()
    assert bench.published == {}
    assert bench.books.state().gaps == 0


@pytest.mark.usefixtures("impatient")
def test_a_full_disk_alone_gives_up_nothing(bench: Bench) -> None:
    bench.is_full = True
    bench.write(message(1))
    assert bench.books.work()
    assert bench.rows() == bench.all_written()
    assert bench.gaps() == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("restarts", [True, False])
def test_at_the_reserve_with_the_place_away_rows_are_given_up_and_the_floor_goes_on(
    bench: Bench, *, restarts: bool
) -> None:
    bench.write(message(1))
    bench.books.work()
    bench.place.is_away = True
    bench.write(message(2), message(3))
    bench.books.work()
    bench.is_full = True
    assert not bench.books.work()
    # Noted durably before it was reported, and the local rows are gone: that is what is wanted.
    assert bench.published == {WHEEL: 2}
    assert bench.local_files() == []
    assert (bench.books.state().gaps, bench.books.state().gap_messages) == (1, 2)
    bench.is_full = False
    bench.write(message(4), at_ms=ACCEPTED_AT_MS + 9)
    bench.books.work()
    assert bench.published == {WHEEL: 2}
    if restarts:
        bench.restart()
        bench.place.is_away = True
        bench.books.work()
        assert bench.published == {WHEEL: 2}
        assert (bench.books.state().gaps, bench.books.state().gap_messages) == (1, 2)
    # Full again: the gap that waits becomes longer.
    bench.is_full = True
    bench.books.work()
    assert bench.published == {WHEEL: 3}
    bench.is_full = bench.place.is_away = False
    bench.write(message(5))
    assert bench.books.work()
    (name,) = bench.gaps()
    assert name == f"n1.1-{2:019}-{3:019}.json"
    gap = json.loads((bench.folder / "gaps" / name).read_text())
    assert (gap["messages"], gap["reason"]) == (3, "DISK_RESERVE")
    assert (gap["accepted_from_ms"], gap["accepted_to_ms"]) == (ACCEPTED_AT_MS, ACCEPTED_AT_MS + 9)
    assert bench.files() == [file_name(1, 1), file_name(4, 4)]
    assert bench.published == {WHEEL: 4}


@pytest.mark.usefixtures("impatient")
def test_cancels_alone_are_no_gap(bench: Bench) -> None:
    bench.place.is_away = bench.is_full = True
    bench.write(message(1), kind=Kind.CANCELS)
    assert not bench.books.work()
    assert bench.published == {WHEEL: 1}
    assert bench.books.state().gaps == 0


@pytest.mark.usefixtures("impatient")
def test_a_gap_that_cannot_be_noted_is_not_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.place.is_away = bench.is_full = True
    bench.write(message(1))
    with monkeypatch.context() as broken:
        broken.setattr("delaywheel.storage.folder.disk.PosixDisk.replace_file", _refuse)
        assert not bench.books.work()
    assert bench.published == {}
    assert bench.books.state().gaps == 0
    assert bench.local_files() != []
    assert not bench.books.work()
    assert bench.published == {WHEEL: 1}


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError("no space left")
