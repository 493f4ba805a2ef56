"""The slot table: it is built, trusted only as far as it agrees, and never required."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.slot_table import (
    ENTRY_LENGTH_BYTES,
    TableHead,
    load_head,
    read_entries,
)
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.format import DamageReason, Frame
from delaywheel.storage.frames.rows import Places
from delaywheel.storage.reading.places import SlotPlaces
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.writing.wheel import OriginWheel
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.wheels.messages import BASE_SLOT, Message, message, messages_of
from support.wheels.wheels import append, delete_below, new_wheel

DATA = Path("/data")
HOUR = 3600
SLOTS = (0, 1, 5, HOUR + 1, 30 * HOUR)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots for which the index was scanned."""
    scanned, slots = SlotPlaces.scanned, []

    def counted(places: SlotPlaces, slot: int, last_seq: int) -> Places:
        slots.append(slot)
        return scanned(places, slot, last_seq)

    monkeypatch.setattr(SlotPlaces, "scanned", counted)
    return slots


class Bench:
    """One wheel whose table covers all of its frames except the last few."""

    def __init__(self, groups: int = 6, behind: int = 2, *, table_rows: int = 2) -> None:
        self.disk = SimulatedDisk()
        self.wheel: OriginWheel = new_wheel(self.disk, DATA, table_rows=table_rows)
        self.folder = layout.wheel_folder(DATA, self.wheel.wheel)
        self.frames: dict[int, list[Message]] = {}
        for number in range(groups):
            self.append(number)
        self.wheel.checkpoint()
        for number in range(groups, groups + behind):
            self.append(number)

    def append(self, number: int) -> None:
        slots = [ahead for place, ahead in enumerate(SLOTS) if (number + place) % 3]
        self.frames |= append(self.wheel, [message(number, slot=BASE_SLOT + at) for at in slots])

    def expected(self, slot: int, up_to_seq: int) -> dict[int, list[Message]]:
        return {
            seq: messages
            for seq, messages in self.frames.items()
            if messages[0].due_ms // 1000 == slot and seq <= up_to_seq
        }

    def assert_found(self, reader: WheelReader | None = None) -> None:
        reader = reader or WheelReader(self.disk, DATA, self.wheel.wheel)
        for slot in (*(BASE_SLOT + ahead for ahead in SLOTS), BASE_SLOT + 2):
            for up_to_seq in (0, 3, self.wheel.last_seq // 2, self.wheel.last_seq, 1 << 40):
                found = list(reader.slot_frames(slot, up_to_seq))
                assert {
                    frame.seq: messages_of(frame.columns)
                    for frame in found
                    if isinstance(frame, Frame)
                } == self.expected(slot, up_to_seq)
                assert len(found) == len(self.expected(slot, up_to_seq))
        slots = {messages[0].due_ms // 1000 for messages in self.frames.values()}
        assert reader.indexed_slots(BASE_SLOT, BASE_SLOT + 40 * HOUR).tolist() == sorted(slots)

    def entry(self, ahead: int) -> Any:
        """The table's entry of a slot; None: it is damaged."""
        hour, second = divmod(BASE_SLOT + ahead, HOUR)
        head = load_head(self.disk, self.folder)
        entries, damaged = read_entries(self.disk, self.folder, head, hour)
        return None if damaged[second] else entries[second]

    def slot_path(self, ahead: int) -> Path:
        return layout.slot_path(self.folder, BASE_SLOT + ahead)

    def table_path(self, ahead: int = 0) -> Path:
        return layout.table_path(self.folder, (BASE_SLOT + ahead) // HOUR)


def test_a_second_is_found_without_a_scan_of_the_index(scans: list[int]) -> None:
    bench = Bench()
    reader = WheelReader(bench.disk, DATA, bench.wheel.wheel)
    bench.assert_found(reader)
    assert load_head(bench.disk, bench.folder).seq == 20
    for number in range(8, 12):  # the reader's head becomes old, entries and rows continue
        bench.append(number)
        bench.assert_found(reader)
        bench.wheel.checkpoint()
        bench.assert_found(reader)
    assert not scans


def test_an_entry_says_how_much_a_slot_holds() -> None:
    bench = Bench(behind=0)
    for ahead in (0, 30 * HOUR):
        entry = bench.entry(ahead)
        assert entry is not None
        frames = bench.expected(BASE_SLOT + ahead, 1 << 40)
        assert int(entry["frames"]) == int(entry["messages"]) == len(frames)
        assert int(entry["last_seq"]) == max(frames)
        size = len(bench.disk.content(bench.slot_path(ahead)))
        assert int(entry["end"]) * 8 == int(entry["length"]) * 8 == size
    head = load_head(bench.disk, bench.folder)
    assert head.top_slot == BASE_SLOT + 30 * HOUR
    assert len(head.hours) == 3


@pytest.mark.parametrize("how", ["head", "hour", "entry", "all"])
def test_without_its_table_a_wheel_is_read_from_the_index(how: str) -> None:
    bench = Bench()
    if how == "head":
        bench.disk.flip_bit(layout.table_head_path(bench.folder), 100)
    elif how == "hour":
        bench.disk.delete(bench.table_path())
    elif how == "entry":
        at = BASE_SLOT % HOUR * ENTRY_LENGTH_BYTES + 16
        bench.disk.flip_bit(bench.table_path(), 8 * at)
    else:
        bench.disk.delete_folder(layout.table_folder(bench.folder))
    bench.assert_found()


def test_a_damaged_entry_is_counted_anew(scans: list[int]) -> None:
    bench = Bench()
    at = BASE_SLOT % HOUR * ENTRY_LENGTH_BYTES
    bench.disk.flip_bit(bench.table_path(), 8 * at)
    assert bench.entry(0) is None
    bench.wheel.checkpoint()
    assert load_head(bench.disk, bench.folder).stale == frozenset()
    bench.assert_found()
    assert not scans


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_second_is_missed_though_its_page_of_the_table_says_that_it_has_nothing(
    *, is_cut: bool
) -> None:
    bench = Bench()
    content = bytearray(bench.disk.content(bench.table_path()))
    at = BASE_SLOT % HOUR * ENTRY_LENGTH_BYTES
    if is_cut:
        del content[at:]
    else:
        content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    bench.disk.set_content(bench.table_path(), bytes(content))
    bench.disk.delete(bench.slot_path(1))
    slot = BASE_SLOT + 1
    reader = WheelReader(bench.disk, DATA, bench.wheel.wheel)
    assert slot in reader.indexed_slots(slot, slot + 1)
    found = list(reader.slot_frames(slot, 1 << 40))
    assert [frame.seq for frame in found] == sorted(bench.expected(slot, 1 << 40))


@pytest.mark.parametrize("seq_is_behind", [False, True])
def test_a_file_that_is_shorter_than_the_table_says_is_missed(*, seq_is_behind: bool) -> None:
    bench = Bench(behind=3 if seq_is_behind else 0)
    slot = BASE_SLOT + 1
    *rest, last = bench.expected(slot, 1 << 40)
    content = bench.disk.content(bench.slot_path(1))
    bench.disk.set_content(bench.slot_path(1), content[:-8])
    reader = WheelReader(bench.disk, DATA, bench.wheel.wheel)
    found = list(reader.slot_frames(slot, 1 << 40))
    assert [frame.seq for frame in found] == [*rest, last]
    assert [frame.seq for frame in found if isinstance(frame, DamagedFrame)] == [last]
    bench.disk.delete(bench.slot_path(1))
    gone = list(reader.slot_frames(slot, 1 << 40))
    assert [frame.seq for frame in gone] == [*rest, last]
    assert {frame.reason for frame in gone if isinstance(frame, DamagedFrame)} == {
        DamageReason.GONE
    }
    assert slot in reader.indexed_slots(slot, slot + 1)


def test_a_flipped_bit_anywhere_in_a_slot_file_names_the_frame_that_it_hits() -> None:
    bench = Bench(groups=4, behind=1)
    frames = bench.expected(BASE_SLOT, 1 << 40)
    content = bench.disk.content(bench.slot_path(0))
    length = len(content) // len(frames)
    for byte in range(len(content)):
        bench.disk.set_content(bench.slot_path(0), content)
        bench.disk.flip_bit(bench.slot_path(0), 8 * byte + byte % 8)
        reader = WheelReader(bench.disk, DATA, bench.wheel.wheel)
        found = list(reader.slot_frames(BASE_SLOT, 1 << 40))
        assert [frame.seq for frame in found] == sorted(frames)
        damaged = [frame.seq for frame in found if isinstance(frame, DamagedFrame)]
        assert damaged == [sorted(frames)[byte // length]]


@pytest.mark.parametrize("machine_crash", [False, True])
def test_a_refresh_that_is_stopped_anywhere_counts_nothing_twice(*, machine_crash: bool) -> None:
    for effects in range(60):
        bench = Bench()
        bench.wheel.sync()
        bench.disk.crash_after(effects)
        try:
            bench.wheel.checkpoint()
        except Crash:
            bench.disk.restart(Random(effects) if machine_crash else None)
            bench.assert_found()
            continue
        bench.assert_found()
        break
    assert effects > 5


def flip_row(bench: Bench, seq: int) -> None:
    bench.disk.flip_bit(layout.index_path(bench.folder, 0), 128 * (seq - 1) + 70)


@pytest.mark.parametrize("counted_again", [False, True])
def test_rows_that_are_holes_when_they_are_counted_are_noted(*, counted_again: bool) -> None:
    """A refresh skips them; a second one finds those that are good by then, and counts them."""
    bench = Bench(behind=4)
    head = load_head(bench.disk, bench.folder)
    seqs = [head.seq + 1, head.seq + 3, head.seq + 4]
    for seq in seqs:
        flip_row(bench, seq)
    bench.wheel.checkpoint()
    assert load_head(bench.disk, bench.folder).holes == SeqSet.of(seqs)
    flip_row(bench, seqs[1])
    if counted_again:
        flip_row(bench, seqs[0])
        flip_row(bench, seqs[2])
    for number in range(10, 12):
        bench.append(number)
    bench.wheel.checkpoint()
    left = [] if counted_again else [seqs[0], seqs[2]]
    assert load_head(bench.disk, bench.folder).holes == SeqSet.of(left)
    bench.assert_found()


def test_a_row_that_was_counted_and_is_a_hole_is_noted_when_its_slot_is_counted_anew() -> None:
    bench = Bench(behind=0)
    slot = BASE_SLOT + 5
    seq, *_ = bench.expected(slot, 1 << 40)
    flip_row(bench, seq)
    bench.wheel._table.change([slot])
    bench.wheel.checkpoint()
    assert load_head(bench.disk, bench.folder).holes == SeqSet.of([seq])
    bench.disk.delete(bench.slot_path(5))
    reader = WheelReader(bench.disk, DATA, bench.wheel.wheel)
    assert seq in reader.holes(bench.wheel.last_seq, NO_SEQS)


def test_hours_below_the_floor_are_dropped() -> None:
    bench = Bench()
    delete_below(bench.wheel, BASE_SLOT + 3 * HOUR)
    bench.wheel.checkpoint()
    head = load_head(bench.disk, bench.folder)
    assert head.hours == {(BASE_SLOT + 30 * HOUR) // HOUR: 1}
    assert len(bench.disk.list_folder(layout.table_folder(bench.folder))) == 2


def test_a_table_is_made_for_a_wheel_that_has_none() -> None:
    bench = Bench(groups=12, behind=0, table_rows=1 << 30)
    assert load_head(bench.disk, bench.folder) == TableHead()
    wheel = OriginWheel(bench.disk, DATA, bench.wheel.meta, bench.wheel._handles, table_rows=2)
    wheel._table.refresh(bench.wheel.last_seq, floor=0)
    assert load_head(bench.disk, bench.folder).seq == bench.wheel.last_seq
    bench.assert_found()


def test_a_file_that_cannot_be_opened_for_once_is_read_again() -> None:
    bench = Bench()
    bench.disk.faults.append(Fault("open", path_part=".slot"))
    bench.assert_found()
