"""A wheel against a dict: appended to, read, crashed between any two effects, recovered."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from delaywheel.identity import WheelId
from delaywheel.storage.files.slot_files import delete_slots_below
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.files.wheel_folder import list_wheels
from delaywheel.storage.folder import layout
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import message_counts
from delaywheel.storage.reading.reader import DamagedFrame, WheelReader
from delaywheel.storage.recovery.verify import Problem, verify_folder
from delaywheel.storage.writing.dial import Dial, DialView
from delaywheel.storage.writing.wheel import OriginWheel, WheelBroken
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.wheels.copies import count_again, recover_wheel, rows_by_seq
from support.wheels.messages import BASE_SLOT, Message, columns_of, message, messages_of, names_of
from support.wheels.wheels import ACCEPTED_AT_MS, append, delete_below, new_wheel, read_all

DATA = Path("/data")
SLOTS = 4
DIAL_ROWS = 16

# Small and large values: writes of less than a sector and of several. That any content comes
# back is shown in test_format.py; here few choices let a failure shrink to something readable.
GROUPS = st.lists(
    st.builds(
        lambda number, ahead, length: message(number, slot=BASE_SLOT + ahead, value=bytes(length)),
        st.integers(0, 999),
        st.integers(0, SLOTS - 1),
        st.sampled_from([0, 50, 1500]),
    ),
    min_size=1,
    max_size=6,
)


class WheelMachine(RuleBasedStateMachine):
    """``promised`` is what a caller was answered; ``attempted`` what perhaps had no answer.

    What had none may be found or not: never acknowledged is zero copies or one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.disk = SimulatedDisk()
        self.floor = BASE_SLOT
        self.promised: dict[tuple[WheelId, int], list[Message]] = {}
        self.synced: set[tuple[WheelId, int]] = set()
        self.attempted: list[Message] = []
        self.machine_crashed = False
        self.number = 0
        self._open()

    def _open(self) -> None:
        self.number += 1
        self.dial = Dial(self.disk, DATA, DIAL_ROWS)
        count_again(self.dial, self.disk, DATA, floor=self.floor)
        self.wheel: OriginWheel = new_wheel(self.disk, DATA, self.number, handles=2, dial=self.dial)

    def _promise(self, wheel: WheelId, frames: dict[int, list[Message]]) -> None:
        for seq, messages in frames.items():
            assert (wheel, seq) not in self.promised, "a seq was given twice"
            if messages[0].due_ms // 1000 >= self.floor:
                self.promised[wheel, seq] = messages

    def _above_floor(self, messages: list[Message]) -> list[Message]:
        """Appends to finished slots are not allowed: such dues are moved to the floor."""
        lowest_ms = self.floor * 1000
        return [replace(each, due_ms=max(each.due_ms, lowest_ms)) for each in messages]

    @rule(messages=GROUPS)
    def append(self, messages: list[Message]) -> None:
        messages = self._above_floor(messages)
        self._promise(self.wheel.wheel, append(self.wheel, messages))

    @rule()
    def checkpoint(self) -> None:
        seq = self.wheel.checkpoint()
        self.synced |= {(self.wheel.wheel, each) for each in range(1, seq + 1)}

    @rule(step=st.integers(1, 2))
    def raise_floor(self, step: int) -> None:
        self.floor = min(self.floor + step, BASE_SLOT + SLOTS - 1)
        delete_below(self.wheel, self.floor)
        for wheel in list_wheels(self.disk, DATA):
            if wheel != self.wheel.wheel:
                folder = layout.wheel_folder(DATA, wheel)
                list(delete_slots_below(self.disk, folder, self.floor, Undeletable()))
        self.dial.clear_below(self.floor)
        self.promised = {
            place: messages
            for place, messages in self.promised.items()
            if messages[0].due_ms // 1000 >= self.floor
        }

    @rule(
        messages=GROUPS,
        effects=st.integers(0, 14),
        torn_share=st.sampled_from([0.0, 0.4, 0.99]),
    )
    def crash_in_append(self, messages: list[Message], effects: int, torn_share: float) -> None:
        messages = self._above_floor(messages)
        self.attempted += messages
        self.disk.crash_after(effects, torn_share=torn_share)
        self._until_crash(lambda: self.append(messages))
        self._restart(None)

    @rule(effects=st.integers(0, 8))
    def crash_in_checkpoint(self, effects: int) -> None:
        self.disk.crash_after(effects)
        self._until_crash(self.checkpoint)
        self._restart(None)

    @rule(messages=GROUPS, seed=st.integers(0, 1 << 32))
    def machine_crash_in_append(self, messages: list[Message], seed: int) -> None:
        chance = Random(seed)
        messages = self._above_floor(messages)
        self.attempted += messages
        self.disk.crash_after(chance.randrange(12), torn_share=chance.random())
        self._until_crash(lambda: self.append(messages))
        self._restart(chance)

    @rule(
        messages=GROUPS,
        countdown=st.integers(0, 5),
        written_bytes=st.sampled_from([0, 7, 16, 100]),
    )
    def medium_refuses(self, messages: list[Message], countdown: int, written_bytes: int) -> None:
        messages = self._above_floor(messages)
        self.attempted += messages
        fault = Fault("write", countdown=countdown, written_bytes=written_bytes)
        self.disk.faults.append(fault)
        try:
            self.append(messages)
        except WheelBroken as broken:
            held = rows_by_seq(broken.done)
            done = {seq: [messages[row] for row in rows] for seq, rows in held.items()}
            self._promise(self.wheel.wheel, done)
        self.disk.faults.clear()
        self.wheel.close()
        self._recover_all(machine_crashed=False)
        self._open()

    def _until_crash(self, action: Callable[[], None]) -> None:
        with suppress(Crash):
            action()

    def _restart(self, machine_crash: Random | None) -> None:
        self.disk.restart(machine_crash)
        self.machine_crashed |= machine_crash is not None
        # Recovery is itself ended early once, and must not mind.
        self.disk.crash_after(3)
        self._until_crash(lambda: self._recover_all(machine_crashed=machine_crash is not None))
        self.disk.restart()
        self._recover_all(machine_crashed=machine_crash is not None)
        self._open()

    def _recover_all(self, *, machine_crashed: bool) -> None:
        for wheel in list_wheels(self.disk, DATA):
            recovered = recover_wheel(
                self.disk, DATA, wheel, os_crashed=machine_crashed, floor=self.floor
            )
            lost = set(recovered.damaged)
            if machine_crashed:  # what was lost without a trace; nothing then came after it
                lost |= {
                    seq
                    for found, seq in self.promised
                    if found == wheel and seq > recovered.last_seq
                }
            self._take_over(wheel, recovered.last_seq, lost)

    def _take_over(self, wheel: WheelId, last_seq: int, damaged: set[int]) -> None:
        """More may be found than was promised, but only of what was attempted."""
        reported = {seq for found, seq in self.promised if found == wheel}
        assert damaged.isdisjoint(seq for found, seq in self.synced if found == wheel)
        self.promised = {
            (found, seq): messages
            for (found, seq), messages in self.promised.items()
            if found != wheel or seq not in damaged
        }
        found_now = read_all(self.disk, DATA, wheel)
        for seq, messages in found_now.items():
            if seq in reported or seq in damaged or isinstance(messages, DamagedFrame):
                continue
            if messages[0].due_ms // 1000 < self.floor:
                continue  # a deletion that the crash undid
            assert all(message in self.attempted for message in messages)
            self.promised[wheel, seq] = messages
        assert last_seq >= max(found_now, default=0)

    @invariant()
    def everything_promised_is_there_and_nothing_else(self) -> None:
        found = {
            (wheel, seq): messages
            for wheel in list_wheels(self.disk, DATA)
            for seq, messages in read_all(self.disk, DATA, wheel).items()
            if not isinstance(messages, DamagedFrame)
        }
        assert {place: found[place] for place in self.promised} == self.promised
        assert all(
            messages[0].due_ms // 1000 < self.floor
            for place, messages in found.items()
            if place not in self.promised
        )

    @invariant()
    def each_frame_is_found_by_its_seq(self) -> None:
        for (wheel, seq), messages in self.promised.items():
            frame = WheelReader(self.disk, DATA, wheel).frame(seq)
            assert not isinstance(frame, DamagedFrame)
            assert messages_of(frame.columns) == messages

    @invariant()
    def the_dial_counts_what_is_there(self) -> None:
        counted = {
            int(row["slot"]): int(row["messages"])
            for row in DialView(self.disk, DATA).rows(self.floor)
        }
        rows = [
            row
            for wheel in list_wheels(self.disk, DATA)
            for row in WheelReader(self.disk, DATA, wheel).rows(1, 1 << 40)
        ]
        expected: dict[int, int] = {}
        for row in rows:
            slot = int(row["slot"])
            if slot >= self.floor:
                expected[slot] = expected.get(slot, 0) + int(message_counts(row))
        assert counted == expected

    @invariant()
    def verify_finds_only_what_crashes_of_the_machine_left(self) -> None:
        findings = list(verify_folder(self.disk, DATA, floor=self.floor))
        assert self.machine_crashed or not findings
        unreadable = {(each.wheel, each.seq) for each in findings if each.problem is Problem.FRAME}
        assert unreadable.isdisjoint(self.promised)


WheelMachine.TestCase.settings = settings(stateful_step_count=25)
TestWheelAgainstDict = WheelMachine.TestCase


def test_groups_and_cancels_share_one_run_of_seqs() -> None:
    disk = SimulatedDisk()
    wheel = new_wheel(disk, DATA)
    columns = columns_of([Message(BASE_SLOT * 1000, bytes(16), "t")])
    first = wheel.append(columns, accepted_at_ms=ACCEPTED_AT_MS)
    cancels = names_of(columns)
    second = wheel.append(cancels, kind=Kind.CANCELS, accepted_at_ms=ACCEPTED_AT_MS)
    assert [*rows_by_seq(first), *rows_by_seq(second)] == [1, 2]
