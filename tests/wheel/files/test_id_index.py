"""The index of ids against fresh scans of the files, whatever happens to these in between."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import make_wheel
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.bundle import FrameCopy
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import HOLE_ROW, INDEX_ROW_LENGTH_BYTES
from delaywheel.storage.reading.id_index import SECOND_BYTES, IdIndex, Look
from delaywheel.storage.reading.ids import ROW_LENGTH_BYTES, IdRow, SoughtIds
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.writing.wheel import OriginWheel
from sim.machine.disk import SimulatedDisk
from support.wheels.copies import bundled, copies_of, open_copy, rows_by_seq
from support.wheels.messages import BASE_SLOT, Message, columns_of, message, names_of
from support.wheels.wheels import ACCEPTED_AT_MS, delete_below, new_wheel

DATA = Path("/data")
SLOTS = 3
IDS = [
    *(message(number).id for number in range(6)),  # all begin alike
    *(bytes([number]) * 16 for number in range(1, 6)),
]
TOPICS = ("topic", "other")
Row = tuple[IdRow, str]

_rows = st.lists(
    st.builds(
        lambda id_, topic, ahead, at_ms: Message((BASE_SLOT + ahead) * 1000 + at_ms, id_, topic),
        st.sampled_from(IDS),
        st.sampled_from(TOPICS),
        st.integers(0, SLOTS - 1),
        st.integers(0, 999),
    ),
    min_size=1,
    max_size=5,
)
_wheels = st.sampled_from(["own", "copy"])


class Scan:
    """What a fresh scan of a second finds."""

    def __init__(self, disk: SimulatedDisk, slot: int, limits: dict[WheelId, int]) -> None:
        self.rows: set[Row] = set()
        self.is_readable = True
        for wheel, limit in limits.items():
            reader = WheelReader(disk, DATA, wheel)
            for frame in reader.slot_frames(slot, limit):
                if isinstance(frame, DamagedFrame):
                    self.is_readable = False
                else:
                    self.rows |= rows_of(frame)
            self.is_readable &= not reader.holes(limit, NO_SEQS)
            reader.close()


def rows_of(frame: Frame) -> set[Row]:
    columns = frame.columns
    ids, dues_ms = columns.ids, columns.due_ms
    return {
        (
            IdRow(frame.wheel, frame.seq, row, frame.kind, ids[row].tobytes(), int(dues_ms[row])),
            columns.topic(row),
        )
        for row in range(len(ids))
    }


def of_all_topics(ids: list[bytes]) -> list[tuple[bytes, str]]:
    return [(id_, topic) for id_ in ids for topic in TOPICS]


def sought(ids: list[bytes], begins: set[bytes] | None = None) -> SoughtIds:
    names = of_all_topics(ids)
    return SoughtIds.of([id_ for id_, _ in names], [topic for _, topic in names], begins or ())


def each_of(look: Look, ids: list[bytes]) -> list[Row]:
    names = of_all_topics(ids)
    return [
        (IdRow(wheel, seq, row, kind, names[number][0], due_ms), names[number][1])
        for number, wheel, seq, row, kind, due_ms in look.rows.each()
    ]


class IndexMachine(RuleBasedStateMachine):
    """A wheel of this node, a copy of another's, and an index of both that looks now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.disk, self.other_disk = SimulatedDisk(), SimulatedDisk()
        self.own: OriginWheel = new_wheel(self.disk, DATA)
        self.other: OriginWheel = new_wheel(self.other_disk, DATA, 2)
        make_wheel(self.disk, DATA, self.other.meta)
        handles = HandleCache(self.disk, 2)
        self.copy = open_copy(self.disk, DATA, self.other.wheel, handles, table_rows=2)
        self.limits = {self.own.wheel: 0, self.copy.wheel: 0}
        self.truth: set[Row] = set()
        self.floor = BASE_SLOT
        self.steps = 0
        self.final_seq: int | None = None
        self.readers: dict[WheelId, WheelReader] = {}

    @initialize(
        seconds=st.sampled_from([1, 3, 10]),
        new_rows=st.sampled_from([2, 1000]),
        unread=st.sampled_from([2, 1000]),
    )
    def open(self, seconds: int, new_rows: int, unread: int) -> None:
        second_bytes = SECOND_BYTES + 8 * ROW_LENGTH_BYTES
        self.index = IdIndex(
            self.reader, most_bytes=seconds * second_bytes, new_rows=new_rows, unread=unread
        )

    def reader(self, wheel: WheelId) -> WheelReader:
        if wheel not in self.readers:
            self.readers[wheel] = WheelReader(self.disk, DATA, wheel)
        return self.readers[wheel]

    @rule(name=_wheels, rows=_rows, kind=st.sampled_from(Kind))
    def append(self, name: str, rows: list[Message], kind: Kind) -> None:
        wheel = self.own if name == "own" else self.other
        rows = [replace(row, due_ms=max(row.due_ms, self.floor * 1000)) for row in rows]
        columns = columns_of(rows)
        if kind is not Kind.MESSAGES:
            columns = names_of(columns)
        group = wheel.append(columns, kind=kind, accepted_at_ms=ACCEPTED_AT_MS)
        for seq, numbers in rows_by_seq(group).items():
            self.truth |= {
                (
                    IdRow(wheel.wheel, seq, row, kind, rows[number].id, rows[number].due_ms),
                    rows[number].topic,
                )
                for row, number in enumerate(numbers)
            }
        self.limits[self.own.wheel] = self.own.last_seq

    @rule(missing=st.sets(st.integers(0, 5)), frames=st.integers(1, 8))
    def mirror(self, missing: set[int], frames: int) -> None:
        """Some frames come to the copy; some of them are holes there."""
        copies = copies_of(self.other_disk, DATA, self.other.wheel, self.copy.last_seq + 1)
        given = [
            FrameCopy(copy.seq, HOLE_ROW, b"") if number in missing else copy
            for number, copy in enumerate(copies[:frames])
        ]
        if given:
            assert self.copy.append(bundled(given)) is None
        self.limits[self.copy.wheel] = self.copy.last_seq

    @rule(first=st.integers(0, 7), frames=st.integers(1, 8))
    def repair(self, first: int, frames: int) -> None:
        """Frames are written again, whether or not anything is wrong with them."""
        copies = copies_of(self.other_disk, DATA, self.other.wheel)[: self.copy.last_seq]
        copies = copies[first % max(1, len(copies)) :][:frames]
        for copy in copies:
            self.copy.note_damaged(copy.seq)
        self.copy.repair(bundled(copies))

    @precondition(lambda self: self.final_seq is None and self.copy.last_seq > 1)
    @rule(part=st.floats(0.5, 1))
    def cut(self, part: float) -> None:
        self.final_seq = max(1, int(self.copy.last_seq * part))
        self.copy.end_at(self.final_seq)
        self.limits[self.copy.wheel] = self.copy.last_seq

    @rule(name=_wheels, ahead=st.integers(0, SLOTS - 1), bit=st.integers(0, 1_000))
    def damage_slot(self, name: str, ahead: int, bit: int) -> None:
        self._flip(layout.slot_path(self._folder(name), BASE_SLOT + ahead), bit)

    @rule(name=_wheels, seq=st.integers(0, 30), bit=st.integers(0, 127))
    def damage_row(self, name: str, seq: int, bit: int) -> None:
        path = layout.index_path(self._folder(name), 0)
        self._flip(path, seq * INDEX_ROW_LENGTH_BYTES * 8 + bit)

    def _folder(self, name: str) -> Path:
        return layout.wheel_folder(DATA, (self.own if name == "own" else self.copy).wheel)

    def _flip(self, path: Path, bit: int) -> None:
        if path in self.disk.paths() and bit < 8 * len(self.disk.content(path)):
            self.disk.flip_bit(path, bit)

    @rule(name=_wheels)
    def checkpoint(self, name: str) -> None:
        (self.own if name == "own" else self.copy).checkpoint()

    @rule()
    def delete(self) -> None:
        """A second is finished; nobody asks about it any more."""
        if self.floor < BASE_SLOT + SLOTS - 1:
            self.floor += 1
            delete_below(self.own, self.floor)
            delete_below(self.copy, self.floor)

    @rule(gone=st.booleans())
    def forget_copy(self, *, gone: bool) -> None:
        """The copy is not held for a while."""
        self.limits.pop(self.copy.wheel, None)
        if not gone:
            self.limits[self.copy.wheel] = self.copy.last_seq

    @invariant()
    def looks(self) -> None:
        """Not at all seconds each time: what happens in three steps is new to the index at once."""
        self.steps += 1
        first = self.steps % SLOTS
        slots = {
            max(BASE_SLOT + each % SLOTS, self.floor) for each in (first, first + self.steps % 2)
        }
        which = IDS if self.steps % 3 else IDS[self.steps % len(IDS) :]
        self.index.follow(self.limits, lambda _: NO_SEQS)
        look = self.index.look(slots, sought(which))
        rows = each_of(look, which)
        readable: set[Row] = set()
        for slot in slots:
            found = [row for row in rows if row[0].due_ms // 1000 == slot]
            assert len(found) == len(set(found)), "a row is there twice"
            is_whole = not look.damaged.get(slot)
            readable |= self._compare(slot, which, set(found), is_whole=is_whole)
        begins = {id_[:8] for id_ in which[:2]}
        both = self.index.look(slots, sought(which, begins))
        more = each_of(both, which)
        # What only memory had, of files that went bad, goes with the least recently asked for.
        assert set(rows) & readable <= set(more)
        assert len(more) == len(set(more)), "a row is there twice"
        begun = {row for row in both.begun if row.id in which}
        assert {row for row, _ in more if row.id[:8] in begins} == begun
        assert len(both.begun) == len(set(both.begun)), "a row is there twice"

    def _compare(
        self, slot: int, which: list[bytes], found: set[Row], *, is_whole: bool
    ) -> set[Row]:
        """Compares with a fresh scan; returns what that finds."""
        scan = Scan(self.disk, slot, self.limits)
        there = {
            (row, topic)
            for row, topic in self.truth
            if row.due_ms // 1000 == slot
            and row.seq <= self.limits.get(row.wheel, 0)
            and row.id in which
        }
        assert {row for row in scan.rows if row[0].id in which} <= found <= there
        if is_whole and not self.index.missing:
            assert found == there
        else:
            assert not scan.is_readable
        return scan.rows

    @invariant()
    def is_bounded(self) -> None:
        assert self.index.length_bytes <= self.index._most_bytes


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(stateful_step_count=30)


def test_a_reader_finds_what_was_repaired_behind_a_gap() -> None:
    """The frame before it is lost for good, so that no walk through the file arrives there."""
    disk, other_disk = SimulatedDisk(), SimulatedDisk()
    origin = new_wheel(other_disk, DATA)
    for number in (1, 2):
        origin.append(columns_of([message(number)]), accepted_at_ms=ACCEPTED_AT_MS)
    make_wheel(disk, DATA, origin.meta)
    copy = open_copy(disk, DATA, origin.wheel, HandleCache(disk, 2), table_rows=2)
    copy.append(bundled([FrameCopy(seq, HOLE_ROW, b"") for seq in (1, 2)]))
    reader, lost = WheelReader(disk, DATA, origin.wheel), SeqSet.of([1])
    assert reader.holes(2, NO_SEQS) == SeqSet.of([1, 2])
    assert list(reader.slot_frames(BASE_SLOT, 2, lost=lost)) == []
    copy.repair(bundled(copies_of(other_disk, DATA, origin.wheel)[1:]))
    assert reader.holes(2, lost) == NO_SEQS
    assert [frame.seq for frame in reader.slot_frames(BASE_SLOT, 2, lost=lost)] == [2]


def test_a_damaged_frame_of_a_kept_second_is_found_once_it_is_repaired() -> None:
    disk, other_disk = SimulatedDisk(), SimulatedDisk()
    origin = new_wheel(other_disk, DATA)
    for number in (1, 2):
        origin.append(columns_of([message(number)]), accepted_at_ms=ACCEPTED_AT_MS)
    make_wheel(disk, DATA, origin.meta)
    copy = open_copy(disk, DATA, origin.wheel, HandleCache(disk, 2))
    copies = copies_of(other_disk, DATA, origin.wheel)
    copy.append(bundled(copies))
    path = layout.slot_path(layout.wheel_folder(DATA, origin.wheel), BASE_SLOT)
    disk.flip_bit(path, 8 * len(copies[0].content) + 700)  # in the second frame
    reader = WheelReader(disk, DATA, origin.wheel)
    index = IdIndex(lambda _: reader)
    ids = SoughtIds.of([message(number).id for number in (1, 2)], ["topic"] * 2)

    def look() -> tuple[int, bool]:
        index.follow({origin.wheel: 2}, lambda _: NO_SEQS)
        found = index.look([BASE_SLOT], ids)
        return len(found.rows), bool(found.damaged)

    assert look() == look() == (1, True)
    assert (len(index), index.built) == (1, 1)
    copy.note_damaged(2)
    copy.repair(bundled(copies))
    assert look() == (2, False)
    assert index.built == 2


def test_a_second_that_is_too_long_is_read_for_each_question() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    wheel.append(columns_of([message(number) for number in range(300)]), accepted_at_ms=1)
    reader = WheelReader(disk, DATA, wheel.wheel)
    index = IdIndex(lambda _: reader, most_bytes=SECOND_BYTES + 99 * ROW_LENGTH_BYTES)
    index.follow({wheel.wheel: wheel.last_seq}, lambda _: NO_SEQS)
    for number in (7, 299):
        ids = SoughtIds.of([message(number).id], ["topic"])
        rows = index.look([BASE_SLOT], ids).rows
        assert rows.numbers.tolist() == [0]
        assert index.length_bytes == 0
    assert (len(index), index.built) == (0, 2)


def test_what_a_wheel_gains_is_found_though_the_last_second_of_all_is_asked_about() -> None:
    """Anybody may name it: no message is due in 2106, but the index keeps that it has none."""
    disk, last_slot = SimulatedDisk(), (1 << 32) - 1
    wheel = new_wheel(disk, DATA)
    reader = WheelReader(disk, DATA, wheel.wheel)
    index = IdIndex(lambda _: reader)
    ids = SoughtIds.of([message(number).id for number in (1, 2)], ["topic"] * 2)

    def look(slot: int) -> list[int]:
        index.follow({wheel.wheel: wheel.last_seq}, lambda _: NO_SEQS)
        return sorted(index.look([slot], ids).rows.numbers.tolist())

    slots = [BASE_SLOT, BASE_SLOT + 1, last_slot]
    assert [look(slot) for slot in slots] == [[], [], []]
    for number, slot in enumerate(slots[:2], 1):
        wheel.append(columns_of([message(number, slot=slot)]), accepted_at_ms=ACCEPTED_AT_MS)
    assert [look(slot) for slot in (BASE_SLOT, last_slot, BASE_SLOT + 1)] == [[0], [0], [0, 1]]
    assert index.built == 3


def test_a_question_copies_no_unread_frames_of_other_seconds() -> None:
    """There may be 65,536 of them, and copying these takes ten times as long as the answer."""
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA, max_frame_messages=1)
    reader = WheelReader(disk, DATA, wheel.wheel)
    index = IdIndex(lambda _: reader)
    ids = SoughtIds.of([message(1).id], ["topic"])
    index.follow({wheel.wheel: 0}, lambda _: NO_SEQS)
    index.look([BASE_SLOT, BASE_SLOT + 1], ids)
    others = columns_of([message(number, slot=BASE_SLOT + 1) for number in range(4_000)])
    wheel.append(others, accepted_at_ms=ACCEPTED_AT_MS)
    index.follow({wheel.wheel: wheel.last_seq}, lambda _: NO_SEQS)
    tracemalloc.start()
    try:
        index.look([BASE_SLOT], ids)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < INDEX_ROW_LENGTH_BYTES * 4_000
