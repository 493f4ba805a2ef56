"""Fills against lists of rows: carried out, ended midway, carried out again, cut back."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.journal.encode import encode_frames
from delaywheel.storage.journal.format import EMPTY, FILL, HEADER_LENGTH_BYTES, bare_frame
from delaywheel.storage.journal.journal import Journal
from delaywheel.storage.seconds.files import SecondFiles
from delaywheel.storage.seconds.filling import Filler
from delaywheel.storage.seconds.reading import read_file
from delaywheel.storage.seconds.rows import PlacedRows
from delaywheel.storage.seconds.table import NOTHING, HourTable
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.process.night import NIGHT
from support.wheels.messages import (
    BASE_SLOT,
    Message,
    any_messages,
    columns_of,
    message,
    messages_of,
    names_of,
)

WHEEL = WheelId("node-1", 7)
FOLDER = Path("/data/wheels/node-1.7")
SLOTS = 3
HOUR = BASE_SLOT // layout.SECONDS_PER_HOUR


class PlacedRow(NamedTuple):
    """What a second must have, in this order."""

    fill: int
    kind: int
    seq: int
    place: int
    message: Message


def read_second(disk: SimulatedDisk, slot: int, *, filled: int) -> PlacedRows | None:
    """Reads what is filled of a second."""
    entry = HourTable(disk, FOLDER, slot // layout.SECONDS_PER_HOUR).entry(slot)
    if entry is None:
        raise FrameDamaged(DamageReason.UNREADABLE, "its entry")
    return read_file(disk, FOLDER, WHEEL, slot, entry, filled).rows()


def new_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_folder(FOLDER)
    for folder in FOLDER.parents:
        disk.sync_folder(folder)
    return disk


def placed(rows: PlacedRows) -> Iterator[tuple[int, int, int, Message]]:
    """Yields kind, seq, place and message of rows."""
    places = rows.kinds.tolist(), rows.seqs.tolist(), rows.places.tolist()
    yield from zip(*places, messages_of(rows.columns), strict=True)


def slot_path(number: int) -> Path:
    return layout.slot_path(FOLDER, BASE_SLOT + number)


class FillMachine(RuleBasedStateMachine):
    """`plain` is a second member, to which nothing ever happens."""

    def __init__(self) -> None:
        super().__init__()
        self.disk, self.plain = new_disk(), new_disk()
        self.frames: list[bytes] = []
        self.rows: list[tuple[int, int, int, Message]] = []  # seq, kind, place
        self.records: list[int] = []
        self.fills: list[int] = []
        self.saved = self.begun = 0
        self.passed_over: dict[int, int] = {}
        self.is_closed = self.was_refused = False
        self.journal = Journal(self.disk, FOLDER, WHEEL)
        self.plain_journal = Journal(self.plain, FOLDER, WHEEL)
        self.plain_filler = self._filler(self.plain, self.plain_journal)
        self.filler = self._filler(self.disk, self.journal)

    def _filler(self, disk: SimulatedDisk, journal: Journal) -> Filler:
        self.files = SecondFiles(disk, FOLDER, WHEEL)
        return Filler(self.files, journal, self.passed_over.update)

    def _append(self, content: bytes, edges: list[int]) -> None:
        self.journal.append(content, edges)
        self.plain_journal.append(content, edges)
        self.frames += [content[begin:end] for begin, end in pairwise(edges)]

    @precondition(lambda self: not self.is_closed)
    @rule(
        messages=any_messages(slots=SLOTS, max_size=6),
        kind=st.sampled_from(Kind),
        most=st.integers(1, 4),
    )
    def write(self, messages: list[Message], kind: Kind, most: int) -> None:
        columns = columns_of(messages)
        group = encode_frames(
            columns if kind is Kind.MESSAGES else names_of(columns),
            kind=kind,
            wheel=WHEEL,
            first_seq=self.journal.end + 1,
            accepted_at_ms=len(self.frames),
            max_frame_messages=most,
            max_frame_bytes=1 << 20,
        )
        ordered = [messages[row] for row in group.order.tolist()]
        if kind is not Kind.MESSAGES:
            ordered = messages_of(names_of(columns_of(ordered)))
        at = 0
        for seq, count in enumerate(group.counts.tolist(), self.journal.end + 1):
            part = ordered[at : at + count]
            self.rows += [(seq, kind, place, each) for place, each in enumerate(part)]
            at += count
        self._append(bytes(group.content), group.edges)

    @precondition(lambda self: not self.is_closed)
    @rule()
    def record_a_fill(self) -> None:
        seq = self.journal.end + 1
        length = HEADER_LENGTH_BYTES
        content = bare_frame(FILL, wheel=WHEEL, seq=seq, accepted_at_ms=0, length_bytes=length)
        self._append(content, [0, length])
        self.records.append(seq)

    @property
    def next_record(self) -> int | None:
        return next((seq for seq in self.records if seq > self.journal.filled), None)

    def _fill(self) -> None:
        record = self.next_record
        assert record is not None
        self.begun = max(self.begun, record)
        finish(self.filler.fill(record, floor=BASE_SLOT, passed_over=self.passed_over))

    def _filled(self) -> None:
        record = self.journal.filled
        if record > self.plain_journal.filled:
            finish(self.plain_filler.fill(record, floor=BASE_SLOT, passed_over=()))
            self.fills.append(record)
        if self.passed_over and self.was_refused:
            self._copy_all()

    @precondition(lambda self: self.next_record is not None)
    @rule()
    def fill(self) -> None:
        self._fill()
        self._filled()

    @rule()
    def save(self) -> None:
        self.files.sync_tables()
        self.saved = self.journal.filled

    @precondition(lambda self: self.next_record is not None)
    @rule(effects=st.integers(0, 12), torn_share=st.sampled_from([0.0, 0.5, 0.9]))
    def the_process_ends_in_a_fill(self, effects: int, torn_share: float) -> None:
        self._until_crash(effects, torn_share, self._fill)
        self.disk.restart()
        self._open()

    @precondition(lambda self: self.next_record is not None)
    @rule(effects=st.integers(0, 12), seed=st.integers(0, 1 << 32))
    def the_machine_crashes_in_a_fill(self, effects: int, seed: int) -> None:
        self._until_crash(effects, 0.5, self._fill)
        self.disk.restart(Random(seed))
        self._open()

    @precondition(lambda self: self.next_record is not None)
    @rule(countdown=st.integers(0, 6), operation=st.sampled_from(["write", "sync"]))
    def a_fill_is_refused(self, countdown: int, operation: str) -> None:
        before, self.was_refused = self.journal.filled, True
        self.disk.faults.append(Fault(operation, countdown=countdown))
        with suppress(OSError):
            self._fill()
        if self.disk.faults:  # it was not that far
            self.disk.faults.clear()
            self._filled()
        elif self.passed_over:
            self._filled()
        else:
            assert self.journal.filled == before
        self.disk.restart()  # what a failed sync was about is not believed: the node begins again
        self._open()

    @precondition(lambda self: not self.is_closed)
    @rule(back=st.integers(0, 3))
    def the_wheel_is_closed(self, back: int) -> None:
        """T counts as a record, and is no less than any that is known to be acknowledged."""
        closed_at = max(self.journal.end - back, self.begun, 1)
        if closed_at > self.journal.end:
            return
        self.is_closed = True
        for journal in (self.journal, self.plain_journal):
            journal.cut(closed_at)
        del self.frames[closed_at:]
        self.rows = [row for row in self.rows if row[0] <= closed_at]
        self.records = sorted({*(seq for seq in self.records if seq <= closed_at), closed_at})

    @rule(back=st.integers(0, 3))
    def a_frame_is_declared_lost(self, back: int) -> None:
        """It may have been filled already where a fill was ended."""
        seq = self.journal.end - back
        if seq <= self.plain_journal.filled or seq in self.records:
            return
        length = len(self.frames[seq - 1])
        empty = bare_frame(EMPTY, wheel=WHEEL, seq=seq, accepted_at_ms=0, length_bytes=length)
        self.frames[seq - 1] = empty
        self.rows = [row for row in self.rows if row[0] != seq]
        for disk in (self.disk, self.plain):
            disk.open(layout.journal_path(FOLDER, 1)).write_at(self.frames, 0)

    def _copy_all(self) -> None:
        """Has what the second member has, which has filled as far."""
        for path in (layout.seconds_path(FOLDER, HOUR), *map(slot_path, range(SLOTS))):
            if self.plain.exists(path):
                self.disk.set_content(path, self.plain.content(path))
        self.passed_over.clear()

    def _until_crash(self, effects: int, torn_share: float, action: Callable[[], None]) -> None:
        self.disk.crash_after(effects, torn_share=torn_share)
        with suppress(Crash):
            action()
        self.disk.crash_at_effect = None
        self._filled()

    def _open(self) -> None:
        """Begins again with F as it was saved, and fetches what a crash has taken."""
        self.journal = Journal(self.disk, FOLDER, WHEEL, filled=self.saved)
        if self.is_closed:  # what was cut may be there again
            self.journal.cut(len(self.frames))
        missing = self.frames[self.journal.end :]
        if missing:
            edges = [0]
            for frame in missing:
                edges.append(edges[-1] + len(frame))
            self.journal.append(b"".join(missing), edges)
        self.filler = self._filler(self.disk, self.journal)

    @invariant()
    def each_second_has_what_was_filled(self) -> None:
        if self.journal.filled < self.plain_journal.filled:
            return  # it is filled again
        assert not self.passed_over
        ends = dict(zip([0, *self.fills], self.fills, strict=False))
        expected: dict[int, list[PlacedRow]] = {}
        for first, last in ends.items():
            for seq, kind, place, each in self.rows:
                if first < seq <= last:
                    row = PlacedRow(last, kind, seq, place, each)
                    expected.setdefault(each.due_ms // 1000, []).append(row)
        for slot in range(BASE_SLOT, BASE_SLOT + SLOTS):
            rows = sorted(expected.get(slot, []), key=lambda row: row[:4])
            filled = self.journal.filled
            for disk in (self.disk, self.plain):
                found = read_second(disk, slot, filled=filled)
                columns = () if found is None else placed(found)
                assert list(columns) == [row[1:] for row in rows]
            if self.begun > filled:
                continue  # entries may have that fill
            entries = [HourTable(d, FOLDER, HOUR).entry(slot) for d in (self.disk, self.plain)]
            entry = entries[0]
            assert entry is not None
            assert entry == entries[1] or not entry.length_bytes, "cut back to nothing, or never"
            assert entry.names == sum(row.kind != Kind.MESSAGES for row in rows)
            assert entry.messages == sum(row.kind == Kind.MESSAGES for row in rows)
            assert entry.releases == sum(row.kind == Kind.RELEASES for row in rows)
            if entry.length_bytes:
                path = layout.slot_path(FOLDER, slot)
                contents = [d.content(path)[: entry.length_bytes] for d in (self.disk, self.plain)]
                assert contents[0] == contents[1]


# A push has the same runs each time: of 900 by chance one still fails (docs/JOURNAL.md, step 2).
FillMachine.TestCase.settings = settings(stateful_step_count=20, derandomize=not NIGHT)
TestFillsAgainstLists = FillMachine.TestCase


def filled_machine() -> FillMachine:
    """Two seconds with a message each, filled and saved."""
    machine = FillMachine()
    machine.write([message(1), message(2, slot=BASE_SLOT + 1)], Kind.MESSAGES, 4)
    machine.record_a_fill()
    machine.fill()
    machine.save()
    return machine


def refill(machine: FillMachine) -> None:
    machine.write([message(3), message(4, slot=BASE_SLOT + 1)], Kind.MESSAGES, 4)
    machine.record_a_fill()
    machine._fill()


def test_a_second_whose_entry_is_damaged_is_passed_over() -> None:
    machine = filled_machine()
    table = layout.seconds_path(FOLDER, HOUR)
    first = 4096 + BASE_SLOT % layout.SECONDS_PER_HOUR * 32
    machine.disk.flip_bit(table, first * 8)
    refill(machine)
    assert machine.passed_over == {BASE_SLOT: 2}
    with pytest.raises(FrameDamaged):
        read_second(machine.disk, BASE_SLOT, filled=machine.journal.filled)
    behind = read_second(machine.disk, BASE_SLOT + 1, filled=machine.journal.filled)
    assert behind is not None
    assert behind.seqs.tolist() == [1, 3]


def test_an_entry_that_was_cut_back_to_nothing_says_of_nothing_that_is_lacking() -> None:
    machine = filled_machine()
    assert machine.files.is_whole(BASE_SLOT, NOTHING._replace(fill=1))


@pytest.mark.parametrize("has_file", [True, False])
def test_an_entry_that_became_zeros_is_not_a_second_without_a_file(has_file: bool) -> None:
    machine = filled_machine()
    path = layout.seconds_path(FOLDER, HOUR)
    content = bytearray(machine.disk.content(path))
    at = 4096 + BASE_SLOT % layout.SECONDS_PER_HOUR * 32
    content[at : at + 32] = bytes(32)
    machine.disk.set_content(path, bytes(content))
    if not has_file:
        machine.disk.delete(layout.slot_path(FOLDER, BASE_SLOT))
    refill(machine)
    assert BASE_SLOT in machine.passed_over


def test_other_sections_than_the_entrys_are_noticed() -> None:
    """The file of an earlier backup, whole in itself."""
    machine, path = filled_machine(), layout.slot_path(FOLDER, BASE_SLOT)
    content = bytearray(machine.disk.content(path))
    refill(machine)
    machine.disk.set_content(path, bytes(content))
    with pytest.raises(FrameDamaged):
        read_second(machine.disk, BASE_SLOT, filled=machine.journal.filled)


def test_no_changed_bit_of_a_slot_file_is_read() -> None:
    machine, path = filled_machine(), layout.slot_path(FOLDER, BASE_SLOT)
    for bit in range(len(machine.disk.content(path)) * 8):
        machine.disk.flip_bit(path, bit)
        with pytest.raises(FrameDamaged):
            read_second(machine.disk, BASE_SLOT, filled=2)
        machine.disk.flip_bit(path, bit)


def test_rows_of_a_second_are_in_the_order_of_kind_seq_and_place() -> None:
    machine = FillMachine()
    machine.write([message(1)], Kind.RELEASES, 4)
    machine.write([message(2), message(3)], Kind.MESSAGES, 1)
    machine.record_a_fill()
    machine.fill()
    rows = read_second(machine.disk, BASE_SLOT, filled=4)
    assert rows is not None
    assert (rows.kinds.tolist(), rows.seqs.tolist()) == ([1, 1, 4], [2, 3, 1])
    machine.each_second_has_what_was_filled()


def test_a_frame_that_was_lost_after_its_fill_was_ended_is_cut_back() -> None:
    machine = filled_machine()
    machine.write([message(3)], Kind.MESSAGES, 4)
    machine.write([message(4, slot=BASE_SLOT + 1)], Kind.MESSAGES, 4)
    machine.record_a_fill()
    machine._fill()
    machine.disk.restart()  # before F was saved
    machine._open()
    machine.a_frame_is_declared_lost(2)
    machine.fill()
    machine.each_second_has_what_was_filled()


def test_what_an_ended_fill_has_left_behind_an_entry_is_written_over() -> None:
    machine = filled_machine()
    machine.write([message(3, value=bytes(500))], Kind.MESSAGES, 4)
    machine.record_a_fill()
    machine.disk.faults.append(Fault("sync", path_part=".slot"))
    with pytest.raises(OSError, match="Input/output"):
        machine._fill()
    path = layout.slot_path(FOLDER, BASE_SLOT)
    length = len(machine.disk.content(path))
    machine.disk.restart()
    machine._open()
    machine.fill()
    assert len(machine.disk.content(path)) == length
    machine.each_second_has_what_was_filled()


def test_sections_are_on_the_medium_before_entries_say_of_them() -> None:
    machine = filled_machine()
    synced: list[bool] = []
    path = layout.slot_path(FOLDER, BASE_SLOT)

    def look(synced_path: Path) -> None:
        if synced_path == path:
            synced.append(HourTable(machine.disk, FOLDER, HOUR).entry(BASE_SLOT) == before)

    before = HourTable(machine.disk, FOLDER, HOUR).entry(BASE_SLOT)
    machine.disk.on_sync = look
    refill(machine)
    assert synced == [True]
