"""Every step, after any history, holds exactly what the definition says."""

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.cleaner.due import loading, seconds
from delaywheel_replica.cleaner.due import reader as selection
from delaywheel_replica.cleaner.due.reader import LOOK_AGAIN_MS, DueReader
from delaywheel_replica.cleaner.due.steps import Step
from delaywheel_replica.core.protocol.frames import NO_FRAMES
from delaywheel_replica.core.protocol.progress import Progress
from support.core.violations import violations
from support.due.oracle import as_message, verdicts
from support.due.wheels import Sent, Written, wheels_in_memory
from support.due.whenever import Whenever

START_MS = 1_700_000_000_500
WHEELS = [WheelId("a", 1), WheelId("b", 1), WheelId("a", 2), WheelId("aa", 7)]

wheels = st.sampled_from(WHEELS)
# Dues crowd around the clock and around each other, so that late frames, duplicates and
# parts of one millisecond come often.
ahead_ms = st.one_of(
    st.integers(-1600, 3000), st.sampled_from([-1000, -2, -1, 0, 1, 2, 499, 500, 501, 1500])
)
blobs = st.sampled_from([None, b"", b"x", b"y", b"some more"])


HALF = (("x", b""), ("dw-half", b"shop"))


@st.composite
def messages(draw: st.DrawFn) -> Sent:
    return Sent(
        due_ms=draw(ahead_ms),
        id=bytes([draw(st.integers(0, 4))]) * 16,
        topic=draw(st.sampled_from(["orders", "bills"])),
        key=draw(blobs),
        value=draw(blobs),
        headers=draw(
            st.sampled_from(
                [(), (("h", None), ("h", b"1")), HALF, (("h", b"\7\0\0\0\1\0\0\0dw-half"),)]
            )
        ),
        partition=draw(st.sampled_from([-1, 3])),
        timestamp_ms=draw(st.sampled_from([-1, 12])),
    )


LATER_MS = 1 << 50


class Selection(RuleBasedStateMachine):
    """Writers, a clock, a leader that steps, commits, crashes, and is followed by another."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.wheels = self.stack.enter_context(wheels_in_memory(max_frame_messages=4))
        self.now_ms = START_MS
        self.progress = Progress(START_MS - 800, None, {}, START_MS // 1000 - 3)
        self.limits: dict[WheelId, int] = {}
        self.skipped: set[tuple[WheelId, int]] = set()
        self.damaged: dict[tuple[WheelId, int], Written] = {}
        self.ever_damaged: set[tuple[WheelId, int]] = set()
        self.lost = NO_FRAMES
        self.fates: dict[tuple[str, bytes, int], int] = {}
        self.reader = self.new_reader()
        self.stack.callback(self.close_reader)

    @initialize(rows=st.lists(messages(), max_size=12), wheel=wheels)
    def written_before(self, rows: list[Sent], wheel: WheelId) -> None:
        self.write(rows, wheel)

    @rule(rows=st.lists(messages(), min_size=1, max_size=12), wheel=wheels)
    def write(self, rows: list[Sent], wheel: WheelId) -> None:
        dated = [replace(row, due_ms=self.now_ms + row.due_ms) for row in rows]
        if dated:
            self.note(self.wheels.write(wheel, dated, now_ms=self.now_ms))

    @rule(data=st.data(), wheel=wheels)
    @precondition(lambda self: self.wheels.frames)
    def write_again(self, data: st.DataObject, wheel: WheelId) -> None:
        frame = data.draw(st.sampled_from(self.wheels.frames))
        self.note(self.wheels.write(wheel, frame.rows, now_ms=self.now_ms))

    @rule(
        data=st.data(),
        wheel=wheels,
        kind=st.sampled_from([Kind.CANCELS, Kind.COMMITS, Kind.RELEASES]),
    )
    @precondition(lambda self: self.wheels.frames)
    def name(self, data: st.DataObject, wheel: WheelId, kind: Kind) -> None:
        frame = data.draw(st.sampled_from(self.wheels.frames))
        some = data.draw(st.lists(st.sampled_from(frame.rows), min_size=1, max_size=3))
        self.note(self.wheels.cancel(wheel, some, now_ms=self.now_ms, kind=kind))

    @rule(data=st.data(), rows=st.lists(messages(), min_size=1, max_size=3))
    @precondition(lambda self: self.wheels.frames)
    def release(self, data: st.DataObject, rows: list[Sent]) -> None:
        """Begins halves, and commits them at once by the node that has them."""
        wheel = data.draw(wheels)
        begun = [
            replace(row, due_ms=self.now_ms + abs(row.due_ms) + 1_000, headers=HALF) for row in rows
        ]
        self.note(self.wheels.write(wheel, begun, now_ms=self.now_ms))
        self.note(self.wheels.cancel(wheel, begun, now_ms=self.now_ms, kind=Kind.RELEASES))

    @rule(milliseconds=st.sampled_from([1, 2, 30, 499, 1000, 2600, 8_000_000]))
    def wait(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        for wheel, last_seq in self.wheels.last_seqs().items():
            known = self.limits.get(wheel, 0)
            self.limits[wheel] = data.draw(
                st.sampled_from([last_seq, known, (known + last_seq) // 2])
            )
        self.reader.update(self.limits, self.lost)

    @rule(
        cap_messages=st.sampled_from([1, 2, 3, 10, 1000]),
        cap_bytes=st.sampled_from([1, 10, 1_000_000]),
        steps=st.integers(1, 4),
        floor=st.booleans(),
    )
    def step(self, cap_messages: int, cap_bytes: int, steps: int, *, floor: bool) -> None:
        for _ in range(steps):
            self.commit(self.look(cap_messages, cap_bytes), floor=floor)

    @rule(cap_messages=st.sampled_from([1, 3, 1000]))
    def step_without_commit(self, cap_messages: int) -> None:
        self.look(cap_messages, 1_000_000)

    @rule(
        data=st.data(),
        damaged=st.integers(0, 2),
        clock_ms=st.sampled_from([0, 0, -3, -700, 5]),
    )
    def next_leader(self, data: st.DataObject, damaged: int, clock_ms: int) -> None:
        """Another node's leader: some of its copies may be bad."""
        self.reader.close()
        self.now_ms += clock_ms
        for _ in range(damaged):
            good = [frame for frame in self.wheels.frames if place(frame) not in self.damaged]
            if good:
                frame = data.draw(st.sampled_from(good))
                self.wheels.damage(frame)
                self.damaged[place(frame)] = frame
                self.ever_damaged.add(place(frame))
        self.reader = self.new_reader()
        self.reader.update(self.limits, self.lost)

    @rule(
        ahead_ms=st.sampled_from([3, 700, 2_000, 9_000]),
        caps=st.sampled_from([(1, 1), (3, 1_000_000), (1000, 1_000_000)]),
        steps=st.integers(1, 6),
        floor=st.booleans(),
    )
    def lead_ahead(self, ahead_ms: int, caps: tuple[int, int], steps: int, *, floor: bool) -> None:
        """A clock is ahead for a while, is corrected, and an operator sets w back."""
        self.now_ms += ahead_ms
        for _ in range(steps):
            self.commit(self.look(*caps), floor=floor)
        self.now_ms -= ahead_ms
        self.reader.close()
        after = self.progress.set_back(self.now_ms)
        if isinstance(after, Progress):
            assert violations(self.progress, after) == []
            self.progress = after
        self.reader = self.new_reader()
        self.reader.update(self.limits, self.lost)

    @rule(data=st.data())
    @precondition(lambda self: self.damaged)
    def repair(self, data: st.DataObject) -> None:
        bad = data.draw(st.sampled_from(sorted(self.damaged)))
        self.wheels.repair(self.damaged.pop(bad))

    @rule()
    def lose(self) -> None:
        """All members are missing the awaited frames; repaired ones are not given up."""
        waiting = self.reader.unreadable
        self.lost |= waiting - self.reader.look_at_lost(waiting, LATER_MS, floor=0).kept
        self.reader.update(self.limits, self.lost)

    def teardown(self) -> None:
        with self.stack:
            self.finish()

    def finish(self) -> None:
        """After any history, everything is delivered in the end."""
        self.limits = self.wheels.last_seqs()
        self.now_ms = max([self.now_ms, self.progress.due_ms + 1]) + 10_000
        self.reader.update(self.limits, self.lost)
        while True:
            self.load()
            step = self.look(5, 50)
            if step.after == self.progress and not step and self.has_loaded():
                if not self.reader.unreadable:
                    break
                self.lose()
                self.now_ms += LOOK_AGAIN_MS
            self.commit(step, floor=False)
        assert self.progress.due_ms == self.now_ms
        assert {wheel: self.progress.seq(wheel) for wheel in self.limits} == self.limits
        self.check_fates()

    def close_reader(self) -> None:
        self.reader.close()

    def has_loaded(self) -> bool:
        return True

    def load(self) -> None:
        """Lets the second being loaded arrive."""

    def new_reader(self) -> DueReader:
        reader = DueReader(self.wheels.disk, self.wheels.data, preload_thread=False)
        reader.start(self.progress)
        return reader

    def note(self, frames: list[Written]) -> None:
        """Frames below the floor were never acknowledged, and are not read."""
        self.skipped |= {place(frame) for frame in frames if frame.slot < self.progress.floor}

    def look(self, cap_messages: int, cap_bytes: int) -> Step:
        step = self.reader.next_step(self.now_ms, cap_messages, cap_bytes)
        assert step.before == self.progress
        assert violations(step.before, step.after) == []
        assert step.after.due_ms <= max(self.now_ms, self.progress.due_ms)
        assert all(seq <= self.limits[wheel] for wheel, seq in step.after.seqs.items())
        self.check_content(step)
        self.check_caps(step, cap_messages, cap_bytes)
        self.check_waiting(step)
        waits = self.reader.unreadable or not self.has_loaded()
        if not step.behind and self.now_ms >= self.progress.due_ms and not waits:
            assert self.limits.keys() >= self.progress.seqs.keys()
            assert step.after.due_ms == self.now_ms
            assert {w: step.after.seq(w) for w in self.limits} == self.limits
        if not step and self.has_loaded():  # or a leader would spin
            due_ms = self.reader.next_due_ms()
            assert due_ms is None or due_ms > self.now_ms
        return step

    def check_content(self, step: Step) -> None:
        expected = verdicts(self.wheels.frames, self.lost, step.before, step.after)
        forwarded = [as_message(verdict.row) for verdict in expected if verdict.outcome is None]
        assert list(step.messages) == forwarded
        assert [(*dropped[:2], *dropped[6:]) for dropped in step.dropped] == [
            (verdict.outcome, verdict.content_differs, *verdict.row.place)
            for verdict in expected
            if verdict.outcome is not None
        ]
        early = [message for message in step.messages if message.due_ms > self.now_ms]
        assert all(("dw-half", b"shop") in message.headers for message in early)

    def check_caps(self, step: Step, cap_messages: int, cap_bytes: int) -> None:
        rows = len(step.messages) + len(step.dropped)
        length_bytes = step.messages.length_bytes + step.dropped.rows.length_bytes
        if rows > cap_messages or length_bytes > cap_bytes:
            messages = [*step.messages, *step.dropped]
            taken = {(m.wheel, m.seq, m.topic, m.id, m.due_ms) for m in messages}
            assert len({self.taken_by(step, *each) for each in taken}) == 1

    def taken_by(
        self, step: Step, wheel: WheelId, seq: int, topic: str, id_: bytes, due_ms: int
    ) -> tuple[WheelId, int]:
        """The frame with which a step takes a message: its own, or what releases it as a half.

        One release may name halves of several frames, also some that fall due in the same step;
        whoever writes it bounds their bytes.
        """
        before, after = step.before, step.after
        named = [
            (place(frame), frame.kind, row)
            for frame in self.wheels.frames
            if frame.wheel == wheel
            for row in frame.rows
            if (row.topic, row.id, row.due_ms) == (topic, id_, due_ms)
        ]
        is_half = any(
            at == (wheel, seq) and ("dw-half", b"shop") in row.headers for at, _, row in named
        )
        releases = [
            at
            for at, kind, _ in named
            if kind is Kind.RELEASES and max(seq, before.seq(wheel)) < at[1] <= after.seq(wheel)
        ]
        return min(releases) if is_half and due_ms > before.due_ms and releases else (wheel, seq)

    def check_waiting(self, step: Step) -> None:
        """Awaited frames were bad, are not given up, and have not been passed."""
        for wheel, seq in self.reader.unreadable:
            frame = next(f for f in self.wheels.frames if place(f) == (wheel, seq))
            assert (wheel, seq) in self.ever_damaged
            assert frame.slot >= self.progress.floor
            if seq > step.before.seq(wheel):
                assert step.after.seq(wheel) < seq or step.after.due_ms < frame.slot * 1000
        for bad, frame in self.damaged.items():
            newly = step.before.seq(frame.wheel) < frame.seq <= step.after.seq(frame.wheel)
            if newly and bad not in self.lost and frame.slot >= self.progress.floor:
                assert step.after.due_ms < frame.slot * 1000

    def commit(self, step: Step, *, floor: bool) -> None:
        for message in [*step.messages, *(d for d in step.dropped if d.outcome != 2)]:
            key = message.topic, message.id, message.due_ms
            self.fates[key] = self.fates.get(key, 0) + 1
        committed = step.after
        if floor:
            # As seals promise: no frame beyond V is for a slot below the floor.
            ahead = [f.slot for f in self.wheels.frames if f.seq > committed.seq(f.wheel)]
            new_floor = min([committed.due_ms // 1000 - 2, *ahead])
            committed = replace(committed, floor=max(committed.floor, new_floor))
        self.reader.done(step, committed)
        self.progress = committed
        due_ms = self.reader.next_due_ms()
        assert due_ms is None or due_ms > self.progress.due_ms

    def check_fates(self) -> None:
        """Every key once, if none of its copies was in a lost or ignored frame.

        A half whose release is lost may have been forwarded for it, and is asked about as well.
        """
        bad = self.lost | self.skipped
        keys: dict[tuple[str, bytes, int], bool] = {}
        asked_too = {
            (row.topic, row.id, row.due_ms)
            for frame in self.wheels.frames
            if frame.kind is Kind.RELEASES and place(frame) in self.lost
            for row in frame.rows
        }
        for frame in self.wheels.frames:
            if frame.kind is Kind.MESSAGES:
                for row in frame.rows:
                    key = row.topic, row.id, row.due_ms
                    keys[key] = keys.get(key, True) and place(frame) not in bad
        for key, is_sure in keys.items():
            if is_sure:
                fate = self.fates.get(key)
                assert fate == 1 or (key in asked_too and fate == 2), (key, fate)


def place(frame: Written) -> tuple[WheelId, int]:
    return frame.wheel, frame.seq


class SelectionOfCollidingKeys(Selection):
    """The same with useless hashes of keys: all keys are suspected duplicates of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.stack.enter_context(patch.object(seconds, "mix_keys", low_bit))


def low_bit(
    _: NDArray[np.int64], id_low: NDArray[np.uint64], *__: NDArray[np.generic]
) -> NDArray[np.uint64]:
    return id_low & np.uint64(1)


class SelectionWhileLoading(Selection):
    """The same with seconds that are loaded in parallel, and arrive at any time."""

    def __init__(self) -> None:
        self.executor = Whenever()
        super().__init__()
        self.stack.enter_context(patch.object(selection, "_WAIT_FOR_LOADING_S", 0))

    @rule()
    def load(self) -> None:
        self.executor.run()

    def has_loaded(self) -> bool:
        return self.executor.is_idle()

    def new_reader(self) -> DueReader:
        self.executor = Whenever()
        with patch.object(loading, "ThreadPoolExecutor", lambda *_: self.executor):
            reader = DueReader(self.wheels.disk, self.wheels.data, preload_thread=True)
        reader.start(self.progress)
        return reader


TestSelection = Selection.TestCase
TestSelection.settings = settings(stateful_step_count=30)
TestSelectionOfCollidingKeys = SelectionOfCollidingKeys.TestCase
TestSelectionOfCollidingKeys.settings = TestSelection.settings
TestSelectionWhileLoading = SelectionWhileLoading.TestCase
TestSelectionWhileLoading.settings = TestSelection.settings
