"""Three members, any order of messages, ticks, crashes and closings, and the invariants.

The leader is the real closing; the network loses, repeats and reorders; machines crash with a tail
of what was written.
"""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import FrameCopy
from delaywheel_replica.core.leader.closing import (
    Close,
    closing,
    committed_limits,
    fences_wanted,
    limits_wanted,
    wheels_to_close,
)
from delaywheel_replica.core.leader.registration import Registered, register
from delaywheel_replica.core.node.events import LeaveWheel, Mirror, OpenWheel, Save
from delaywheel_replica.core.protocol.control import ControlState, NodeRecord
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.messages import Applied, Frames
from delaywheel_replica.core.protocol.status_files import Role
from support.core.member_world import FakeCluster, FakeNode, disk_of

NAMES = "abc"
REQUIRED = 2
names = st.sampled_from(NAMES)


class Members(RuleBasedStateMachine):
    """One run."""

    @initialize()
    def begin(self) -> None:
        self.world = FakeCluster(NAMES)
        nodes = {name: NodeRecord(disk_of(name), 0) for name in NAMES}
        self.control = ControlState(nodes=nodes)
        self.frames: dict[tuple[WheelId, int], FrameCopy] = {}
        self.promised: dict[tuple[str, WheelId], int] = {}
        self.crashes = 0
        self.boots = 0
        self.world.run(200)
        self.everybody_follows()
        self.world.run(200)

    # --- what may happen

    @rule(name=names, count=st.integers(1, 3))
    def write(self, name: str, count: int) -> None:
        self.world[name].write(count)
        self.world.collect()

    @rule(name=names, ms=st.sampled_from([10, 100, 400, 1_100]))
    def tick(self, name: str, ms: int) -> None:
        self.world[name].tick(ms)
        self.world.collect()

    @precondition(lambda self: self.world.messages)
    @rule(data=st.data(), count=st.integers(1, 12))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.world.messages))):
            index = data.draw(st.integers(0, min(5, len(self.world.messages) - 1)))
            self.world.deliver(index)

    @rule()
    def talk(self) -> None:
        """Everything arrives, but frames and answers to them are slow."""
        slow = [m for m in self.world.messages if isinstance(m[2], Frames | Applied)]
        self.world.messages = [m for m in self.world.messages if m not in slow]
        for _ in range(3):
            for index, message in reversed(list(enumerate(self.world.messages))):
                if not isinstance(message[2], Frames | Applied):
                    self.world.deliver(index)
        self.world.messages = [*slow, *self.world.messages]

    @precondition(lambda self: self.world.messages)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.world.messages[data.draw(st.integers(0, len(self.world.messages) - 1))]

    @precondition(lambda self: self.world.messages)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.world.messages) - 1))
        self.world.messages.append(self.world.messages[index])

    @rule()
    def all_goes_well(self) -> None:
        self.world.run(300)

    @rule(pair=st.permutations(NAMES))
    def cut(self, pair: list[str]) -> None:
        self.world.cut.add((pair[0], pair[1]))

    @rule()
    def mend(self) -> None:
        self.world.cut.clear()

    @rule(name=names, kinds=st.sets(st.sampled_from([Save, Mirror, OpenWheel, LeaveWheel])))
    def refuse(self, name: str, kinds: set[type]) -> None:
        self.world[name].store.refuses = kinds

    @rule(name=names, unverified=st.booleans())
    def restart(self, name: str, *, unverified: bool) -> None:
        self.world[name].restart(unverified=unverified)

    @precondition(lambda self: self.crashes < 1)
    @rule(name=names, lost=st.integers(0, 3))
    def crash(self, name: str, lost: int) -> None:
        """One machine crashes: with N = 3 and W = 2, only one may lose something."""
        self.crashes += 1
        self.boots += 1
        store = self.world[name].store
        for wheel, seqs in store.frames.items():
            end = max(seqs, default=0) - lost
            store.frames[wheel] = {seq: frame for seq, frame in seqs.items() if seq <= end}
            self.promised.pop((name, wheel), None)
        self.world[name].crash_machine(f"boot-{name}-{self.boots}", unverified=True)

    @rule(name=names)
    def follow(self, name: str) -> None:
        node = self.world[name]
        node.cleaner_reports(node.cleaner(dict(self.control.wheels)))
        self.world.collect()

    @rule(name=names, silent=st.none() | names)
    def lead(self, name: str, silent: str | None = None) -> None:
        """A transaction of a leader that knows what this node knows.

        It may find that a node is silent, though that lives and writes.
        """
        node = self.world[name]
        node.tick(10)
        status = node.status()
        heartbeats = {name: status.heartbeat} | {
            n: known.heartbeat for n, known in status.peers.items()
        }
        state = self.control
        results = {
            wheel: closing(wheel, state, status.answers, heartbeats, taken=0)
            for wheel in wheels_to_close(state, heartbeats, () if silent is None else silent)
        }
        changed = dict(limits_wanted(state, results))
        for wheel, result in results.items():
            if isinstance(result, Close):
                self.check_end(wheel, result.final_seq)
                changed[wheel] = replace(state.wheels[wheel], closed_at=result.final_seq)
        self.control = replace(state, wheels={**state.wheels, **changed})
        self.register_for(heartbeats)
        node.cleaner_reports(
            node.cleaner(
                dict(self.control.wheels),
                role=Role.LEADING,
                fences=tuple(fences_wanted(results)),
                limits=committed_limits(state),
            )
        )
        self.world.collect()

    def register_for(self, heartbeats: Mapping[str, Heartbeat]) -> None:
        for name, heartbeat in sorted(heartbeats.items()):
            if heartbeat.spare is not None:
                continue
            answer = register(
                self.control,
                name,
                heartbeat.storage,
                heartbeat.last_number,
                saves=heartbeat.saves,
                members={each: disk_of(each) for each in NAMES},
                min_insync=REQUIRED,
                floor=0,
            )
            assert isinstance(answer, Registered)
            self.control = self.control.apply_all(answer.records)

    def everybody_follows(self) -> None:
        for name in NAMES:
            self.lead(name)
            self.world.settle()

    # --- what must hold

    def check_end(self, wheel: WheelId, end: int) -> None:
        acknowledged = self.world[wheel.node].acknowledged.get(wheel, 0)
        assert end >= acknowledged, f"{wheel} ends at {end}, acknowledged up to {acknowledged}"

    @invariant()
    def one_writer(self) -> None:
        for node in self.world.nodes.values():
            for wheel, seqs in node.store.frames.items():
                for seq, frame in seqs.items():
                    known = self.frames.setdefault((wheel, seq), frame)
                    assert known == frame or self.is_cut(wheel, seq), f"{wheel} {seq}"

    def is_cut(self, wheel: WheelId, seq: int) -> bool:
        record = self.control.wheels[wheel]
        return record.closed_at is not None and seq > record.closed_at

    @invariant()
    def what_is_acknowledged_is_held_by_enough(self) -> None:
        for name, node in self.world.nodes.items():
            for wheel, seq in node.acknowledged.items():
                holders = sum(
                    seq in each.store.frames.get(wheel, {}) for each in self.world.nodes.values()
                )
                assert holders >= REQUIRED - self.crashes, f"{name}: {wheel} {seq}"

    @invariant()
    def who_promised_takes_no_more(self) -> None:
        for name, node in self.world.nodes.items():
            for wheel, seqs in node.store.frames.items():
                if wheel.number > node.store.state.fenced.get(wheel.node, 0):
                    continue
                record = self.control.wheels[wheel]
                allowed = max(record.limit, record.closed_at or 0)
                end = max(seqs, default=0)
                before = self.promised.setdefault((name, wheel), end)
                assert end <= max(before, allowed), f"{name} took {wheel} {end}"

    def teardown(self) -> None:
        """Everything heals: all nodes accept again, and every wheel that was left is closed."""
        if not hasattr(self, "world"):
            return
        self.mend()
        for name in NAMES:
            self.world[name].store.refuses = set()
        for _ in range(30):
            self.world.run(300)
            self.lead("a")
            self.follow("b")
            self.follow("c")
            self.world.settle()
        self.who_promised_takes_no_more()
        for node in self.world.nodes.values():
            self.check_healed(node)

    def check_healed(self, node: FakeNode) -> None:
        heartbeat = node.status().heartbeat
        assert heartbeat.open is not None
        assert heartbeat.spare is not None
        assert heartbeat.complete, node.store.state
        last = node.write(1)
        assert last > 0
        self.world.run(200)
        assert node.acknowledged.get(heartbeat.open) == last, node.machine._current.replication
        for wheel, record in self.control.wheels.items():
            if wheel.node == node.name and wheel not in heartbeat.named:
                assert record.closed_at is not None, f"{wheel} stays open"
            if record.closed_at:
                held = node.store.frames[wheel]
                assert list(held) == list(range(1, record.closed_at + 1)), f"{node.name} {wheel}"


Members.TestCase.settings = settings(
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestMembers = Members.TestCase
