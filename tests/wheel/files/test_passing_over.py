"""Only files that are as table and rows say are passed over, with what they hold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from delaywheel.storage.files.slot_table import ENTRY_LENGTH_BYTES
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.format import MAGIC, Frame, decode_header
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.passing_over import PassedSecond
from delaywheel.storage.reading.reader import WheelReader
from sim.machine.disk import SimulatedDisk
from support.wheels.messages import BASE_SLOT, columns_of, message, names_of
from support.wheels.wheels import append, new_wheel

DATA = Path("/data")
HOUR = 3600
FIRST = BASE_SLOT // HOUR * HOUR + HOUR - 40
"""Some seconds before the end of an hour."""
SLOTS = np.arange(FIRST, FIRST + 120)
ALL = 1 << 40


class Bench:
    """One wheel with frames in some of these seconds, of which the table counts most."""

    def __init__(self, *, wheel: int = 1, seqs_later: int = 0, longer: int = 0) -> None:
        self.disk = SimulatedDisk()
        self.wheel = new_wheel(self.disk, DATA, wheel, table_rows=2)
        self.longer = longer  # of two messages of a second, this one
        for _ in range(seqs_later):
            append(self.wheel, [message(99, slot=FIRST - 1)])
        self.folder = layout.wheel_folder(DATA, self.wheel.wheel)
        for number in range(12):
            self.append(number)
            if number in {3, 8}:
                self.wheel.checkpoint()

    def append(self, number: int) -> None:
        some = SLOTS[number % 3 :: 3][: 30 + number]
        value = bytes(16 if number // 3 % 2 == self.longer else 8)
        append(self.wheel, [message(number, slot=int(slot), value=value) for slot in some])
        cancelled = names_of(columns_of([message(number, slot=int(some[0]))]))
        self.wheel.append(cancelled, kind=Kind.CANCELS, accepted_at_ms=1)

    def passed(
        self, up_to_seq: int = ALL, sought: bytes = b"not there"
    ) -> list[PassedSecond | None]:
        reader = WheelReader(self.disk, DATA, self.wheel.wheel)
        return list(reader.passing_over(SLOTS, up_to_seq, lambda content: sought in content))

    def read(self, up_to_seq: int = ALL) -> list[PassedSecond]:
        """What these files hold, read frame by frame."""
        reader, found = WheelReader(self.disk, DATA, self.wheel.wheel), []
        for slot in SLOTS.tolist():
            frames = list(reader.slot_frames(slot, up_to_seq, kind=Kind.MESSAGES))
            good = [frame for frame in frames if isinstance(frame, Frame)]
            assert good == frames
            lengths = sum(frame.length_bytes for frame in good)
            found.append(PassedSecond(sum(len(frame.columns) for frame in good), lengths))
        return found

    def path(self, number: int) -> Path:
        return layout.slot_path(self.folder, int(SLOTS[number]))

    def change(self, path: Path, to: Callable[[bytes], bytes]) -> None:
        self.disk.set_content(path, to(self.disk.content(path)))


def first_frame(content: bytes) -> bytes:
    """The first frame of a slot file."""
    return content[: decode_header(content, available_bytes=len(content)).length_bytes]


def test_what_holds_nothing_sought_is_counted_up_to_a_seq() -> None:
    bench = Bench()
    last_seq = bench.wheel.last_seq
    for up_to_seq in (0, 1, last_seq // 2, last_seq, ALL):
        assert bench.passed(up_to_seq) == bench.read(up_to_seq)
    assert {each.messages for each in bench.read()} > {0, 2, 4}
    reader = WheelReader(bench.disk, DATA, bench.wheel.wheel)
    for number in range(12, 15):  # the head that the reader knows becomes old
        bench.append(number)
        assert list(reader.passing_over(SLOTS, ALL, lambda _: False)) == bench.read()
        bench.wheel.checkpoint()
        assert list(reader.passing_over(SLOTS, ALL, lambda _: False)) == bench.read()


def test_what_may_be_sought_is_left_to_be_read() -> None:
    bench = Bench()
    append(bench.wheel, [message(1, slot=int(SLOTS[7]), value=b"it is there")])
    expected: list[PassedSecond | None] = [*bench.read()]
    expected[7] = None
    assert bench.passed(sought=b"it is there") == expected
    assert bench.passed(sought=b"") == [None] * len(SLOTS)


def test_a_message_that_holds_what_frames_begin_with_is_left_to_be_read() -> None:
    bench = Bench()
    value = (MAGIC + b" ") * 20  # at every place between multiples of 8
    append(bench.wheel, [message(1, slot=int(SLOTS[at]), value=value) for at in (7, -1)])
    expected: list[PassedSecond | None] = [*bench.read()]
    expected[7] = expected[-1] = None
    assert bench.passed() == expected


def test_frames_with_something_between_them_are_left_to_be_read() -> None:
    bench, shorter = Bench(), Bench(longer=1)
    expected: list[PassedSecond | None] = [*bench.read()]
    expected[9] = None
    content = bench.disk.content(bench.path(9))
    first, other = first_frame(content), first_frame(shorter.disk.content(shorter.path(9)))
    assert len(other) < len(first)
    gap = bytes(len(first) - len(other))
    bench.disk.set_content(bench.path(9), other + gap + content[len(first) :])
    assert bench.passed() == expected


@pytest.mark.parametrize("number", [4, 10], ids=["counted and behind", "counted"])
def test_a_flipped_bit_anywhere_leaves_its_file_to_be_read(number: int) -> None:
    bench = Bench()
    reader, near = WheelReader(bench.disk, DATA, bench.wheel.wheel), SLOTS[number - 1 : number + 2]
    before, this, after = bench.read()[number - 1 : number + 2]
    for byte in range(len(bench.disk.content(bench.path(number)))):
        bench.disk.flip_bit(bench.path(number), 8 * byte + byte % 8)
        passed = list(reader.passing_over(near, ALL, lambda _: False))
        assert passed == [before, None, after], byte
        bench.disk.flip_bit(bench.path(number), 8 * byte + byte % 8)
    assert list(reader.passing_over(near, ALL, lambda _: False)) == [before, this, after]


@pytest.mark.parametrize(
    "to",
    [
        lambda _: b"",
        lambda content: content[:-8],
        lambda content: content + bytes(8),
        lambda content: content + bytes(200),
        lambda content: content * 2,
        lambda content: content[len(content) // 2 :] + content[: len(content) // 2],
        lambda content: content[len(content) // 2 :] * 2,
    ],
    ids=["empty", "short", "torn", "zeros", "twice", "out of order", "one twice"],
)
def test_a_file_with_other_frames_is_left_to_be_read(to: Callable[[bytes], bytes]) -> None:
    bench = Bench()
    expected: list[PassedSecond | None] = [*bench.read()]
    expected[9] = None
    assert len(bench.disk.content(bench.path(9))) % 16 == 0
    bench.change(bench.path(9), to)
    assert bench.passed() == expected


@pytest.mark.parametrize(
    "other",
    [Bench(wheel=2), Bench(seqs_later=1), Bench(longer=1)],
    ids=["wheel", "seqs", "lengths"],
)
def test_good_frames_that_are_others_are_left_to_be_read(other: Bench) -> None:
    bench = Bench()
    expected: list[PassedSecond | None] = [*bench.read()]
    expected[9] = None
    content = other.disk.content(other.path(9))
    assert len(content) == len(bench.disk.content(bench.path(9)))
    bench.disk.set_content(bench.path(9), content)
    assert bench.passed() == expected


def test_a_file_that_is_gone_or_of_another_second_is_left_to_be_read() -> None:
    bench = Bench()
    expected: list[PassedSecond | None] = [*bench.read()]
    expected[9] = expected[12] = None
    bench.disk.delete(bench.path(9))
    bench.disk.set_content(bench.path(12), bench.disk.content(bench.path(15)))
    assert bench.passed() == expected


def test_a_frame_without_its_row_is_left_to_be_read() -> None:
    """One that the table does not count; those that it counts need no row."""
    bench = Bench()
    expected: list[PassedSecond | None] = [*bench.read()]
    bench.change(
        layout.index_path(bench.folder, 0), lambda rows: rows[:-32] + bytes(16) + rows[-16:]
    )
    changed = bench.passed()
    assert sum(each is None for each in changed) == 1
    assert all(each in {None, before} for each, before in zip(changed, expected, strict=True))


def test_what_is_being_written_is_not_counted_yet() -> None:
    bench = Bench()
    before = bench.read()
    append(bench.wheel, [message(77, slot=int(SLOTS[9]))])
    bench.change(layout.index_path(bench.folder, 0), lambda rows: rows[:-16])
    assert bench.passed() == before


def test_slots_whose_entries_cannot_be_trusted_are_left_to_be_read() -> None:
    bench = Bench()
    expected: list[PassedSecond | None] = [*bench.read()]
    expected[9] = None
    hour, second = divmod(int(SLOTS[9]), HOUR)
    at = second * ENTRY_LENGTH_BYTES + 16
    bench.disk.flip_bit(layout.table_path(bench.folder, hour), 8 * at)
    assert bench.passed() == expected


def test_without_its_table_rows_say_what_there_is() -> None:
    bench = Bench()
    bench.disk.delete_folder(layout.table_folder(bench.folder))
    assert bench.passed() == bench.read()


def test_few_files_are_read_ahead_of_what_must_be_read() -> None:
    bench, opened = Bench(), []
    reader = WheelReader(bench.disk, DATA, bench.wheel.wheel)

    def may_hold(_: bytes) -> bool:
        opened.append(1)
        return len(opened) <= 20

    passing = reader.passing_over(SLOTS, ALL, may_hold)
    ahead = [len(opened) - number for number, _ in enumerate(passing)]
    assert max(ahead[:19]) == 1
    assert 32 <= max(ahead) <= 64
