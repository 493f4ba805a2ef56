"""kill -9 at any point: nothing acknowledged is missing in the ledger, and nothing is twice.

The process ends before every step in turn, of the place and of the disk; costs 3 s.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path

import pytest

from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.server.ledger.notes import Notes
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.wheels.books import ACCEPTED_AT_MS, WHEEL, Bench, Died
from support.wheels.messages import BASE_SLOT, message

LATER_MS = ACCEPTED_AT_MS + 3_600_000
_NAME = re.compile(r"(.+)-(\d{19})-(\d{19})(?:-\d{10}-\d{10})?\.parquet")

LIFE: tuple[Callable[[Bench], object], ...] = (
    lambda bench: bench.write(message(1), message(2, slot=BASE_SLOT + 1)),
    lambda bench: bench.books.work(),
    lambda bench: bench.write(message(1), kind=Kind.CANCELS),
    lambda bench: bench.books.work(),
    lambda bench: bench.write(message(3), enter=False),
    lambda bench: bench.write(message(4), at_ms=LATER_MS),
    lambda bench: bench.write(
        *[message(n, slot=BASE_SLOT + n) for n in range(5, 9)], at_ms=LATER_MS
    ),
    lambda bench: bench.books.work(),
    lambda bench: bench.write(message(9), at_ms=LATER_MS),
    lambda bench: bench.books.work(),
)
"""The steps of a wheel and its books; the process may end in each of them."""


def test_what_is_noted_outlives_the_machine_with_its_folder() -> None:
    disk, data = SimulatedDisk(), Path("/data")
    disk.make_folder(data)
    Notes(disk, data).place(WHEEL, 7)
    disk.lose_unsynced()
    assert Notes(disk, data).placed(WHEEL) == 7


def test_what_an_earlier_process_noted_outlives_the_machine_once_it_was_read() -> None:
    """It died behind the rename: what was deleted since would count as lost otherwise."""
    disk, data = SimulatedDisk(), Path("/data")
    disk.make_folder(data)
    notes = Notes(disk, data)
    notes.place(WHEEL, 7)
    disk.faults.append(Fault("sync", path_part="books.json"))
    with pytest.raises(OSError, match="Input/output"):
        notes.place(WHEEL, 9)
    assert Notes(disk, data).placed(WHEEL) == 9
    disk.lose_unsynced()
    assert Notes(disk, data).placed(WHEEL) == 9


def ranges(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """The names of each wheel, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for path in folder.rglob("*.parquet"):
        match = _NAME.fullmatch(path.name)
        assert match is not None
        found.setdefault(match[1], []).append((int(match[2]), int(match[3])))
    return {wheel: sorted(names) for wheel, names in found.items()}


def check_names(folder: Path) -> None:
    for names in ranges(folder).values():
        assert names[0][0] == 1
        assert all(before[1] + 1 == after[0] for before, after in pairwise(names))


def check(bench: Bench) -> None:
    assert bench.rows() == bench.all_written()
    check_names(bench.folder)
    assert bench.published == {WHEEL: bench.high_watermark}


def test_the_process_may_end_at_any_step_of_the_place(tmp_path: Path) -> None:
    for step in count():
        bench = Bench(tmp_path / str(step))
        bench.place.dies_before_step = step
        has_died = False
        for event in LIFE:
            try:
                event(bench)
            except Died:
                has_died = True
                bench.restart()
        if has_died:
            bench.books.work()
        check(bench)
        if not has_died:
            break
    assert step > 15


def test_the_process_may_end_at_any_effect_on_the_disk(tmp_path: Path) -> None:
    for torn_share in (0.0, 0.5):
        for effect in count():
            folder = tmp_path / f"{torn_share}-{effect}"
            disk = SimulatedDisk()
            bench = Bench(Path("/data"), disk=disk, folder=folder)
            disk.crash_after(effect, torn_share=torn_share)
            has_died = False
            try:
                for event in LIFE:
                    event(bench)
            except Crash:
                has_died = True
            disk.restart()
            bench.restart()
            bench.books.work()
            if bench.high_watermark:
                check(bench)
            if not has_died:
                break
        assert effect > 40
