from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.slot_table import load_head
from delaywheel.storage.files.wheel_folder import list_wheels, make_wheel
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import index_rows
from delaywheel.storage.writing import dial as dial_module
from delaywheel.storage.writing.dial import HORIZONS, Dial, DialView
from sim.machine.disk import SimulatedDisk
from support.wheels.copies import bundled, copies_of, count_again, open_copy, recover_wheel
from support.wheels.messages import BASE_SLOT, columns_of, message, names_of
from support.wheels.wheels import ACCEPTED_AT_MS, append, new_wheel

DATA = Path("/data")


def row_of(view: DialView, slot: int) -> Any:
    """The row of one slot; None if it has none."""
    rows = view.rows(slot, slot + 1)
    return rows[0] if len(rows) else None


def counts(view: DialView, slot: int) -> tuple[int, ...] | None:
    row = row_of(view, slot)
    return None if row is None else tuple(int(row[name]) for name in row.dtype.names or ())


def test_counts_of_two_wheels_and_cancels(tmp_path: Path) -> None:
    disk = PosixDisk()
    dial = Dial(disk, tmp_path, 100)
    view = DialView(disk, tmp_path)
    length_bytes = 0
    for number in (1, 2):
        wheel = new_wheel(disk, tmp_path, number, dial=dial)
        columns = columns_of([message(1), message(2)])
        cancels = names_of(columns)
        group = wheel.append(columns, accepted_at_ms=ACCEPTED_AT_MS)
        length_bytes += group.bundle.length_bytes
        group = wheel.append(cancels, kind=Kind.CANCELS, accepted_at_ms=ACCEPTED_AT_MS)
        length_bytes += group.bundle.length_bytes
    append(wheel, [message(3, slot=BASE_SLOT + 1)])
    expected = (BASE_SLOT, 4, length_bytes, 4, 4, 2)
    assert counts(view, BASE_SLOT) == expected
    assert view.rows()["slot"].tolist() == [BASE_SLOT, BASE_SLOT + 1]
    assert view.rows(BASE_SLOT + 1, BASE_SLOT + 2)["messages"].tolist() == [1]
    again = Dial(disk, tmp_path, 100)
    view = DialView(disk, tmp_path)
    assert len(view.rows()) == 0
    count_again(again, disk, tmp_path, floor=BASE_SLOT)
    assert counts(view, BASE_SLOT) == expected
    again.clear_below(BASE_SLOT + 1)
    assert counts(view, BASE_SLOT) is None
    assert counts(view, BASE_SLOT + 1) is not None


def test_a_row_proves_its_slot() -> None:
    disk = SimulatedDisk()
    dial = Dial(disk, DATA, 10)
    view = DialView(disk, DATA)
    wheel = new_wheel(disk, DATA, dial=dial)
    append(wheel, [message(1, slot=BASE_SLOT)])
    append(wheel, [message(2, slot=BASE_SLOT + 10), message(3, slot=BASE_SLOT + 20)])
    assert counts(view, BASE_SLOT) is None, "the newer slot has the row"
    assert counts(view, BASE_SLOT + 10) is None
    newest = counts(view, BASE_SLOT + 20)
    append(wheel, [message(4, slot=BASE_SLOT)])
    assert counts(view, BASE_SLOT + 20) == newest
    assert newest is not None
    assert newest[1] == 1


@pytest.mark.parametrize("count", [1, 40])
def test_what_comes_for_a_finished_second_is_not_counted(count: int) -> None:
    disk = SimulatedDisk()
    dial = Dial(disk, DATA, 100)
    wheel = new_wheel(disk, DATA, dial=dial)
    append(wheel, [message(n, slot=BASE_SLOT + n) for n in range(count)])
    dial.clear_below(BASE_SLOT + 5)
    dial.clear_below(BASE_SLOT + 2)  # a floor never goes back
    append(wheel, [message(n, slot=BASE_SLOT + n) for n in range(count)])
    left = list(range(BASE_SLOT + 5, BASE_SLOT + count))
    assert DialView(disk, DATA).rows()["slot"].tolist() == left
    again = Dial(disk, DATA, 100)
    again.clear_below(BASE_SLOT + 5)
    count_again(again, disk, DATA, floor=0)
    assert DialView(disk, DATA).rows()["slot"].tolist() == left


def test_a_floor_further_on_than_the_dial_is_long_empties_it() -> None:
    disk = SimulatedDisk()
    dial = Dial(disk, DATA, 10)
    append(new_wheel(disk, DATA, dial=dial), [message(1, slot=BASE_SLOT + 7)])
    dial.clear_below(BASE_SLOT + 5)
    dial.clear_below(BASE_SLOT + 1_000)
    assert len(DialView(disk, DATA).rows()) == 0


def test_a_dial_of_another_size_is_recreated() -> None:
    disk = SimulatedDisk()
    append(new_wheel(disk, DATA, dial=Dial(disk, DATA, 10)), [message(1)])
    Dial(disk, DATA, 20)
    assert len(DialView(disk, DATA).rows()) == 0


def test_no_node_ever_ran_here() -> None:
    with pytest.raises(FileNotFoundError):
        DialView(SimulatedDisk(), DATA)


def test_pending_by_horizon() -> None:
    disk = SimulatedDisk()
    dial = Dial(disk, DATA, 200_000)
    view = DialView(disk, DATA)
    wheel = new_wheel(disk, DATA, dial=dial)
    now = BASE_SLOT + 1_000
    ahead = {
        -900: "",  # done
        -5: "overdue",
        -1: "overdue",
        0: "1s",
        1: "10s",
        9: "10s",
        10: "1m",
        59: "1m",
        60: "10m",
        599: "10m",
        600: "1h",
        3_599: "1h",
        3_600: "1d",
        86_399: "1d",
        86_400: "beyond",
        90_000: "beyond",
    }
    for number, seconds in enumerate(ahead):
        append(wheel, [message(number, slot=now + seconds)])
    found = view.pending(now, now - 5)
    assert [horizon for horizon, _, _ in found] == [name for name, _ in HORIZONS]
    wanted = list(ahead.values())
    assert {horizon: messages for horizon, messages, _ in found} == {
        name: wanted.count(name) for name, _ in HORIZONS
    }
    rows = view.rows(now - 5)
    assert sum(length for _, _, length in found) == int(rows["length_bytes"].sum())
    assert [messages for _, messages, _ in view.pending(now, now + 100_000)] == [0] * len(HORIZONS)


def test_what_is_cancelled_is_not_pending() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA, dial=Dial(disk, DATA, 100))
    append(wheel, [*map(message, range(3)), message(3, slot=BASE_SLOT + 1)])

    def counted_after(*cancelled: int) -> dict[str, int]:
        columns = columns_of([message(number) for number in cancelled])
        cancels = names_of(columns)
        wheel.append(cancels, kind=Kind.CANCELS, accepted_at_ms=ACCEPTED_AT_MS)
        pending = DialView(disk, DATA).pending(BASE_SLOT, 0)
        return {horizon: messages for horizon, messages, _ in pending if messages}

    assert counted_after(0) == {"1s": 2, "10s": 1}
    assert counted_after(1, 2) == {"10s": 1}
    assert counted_after(0) == {"10s": 1}, "a second cancel takes nobody else's message away"


def left(disk: SimulatedDisk, done_slot: int = 0) -> dict[int, int]:
    """How many messages of each second are pending."""
    rows = DialView(disk, DATA).rows(done_slot)
    found = {int(row["slot"]) - BASE_SLOT: int(row["messages"] - row["cancels"]) for row in rows}
    pending = DialView(disk, DATA).pending(BASE_SLOT, done_slot)
    assert sum(messages for _, messages, _ in pending) == sum(found.values())
    return found


def counted_anew(disk: SimulatedDisk) -> dict[int, int]:
    """What a server counts that was killed, and starts again."""
    disk.restart()
    for wheel in list_wheels(disk, DATA):
        recover_wheel(disk, DATA, wheel, os_crashed=False)
    count_again(Dial(disk, DATA, 100), disk, DATA, floor=BASE_SLOT)
    return left(disk)


@pytest.mark.parametrize("has_table", [False, True])
def test_counts_of_halves_outlast_restarts_and_replaced_nodes(*, has_table: bool) -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA, dial=Dial(disk, DATA, 100), table_rows=1)
    held, delayed, released, rolled_back, asked = (message(number) for number in range(5))
    append(wheel, [held, delayed, released, rolled_back, asked])
    named = ((Kind.COMMITS, delayed), (Kind.RELEASES, released), (Kind.CANCELS, rolled_back))
    for kind, half in named:
        columns = columns_of([half])
        rows = names_of(columns)
        wheel.append(rows, kind=kind, accepted_at_ms=ACCEPTED_AT_MS)
    append(wheel, [replace(delayed, due_ms=delayed.due_ms + 30_000)])  # its message
    if has_table:
        wheel.checkpoint()
    assert bool(load_head(disk, layout.wheel_folder(DATA, wheel.wheel)).seq) is has_table
    # A half that is committed with a delay is there until its hold ends, as its message is.
    expected = {0: 3, 30: 1}
    assert left(disk) == expected
    replacing = SimulatedDisk()
    dial = Dial(replacing, DATA, 100)
    make_wheel(replacing, DATA, wheel.meta)
    copy = open_copy(replacing, DATA, wheel.wheel, HandleCache(replacing, 2), dial=dial)
    copy.append(bundled(copies_of(disk, DATA, wheel.wheel)))
    assert left(replacing) == expected
    assert counted_anew(disk) == expected
    assert counted_anew(replacing) == expected
    assert left(disk, BASE_SLOT + 1) == {30: 1}, "whoever was asked is nobody's pending message"


def test_pending_of_an_empty_dial() -> None:
    disk = SimulatedDisk()
    Dial(disk, DATA, 10)
    assert {messages for _, messages, _ in DialView(disk, DATA).pending(BASE_SLOT, 0)} == {0}


@given(
    st.lists(
        st.tuples(
            st.integers(1, 20),
            st.sampled_from([0, 8]),
            st.sampled_from([0, 64]),
            st.sampled_from(Kind),
        ),
        min_size=17,
        max_size=30,
    ),
    st.integers(1, 16),
)
def test_few_frames_are_counted_as_many_are(
    given_: list[tuple[int, int, int, Kind]], few: int
) -> None:
    """Also where two seconds meet in a row of the dial."""
    rows = np.concatenate(
        [
            index_rows(*(np.array([n]) for n in (*numbers, 2)), kind=kind)
            for *numbers, kind in given_
        ]
    )
    tables = []
    for step in (len(rows), few):
        disk = SimulatedDisk()
        dial = Dial(disk, DATA, 7)
        for first in range(0, len(rows), step):
            dial.add(rows[first : first + step])
        tables.append(DialView(disk, DATA).rows().tolist())
    assert tables[0] == tables[1]


@given(
    slots=st.lists(st.integers(BASE_SLOT, BASE_SLOT + 79), min_size=1, max_size=20),
    first=st.integers(BASE_SLOT - 5, BASE_SLOT + 80),
    length=st.none() | st.integers(0, 90),
    bucket_s=st.integers(2, 100),
)
def test_sums_are_those_of_the_seconds(
    slots: list[int], first: int, length: int | None, bucket_s: int
) -> None:
    """In a table that the seconds go round, and with bounds that cut buckets."""
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA, dial=Dial(disk, DATA, 80))
    for number, slot in enumerate(slots):
        append(wheel, [message(number, slot=slot)])
    view, last = DialView(disk, DATA), None if length is None else first + length
    wanted = [slot for slot in slots if first <= slot and (last is None or slot < last)]
    assert view.rows(first, last)["slot"].tolist() == sorted({*wanted})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dial_module, "_PIECE_ROWS", 7)  # so that a bucket lies in several pieces
        sums, expected = view.sums(first, last, bucket_s), Counter(s // bucket_s for s in wanted)
    assert sums["slot"].tolist() == [bucket * bucket_s for bucket in sorted(expected)]
    assert sums["messages"].tolist() == [expected[bucket] for bucket in sorted(expected)]
    length_bytes = sum(
        int(row["length_bytes"]) for slot in {*wanted} if (row := row_of(view, slot)) is not None
    )
    assert int(sums["length_bytes"].sum()) == length_bytes
