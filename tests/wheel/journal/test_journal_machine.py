"""A journal against a list of frames: appended to, damaged, crashed, cut, opened again."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.format import FrameDamaged
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.journal import journal as journal_module
from delaywheel.storage.journal import segments as segments_module
from delaywheel.storage.journal.encode import encode_frames
from delaywheel.storage.journal.format import EMPTY, decode_frame
from delaywheel.storage.journal.journal import BehindEnd, Journal
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.wheels.messages import BASE_SLOT, columns_of, message

WHEEL = WheelId("node-1", 7)
FOLDER = Path("/data/wheels/node-1.7")
SEGMENT_BYTES = 1500
NOTED_EVERY_BYTES = 300
MOST_BYTES = 700

COUNTS = st.integers(1, 5)


@pytest.fixture(autouse=True, scope="module")
def _small_files() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "SEGMENT_LENGTH_BYTES", SEGMENT_BYTES)
        patch.setattr(segments_module, "_NOTED_EVERY_BYTES", NOTED_EVERY_BYTES)
        yield


@cache
def frame_of(seq: int) -> bytes:
    """The only bytes that the wheel's origin may have written for a seq; some are long."""
    size = (0, 50, 0, 900, 200)[seq % 5]
    each = message(seq, slot=BASE_SLOT + seq % 3, value=bytes([seq % 256]) * size)
    group = encode_frames(
        columns_of([each]),
        kind=Kind.MESSAGES,
        wheel=WHEEL,
        first_seq=seq,
        accepted_at_ms=seq,
        max_frame_messages=10,
        max_frame_bytes=1 << 20,
    )
    return bytes(group.content)


class JournalMachine(RuleBasedStateMachine):
    """The journal is a member's, which fetches what it lacks of what the origin has written."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = SimulatedDisk()
        self.disk.make_folder(FOLDER)
        for folder in FOLDER.parents:
            self.disk.sync_folder(folder)
        self.written = 0
        self.empty: set[int] = set()  # declared lost; they may turn up all the same
        self.synced = 0
        self.is_harmed = False  # by something other than the end of a process
        self.is_refused = False  # by the medium, in this step alone
        self.journal = Journal(self.disk, FOLDER, WHEEL)

    def fetch(self, most: int) -> None:
        """Appends what follows on the end, at most so many frames."""
        first = self.journal.end
        parts = [frame_of(seq) for seq in range(first + 1, min(first + most, self.written) + 1)]
        edges = [0]
        for part in parts:
            edges.append(edges[-1] + len(part))
        try:
            self.journal.append(b"".join(parts), edges)
        except OSError:  # a page that is written in part is read before
            assert self.is_harmed or self.is_refused
            self.journal.look_again(self.journal.end + 1)
            return
        assert self.journal.end >= first + len(parts)

    @rule(count=COUNTS)
    def origin_writes_and_all_is_appended(self, count: int) -> None:
        self._append(count)
        assert self.is_harmed or self.journal.end == self.written

    @rule(count=COUNTS, most=st.integers(1, 3))
    def a_part_is_fetched(self, count: int, most: int) -> None:
        self.written += count
        self.fetch(most)

    @rule()
    def sync(self) -> None:
        self.synced = self.journal.sync()
        assert self.synced == self.journal.end

    @rule(share=st.floats(0, 1))
    def some_are_filled(self, share: float) -> None:
        filled = self.journal.filled
        self.journal.fill_through(filled + round(share * (self.journal.end - filled)))

    @rule(beyond=st.integers(1, 3))
    def seconds_are_copied(self, beyond: int) -> None:
        self.written += beyond
        self.journal.fill_through(min(self.journal.end + beyond, self.written))

    @rule()
    def forget(self) -> None:
        self.sync()  # what is not on the medium stays
        self.journal.forget(self.journal.filled)
        paths = self.disk.paths()
        assert len(paths) <= 1 or self.journal.filled < self.journal.end or self.is_harmed

    @rule(back=st.integers(0, 4))
    def the_wheel_is_closed_and_cut(self, back: int) -> None:
        """What the origin writes then may have been cut, and found again after a crash."""
        closed_at = max(self.journal.end - back, self.journal.filled)
        self.journal.cut(closed_at)
        assert self.journal.end == closed_at == self.journal.greatest
        self.synced = min(self.synced, closed_at)
        self.written = closed_at

    @precondition(lambda self: self.journal.end < self.written)
    @rule(count=st.integers(1, 3))
    def frames_are_declared_lost(self, count: int) -> None:
        first = self.journal.end
        last = min(first + count, self.written)
        with suppress(OSError):
            self.journal.put_empty(last)
        assert self.is_harmed or self.journal.end >= last
        self.empty |= set(range(first + 1, last + 1))

    @precondition(lambda self: any(map(self.disk.content, self.disk.paths())))
    @rule(seed=st.integers(0, 1 << 32), is_noticed=st.booleans())
    def something_is_damaged(self, seed: int, is_noticed: bool) -> None:
        chance = Random(seed)
        path = chance.choice([each for each in self.disk.paths() if self.disk.content(each)])
        length = len(self.disk.content(path))
        if chance.random() < 0.3:
            self.disk.spoil(path, 0, length)
        else:
            self.disk.flip_bit(path, chance.randrange(length * 8))
        self.is_harmed = True
        if is_noticed:
            before = self.journal.end
            self._read_all()
            assert self.journal.filled <= self.journal.end <= before
        else:
            self._open()

    def _read_all(self) -> None:
        """Reads as a follower does, and has the journal look again where a frame is damaged."""
        seq = max(self.journal.first_seq, self.journal.filled + 1)
        while seq <= self.journal.end:
            try:
                _, found = self.journal.read(seq, MOST_BYTES)
            except (FrameDamaged, OSError):
                self.journal.look_again(seq)
                assert self.journal.end < seq
            else:
                seq += len(found)

    @rule()
    def the_process_ends(self) -> None:
        self.disk.restart()
        end = self.journal.end
        self._open()
        if not self.is_harmed:
            assert self.journal.end == end
            assert self.journal.behind is not BehindEnd.FRAMES

    @rule(count=COUNTS, effects=st.integers(0, 5), torn_share=st.sampled_from([0.0, 0.4, 0.99]))
    def the_process_ends_in_an_append(self, count: int, effects: int, torn_share: float) -> None:
        before = self.journal.end
        is_in_order = before == self.journal.greatest
        self._until_crash(effects, torn_share, lambda: self._append(count))
        self.disk.restart()
        self._open()
        if is_in_order and not self.is_harmed:
            assert self.journal.end >= before
            assert self.journal.behind is not BehindEnd.FRAMES

    @rule(count=COUNTS, seed=st.integers(0, 1 << 32))
    def the_machine_crashes(self, count: int, seed: int) -> None:
        chance = Random(seed)
        self._until_crash(chance.randrange(7), chance.random(), lambda: self._append(count))
        self.disk.restart(chance)
        self._open()
        if not self.is_harmed:
            assert self.journal.end >= self.synced
        self.is_harmed = True  # a file that was deleted may be there again

    @rule(count=COUNTS, written_bytes=st.sampled_from([0, 7, 64, 300]))
    def a_write_fails(self, count: int, written_bytes: int) -> None:
        before = self.journal.end
        self.disk.faults.append(Fault("write", written_bytes=written_bytes))
        self.is_refused = True
        self._append(count)
        self.is_refused = False
        self.disk.faults.clear()
        assert self.journal.end >= before
        self._open()
        assert self.is_harmed or self.journal.end >= before

    def _append(self, count: int) -> None:
        self.written += count
        self.fetch(self.written)

    def _until_crash(self, effects: int, torn_share: float, action: Callable[[], None]) -> None:
        self.disk.crash_after(effects, torn_share=torn_share)
        with suppress(Crash):
            action()

    def _open(self) -> None:
        filled = self.journal.filled
        self.journal = Journal(self.disk, FOLDER, WHEEL, filled=filled)
        self.synced = min(self.synced, self.journal.end)
        if self.journal.greatest > self.journal.end:
            assert self.journal.behind is BehindEnd.FRAMES

    @invariant()
    def what_is_held_is_what_the_origin_wrote(self) -> None:
        journal = self.journal
        assert journal.filled <= journal.end <= journal.greatest
        for seq in range(journal.filled + 1, journal.greatest + 1):
            if not journal.has(seq):
                assert seq > journal.end
                continue
            with suppress(FrameDamaged, OSError):  # damaged since the journal has looked
                content, found = journal.read(seq, MOST_BYTES)
                for number, at in enumerate(found.edges[:-1], seq):
                    part = content[at : found.edges[number - seq + 1]]
                    if number in self.empty:
                        is_empty = decode_frame(part, wheel=WHEEL, seq=number).kind == EMPTY
                        assert is_empty or part == frame_of(number)
                    else:
                        assert part == frame_of(number)

    @invariant()
    def its_length_is_that_of_its_files(self) -> None:
        on_disk = sum(len(self.disk.content(path)) for path in self.disk.paths())
        assert self.journal.length_bytes == on_disk


JournalMachine.TestCase.settings = settings(stateful_step_count=30)
TestJournalAgainstAList = JournalMachine.TestCase


def test_one_frame_is_one_write_behind_the_last() -> None:
    machine = JournalMachine()
    machine.origin_writes_and_all_is_appended(1)
    before = machine.disk.effects
    machine.origin_writes_and_all_is_appended(2)
    assert machine.disk.effects == before + 1


def test_segments_are_named_after_their_first_seq() -> None:
    machine = JournalMachine()
    for _ in range(9):
        machine.origin_writes_and_all_is_appended(1)
    names = machine.disk.list_folder(layout.journal_folder(FOLDER))
    assert names == ["1.log", "5.log"]


def test_what_was_synced_is_there_after_all_else_is_lost() -> None:
    machine = JournalMachine()
    for _ in range(9):
        machine.origin_writes_and_all_is_appended(1)
    machine.sync()
    machine.origin_writes_and_all_is_appended(3)
    machine.disk.lose_unsynced()
    assert Journal(machine.disk, FOLDER, WHEEL).end == machine.synced == 9


def test_a_frame_that_does_not_fit_its_place_cuts_what_is_behind() -> None:
    """An empty frame was damaged, and a member has the one that had been declared lost."""
    machine = JournalMachine()
    machine.origin_writes_and_all_is_appended(2)
    machine.written += 1
    machine.journal.put_empty(3)
    machine.origin_writes_and_all_is_appended(2)
    (path,) = machine.disk.paths()
    begin = len(frame_of(1) + frame_of(2))
    machine.disk.flip_bit(path, begin * 8)
    machine.journal.look_again(3)
    assert (machine.journal.end, machine.journal.greatest) == (2, 5)
    machine.fetch(1)
    assert (machine.journal.end, machine.journal.greatest) == (3, 3)
    assert machine.journal.read(3, MOST_BYTES)[0] == frame_of(3)


def test_what_a_failed_sync_was_about_is_not_held() -> None:
    machine = JournalMachine()
    machine._append(2)
    machine.sync()
    machine._append(2)
    machine.disk.faults.append(Fault("sync", path_part=".log"))
    with pytest.raises(OSError, match="Input/output"):
        machine.journal.sync()
    assert (machine.journal.end, machine.journal.falls) == (2, 1)
    machine.fetch(2)
    machine.sync()
    machine.disk.lose_unsynced()
    machine.disk.restart()
    assert Journal(machine.disk, FOLDER, WHEEL).end == 4


def test_what_an_earlier_process_left_to_the_kernel_is_synced() -> None:
    machine = JournalMachine()
    machine._append(2)
    machine.disk.restart()
    machine.journal = Journal(machine.disk, FOLDER, WHEEL)
    machine.sync()
    machine.disk.lose_unsynced()
    machine.disk.restart()
    assert Journal(machine.disk, FOLDER, WHEEL).end == 2
