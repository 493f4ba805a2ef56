"""Two nodes' stores against the truth: one writes wheels, both keep copies, and all may fail.

Whatever befalls them, between any two effects: a frame that a store says it holds is on its disk,
byte for byte as the origin wrote it, in the same place; and nothing else can be read from it.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from structlog.testing import capture_logs

from delaywheel.identity import WheelId
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.node_state import Spare
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.bundle import FrameBundle, FrameCopy
from delaywheel.storage.frames.format import Frame, decode_frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import HOLE_ROW, INDEX_ROW
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.writing.dial import DialView
from delaywheel.storage.writing.wheel import WheelBroken
from delaywheel_replica.core.node.events import HeldWheel
from delaywheel_replica.core.protocol.frames import FrameSet
from delaywheel_replica.server.store.store import Store, StoreLimits
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.wheels.copies import rows_of, slots_of, verified
from support.wheels.messages import BASE_SLOT, Message, columns_of, message, messages_of
from support.wheels.wheels import ACCEPTED_AT_MS, ignored

DATA = Path("/data")
SLOTS = 4
MEMBERS = {"a": "storage-a", "b": "storage-b"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silences the log: recoveries and refusals take hundreds of lines."""
    with capture_logs():
        yield


GROUPS = st.lists(
    st.builds(
        lambda number, ahead, length: message(number, slot=BASE_SLOT + ahead, value=bytes(length)),
        st.integers(0, 999),
        st.integers(0, SLOTS - 1),
        st.sampled_from([0, 50, 1500]),
    ),
    min_size=1,
    max_size=5,
)
NODES = st.sampled_from(["a", "b"])
FrameName = tuple[WheelId, int]


class Node:
    """A store, its disk, and what it has promised.

    ``promised``: frames that it said to hold; ``synced``: those of which a checkpoint was made.
    """

    def __init__(self, name: str, *, sync_groups: bool) -> None:
        self.name = name
        self.disk = SimulatedDisk()
        self.limits = StoreLimits(dial_rows=16, open_files=2, sync_groups=sync_groups)
        self.boots = 1
        self.starts = 0
        self.is_doubtful = False
        self.floor = 0
        self.promised: set[FrameName] = set()
        self.synced: set[FrameName] = set()
        self.store = self.opened()

    def opened(self) -> Store:
        store = Store.open(
            self.disk,
            DATA,
            node=self.name,
            cluster_id="cluster",
            boot_id=f"boot-{self.boots}",
            floor=self.floor if self.boots % 2 else 0,
            limits=self.limits,
            new_storage=lambda: MEMBERS[self.name],
        )
        assert store.state.starts > self.starts, "every start is counted"
        assert store.state.boot_id == f"boot-{self.boots}"
        assert store.state.all_incomplete or not self.is_doubtful
        self.starts = store.state.starts
        return verified(store)

    def restart(self, machine_crash: Random | None, early_end: int) -> None:
        self.disk.restart(machine_crash)
        if machine_crash is not None:
            self.boots += 1
            self.is_doubtful = not self.limits.sync_groups
        # The start is itself ended early once, and must not mind.
        self.disk.crash_after(early_end)
        with suppress(Crash):
            self.opened()
        self.disk.restart()
        self.store = self.opened()

    def holds(self, held: HeldWheel) -> None:
        """Notes what was reported to others as held."""
        wheel = held.card.wheel
        self.promised |= {
            (wheel, seq) for seq in range(1, held.applied + 1) if seq not in held.missing
        }

    def forget(self, wheel: WheelId, seq: int) -> None:
        self.promised.discard((wheel, seq))
        self.synced.discard((wheel, seq))


class StoreMachine(RuleBasedStateMachine):
    """Node a writes; its earlier wheels, and everything on node b, are copies."""

    sync_groups: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.floor = BASE_SLOT
        self.attempted: list[Message] = []
        self.truth: dict[FrameName, FrameCopy] = {}
        self.wheels: list[WheelId] = []
        self.ends: dict[WheelId, int] = {}
        self.lost: set[FrameName] = set()
        self.nodes = {name: Node(name, sync_groups=self.sync_groups) for name in MEMBERS}
        self._open_next()

    # --- the origin

    def _open_next(self) -> None:
        store = self.nodes["a"].store
        if store.wheel is not None:
            self._hold("a", store.leave_wheel() or finish(store.verifying(self.wheels[-1])))
        wheel = WheelId("a", len(self.wheels) + 1)
        self.wheels.append(wheel)
        store.save(replace(store.state, open=wheel, last_number=wheel.number))
        store.open_wheel(Spare(wheel, 0, MEMBERS, 2))

    @rule(messages=GROUPS)
    def append(self, messages: list[Message]) -> None:
        store = self.nodes["a"].store
        lowest_ms = self.floor * 1000
        messages = [replace(each, due_ms=max(each.due_ms, lowest_ms)) for each in messages]
        self.attempted += messages
        wheel = self.wheels[-1]
        store.append(columns_of(messages), Kind.MESSAGES, ACCEPTED_AT_MS)
        self.nodes["a"].promised |= {(wheel, seq) for seq in range(1, store.last_seq + 1)}
        assert store.top_slot >= max(each.due_ms // 1000 for each in messages)

    @rule()
    def next_wheel(self) -> None:
        self._open_next()

    # --- the copies

    def _hold(self, name: str, held: HeldWheel) -> None:
        self.nodes[name].holds(held)

    def _take(self, name: str, wheel: WheelId, most: int = 1000) -> None:
        """The node fetches from the other the frames after its own."""
        taker, giver = self._pair(name)
        if taker.store.wheel is not None and taker.store.wheel.wheel == wheel:
            return
        held = taker.store.held_wheels().get(wheel)
        first = 1 if held is None else held.applied + 1
        frames, _ = self._read(giver, wheel, first, first + most)
        if frames:
            self._hold(name, taker.store.mirror(giver.store.card(wheel), frames))

    def _mend(self, name: str, wheel: WheelId) -> None:
        """The node fetches its missing frames from the other."""
        taker, giver = self._pair(name)
        held = taker.store.held_wheels().get(wheel)
        for seq in () if held is None else held.missing:
            frames, _ = self._read(giver, wheel, seq, seq)
            if len(frames):
                self._hold(name, taker.store.repair(giver.store.card(wheel), frames))

    def _pair(self, name: str) -> tuple[Node, Node]:
        return self.nodes[name], self.nodes["b" if name == "a" else "a"]

    def _read(
        self, node: Node, wheel: WheelId, first: int, last: int
    ) -> tuple[FrameBundle, list[int]]:
        frames, missing, _ = node.store.outgoing.read(
            wheel, first, last, max_bytes=4000, max_frames=8, floor=node.floor, now_ms=0
        )
        for copy in frames.copies():
            assert not copy.content or self._see(wheel, copy)
        for seq in missing:
            node.forget(wheel, seq)
        assert frames.seqs.tolist() == list(range(first, first + len(frames)))
        assert len(frames) <= 8
        return frames, list(missing)

    @rule(name=NODES, number=st.integers(0, 9), most=st.integers(0, 6))
    def take(self, name: str, number: int, most: int) -> None:
        self._take(name, self.wheels[-1 - number % len(self.wheels)], most)

    @rule(name=NODES, number=st.integers(0, 9))
    def mend(self, name: str, number: int) -> None:
        self._mend(name, self.wheels[-1 - number % len(self.wheels)])

    @rule(name=NODES)
    def checkpoint(self, name: str) -> None:
        node = self.nodes[name]
        node.store.checkpoint(ignored)
        node.synced |= {each for each in node.promised if self._is_reported(node, each)}

    def _is_reported(self, node: Node, frame: FrameName) -> bool:
        wheel, seq = frame
        held = node.store.held_wheels().get(wheel)
        return held is None or (seq <= held.applied and seq not in held.missing)

    @rule(number=st.integers(0, 9))
    def close(self, number: int) -> None:
        """Both learn, one after the other, that a wheel ends at the greatest held frame."""
        wheel = self.wheels[-1 - number % len(self.wheels)]
        if wheel == self.wheels[-1]:
            self._open_next()
        held = {name: node.store.held_wheels().get(wheel) for name, node in self.nodes.items()}
        if wheel not in self.ends:
            applied = [each.applied for each in held.values() if each is not None]
            if not applied:
                return
            # Not all that is held need be known when the end is committed.
            self.ends[wheel] = min(applied) if number % 2 and len(applied) == 2 else max(applied)
            for node in self.nodes.values():
                for seq in range(self.ends[wheel] + 1, max(applied) + 1):
                    node.forget(wheel, seq)
        for name, node in self.nodes.items():
            if held[name] is not None:
                closed = node.store.close_wheel(wheel, self.ends[wheel])
                assert closed.final_seq == self.ends[wheel]
                assert closed.applied <= self.ends[wheel]
                self._hold(name, closed)

    @rule(step=st.integers(0, 1), name=NODES)
    def sweep(self, step: int, name: str) -> None:
        self.floor = min(self.floor + step, BASE_SLOT + SLOTS - 1)
        node = self.nodes[name]
        node.floor = self.floor
        assert all(slot is None or slot < self.floor for slot in node.store.sweep(self.floor))

    @rule(name=NODES, number=st.integers(0, 9), chance=st.randoms(use_true_random=False))
    def flip_bit(self, name: str, number: int, chance: Random) -> None:
        """The medium damages a frame; a reader finds that, and has it repaired."""
        node, other = self._pair(name)
        wheel = self.wheels[-1 - number % len(self.wheels)]
        places = sorted(
            seq
            for found, seq in node.promised & other.promised
            if found == wheel and self._is_alive((found, seq))
        )
        if not places or (node.store.wheel is not None and node.store.wheel.wheel == wheel):
            return
        seq = chance.choice(places)
        copy = self.truth[wheel, seq]
        slot, offset, length, _ = np.frombuffer(copy.row, dtype=INDEX_ROW)[0].item()
        path = layout.slot_path(layout.wheel_folder(DATA, wheel), slot)
        node.disk.flip_bit(path, 8 * offset + chance.randrange(8 * length))
        node.forget(wheel, seq)
        frames, missing = self._read(node, wheel, seq, seq)
        assert (len(frames), missing) == (0, [seq])
        assert seq in node.store.held(wheel).missing
        self._mend(name, wheel)

    # --- what befalls them

    def _actions(self, name: str, number: int) -> list[Callable[[], None]]:
        wheel = self.wheels[-1 - number % len(self.wheels)]
        return [
            lambda: self._take(name, wheel),
            lambda: self._take(name, wheel),
            lambda: self._mend(name, wheel),
            lambda: self.checkpoint(name),
            lambda: self.close(number),
            lambda: self.sweep(1, name),
            self._open_next,
        ]

    @rule(
        name=NODES,
        number=st.integers(0, 9),
        action=st.integers(0, 6),
        effects=st.integers(0, 12),
        torn_share=st.sampled_from([0.0, 0.4, 0.99]),
        seed=st.none() | st.integers(0, 1 << 32),
        early_end=st.integers(0, 9),
    )
    def crash(
        self,
        name: str,
        number: int,
        action: int,
        effects: int,
        torn_share: float,
        seed: int | None,
        early_end: int,
    ) -> None:
        self.nodes[name].disk.crash_after(effects, torn_share=torn_share)
        with suppress(Crash):
            self._actions(name, number)[action]()
        self._restart(name, seed, early_end)

    @rule(messages=GROUPS, effects=st.integers(0, 12), seed=st.none() | st.integers(0, 1 << 32))
    def crash_in_append(self, messages: list[Message], effects: int, seed: int | None) -> None:
        self.nodes["a"].disk.crash_after(effects, torn_share=0.6)
        with suppress(Crash):
            self.append(messages)
        self._restart("a", seed, effects)

    @rule(
        name=NODES,
        number=st.integers(0, 9),
        action=st.integers(0, 6),
        operation=st.sampled_from(["write", "write", "sync", "read", "open", "delete"]),
        countdown=st.integers(0, 5),
        written_bytes=st.sampled_from([0, 7, 16, 100]),
    )
    def medium_refuses(
        self,
        name: str,
        number: int,
        action: int,
        operation: str,
        countdown: int,
        written_bytes: int,
    ) -> None:
        disk = self.nodes[name].disk
        disk.faults.append(Fault(operation, countdown=countdown, written_bytes=written_bytes))
        try:
            self._actions(name, number)[action]()
        except (OSError, WheelBroken):
            pass
        finally:
            disk.faults.clear()
        self._origin_goes_on()

    @rule(messages=GROUPS, countdown=st.integers(0, 5), written_bytes=st.sampled_from([0, 7, 16]))
    def medium_refuses_append(
        self, messages: list[Message], countdown: int, written_bytes: int
    ) -> None:
        disk = self.nodes["a"].disk
        disk.faults.append(Fault("write", countdown=countdown, written_bytes=written_bytes))
        try:
            self.append(messages)
        except WheelBroken as broken:  # its callers hear that these count
            names = {(self.wheels[-1], seq) for seq in broken.done.bundle.seqs.tolist()}
            self.nodes["a"].promised |= names
        disk.faults.clear()
        self._origin_goes_on()

    def _origin_goes_on(self) -> None:
        wheel = self.nodes["a"].store.wheel
        if wheel is None or wheel.broken is not None or wheel.wheel != self.wheels[-1]:
            self._open_next()

    def _restart(self, name: str, seed: int | None, early_end: int) -> None:
        node = self.nodes[name]
        node.restart(None if seed is None else Random(seed), early_end)
        for wheel, held in node.store.held_wheels().items():
            kept = node.synced if seed is not None and not self.sync_groups else node.promised
            for found, seq in sorted(kept):
                if found == wheel and self._is_alive((found, seq)) and self._is_within(found, seq):
                    assert seq <= held.applied, "what was reported as held is there"
                    assert seq not in held.missing, "what was reported as held is there"
        if seed is not None and not self.sync_groups:
            node.promised = set(node.synced)
        for held in node.store.held_wheels().values():
            node.holds(held)
        for frame in self.lost:
            node.store.forget_lost(FrameSet.of([frame]))
        if name == "a":
            self._open_next()

    # --- when nothing more happens

    @rule()
    def everything_is_mended(self) -> None:
        """Both fetch and repair until they hold the same; what neither has is lost."""
        for node in self.nodes.values():
            node.floor = self.floor  # each learns of it from the control topic, sooner or later
            list(node.store.sweep(node.floor))
        for wheel in self.wheels:
            for _ in range(200):
                before = self._state_of(wheel)
                for name in MEMBERS:
                    self._take(name, wheel)
                    self._mend(name, wheel)
                if before == self._state_of(wheel) and not self._lose(wheel):
                    break
            self._assert_same(wheel)

    def _state_of(self, wheel: WheelId) -> list[HeldWheel | None]:
        return [node.store.held_wheels().get(wheel) for node in self.nodes.values()]

    def _lose(self, wheel: WheelId) -> bool:
        """Frames that no node can read are committed as lost."""
        missing = {seq for held in self._state_of(wheel) if held for seq in held.missing}
        lost = [
            (wheel, seq)
            for seq in missing
            if not any(self._read(node, wheel, seq, seq)[0] for node in self.nodes.values())
        ]
        self.lost.update(lost)
        for node in self.nodes.values():
            node.store.forget_lost(FrameSet.of(lost))
        return bool(lost)

    def _assert_same(self, wheel: WheelId) -> None:
        one, other = (node.store for node in self.nodes.values())
        mirrored = other.held_wheels().get(wheel)
        if one.wheel is not None and one.wheel.wheel == wheel:
            last_seq = one.last_seq
        else:
            held = one.held_wheels().get(wheel)
            assert held is None or not held.missing
            last_seq = 0 if held is None else held.applied
        assert last_seq == (mirrored.applied if mirrored is not None else 0)
        assert mirrored is None or not mirrored.missing
        if any(found == wheel for found, _ in self.lost):
            return
        if last_seq:
            alive, others = (self._alive(node, wheel) for node in self.nodes.values())
            assert alive == others

    def _alive(self, node: Node, wheel: WheelId) -> dict[int, bytes]:
        """The slots that are not finished, each up to the end of the last frame that has a row.

        Until the wheel's end is committed, something may lie behind: of a group that died with
        the machine, since a start that finds holes cuts nothing that may be theirs; of a copy that
        the medium refused, since the frames are fetched again. Even a file without any row may.
        """
        ends: dict[int, int] = {}
        for row in rows_of(node.disk, DATA, wheel):
            slot, offset, length, _ = np.frombuffer(row, dtype=INDEX_ROW)[0].item()
            ends[slot] = max(ends.get(slot, 0), offset + length)
        slots = slots_of(node.disk, DATA, wheel)
        alive = {slot: content for slot, content in slots.items() if slot >= self.floor}
        held = node.store.held_wheels().get(wheel)
        if held is None or held.final_seq is not None:
            assert all(len(content) == ends.get(slot) for slot, content in alive.items())
        return {slot: content[: ends[slot]] for slot, content in alive.items() if slot in ends}

    # --- what must hold

    def _is_alive(self, frame: FrameName) -> bool:
        copy = self.truth.get(frame)
        if copy is None or frame in self.lost:
            return False
        return int(np.frombuffer(copy.row, dtype=INDEX_ROW)["slot"][0]) >= self.floor

    def _is_within(self, wheel: WheelId, seq: int) -> bool:
        return seq <= self.ends.get(wheel, seq)

    def _see(self, wheel: WheelId, copy: FrameCopy) -> bool:
        """Notes a frame when first seen; it must be the same ever after."""
        known = self.truth.get((wheel, copy.seq))
        if known is None:
            slot = int(np.frombuffer(copy.row, dtype=INDEX_ROW)["slot"][0])
            frame = decode_frame(copy.content, wheel=wheel, slot=slot, seq=copy.seq)
            assert all(each in self.attempted for each in messages_of(frame.columns))
            self.truth[wheel, copy.seq] = copy
            return True
        return known == copy

    @invariant()
    def what_is_reported_to_be_held_is_on_the_disk(self) -> None:
        for node in self.nodes.values():
            for wheel in self.wheels:
                if node.disk.exists(layout.wheel_folder(DATA, wheel)):
                    self._look(node, wheel)

    def _look(self, node: Node, wheel: WheelId) -> None:
        folder = layout.wheel_folder(DATA, wheel)
        rows = rows_of(node.disk, DATA, wheel)
        held = node.store.held_wheels().get(wheel)
        missing = set() if held is None else set(held.missing)
        if held is not None:
            assert len(rows) == held.applied
            assert held.applied <= self.ends.get(wheel, 1 << 40) or held.final_seq is None
        # What is behind the end may be half cut off, if the medium refused: it is cut off again.
        for seq, row in enumerate(rows[: self.ends.get(wheel)], 1):
            if seq in missing or (wheel, seq) in self.lost:
                continue
            assert row != HOLE_ROW
            slot, offset, length, _ = np.frombuffer(row, dtype=INDEX_ROW)[0].item()
            if slot < self.floor:
                continue
            content = node.disk.peek(layout.slot_path(folder, slot))
            assert content is not None
            copy = FrameCopy(seq, row, bytes(content[offset : offset + length]))
            assert self._see(wheel, copy)

    @invariant()
    def nothing_else_can_be_read(self) -> None:
        for node in self.nodes.values():
            for wheel in self.wheels:
                reader = WheelReader(node.disk, DATA, wheel)
                for seq in range(1, reader.last_seq() + 1):
                    frame = reader.frame(seq)
                    if isinstance(frame, Frame):
                        assert all(each in self.attempted for each in messages_of(frame.columns))

    @invariant()
    def the_dial_counts_what_is_there(self) -> None:
        for node in self.nodes.values():
            counted = {
                int(row["slot"]): int(row["frames"])
                for row in DialView(node.disk, DATA).rows(self.floor)
                if row["frames"]
            }
            expected: dict[int, int] = {}
            for wheel in self.wheels:
                for row in rows_of(node.disk, DATA, wheel):
                    slot, _, length, _ = np.frombuffer(row, dtype=INDEX_ROW)[0].item()
                    if length and slot >= self.floor:
                        expected[slot] = expected.get(slot, 0) + 1
            assert counted == expected, (
                node.name,
                node.store.held_wheels(),
                node.disk.paths(),
                node.starts,
            )


class SyncedStoreMachine(StoreMachine):
    """Nothing counts before it is on the medium: not even a crash of the machine undoes it."""

    sync_groups = True


for _machine in (StoreMachine, SyncedStoreMachine):
    _machine.TestCase.settings = settings(stateful_step_count=25)
TestStores = StoreMachine.TestCase
TestSyncedStores = SyncedStoreMachine.TestCase
