"""An origin's view of its mirrors, against what members really hold, and Kafka's rule."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from delaywheel_replica.core.protocol.seal import Seal
from delaywheel_replica.core.wheels.open_wheel import Replication
from support.core.origin_line import A1, INSYNC_MS, START_MS, Line, config_of

# --- against what members really hold

mirrors = st.sampled_from("bc")


@dataclass
class TrueMirror:
    """What a mirror really holds, and what it has reported."""

    disk: str
    boot: int = 1
    held: int = 0
    # (disk, boot) -> the most that was ever held under it.
    best: dict[tuple[str, str], int] = field(default_factory=dict)
    said: list[tuple[str, str, int]] = field(default_factory=list)
    heartbeats: list[tuple[str, str]] = field(default_factory=list)
    newest_heard: tuple[str, str] | None = None


class Holding(RuleBasedStateMachine):
    """Answers and heartbeats come late, repeated and out of order, while machines crash."""

    @initialize(min_insync=st.integers(1, 3))
    def start(self, min_insync: int) -> None:
        self.now_ms = START_MS
        self.min_insync = min_insync
        self.mirrors = {node: TrueMirror(f"disk-{node}") for node in "bc"}
        self.replication = Replication(
            config_of("abc"),
            A1,
            {node: f"disk-{node}" for node in "abc"},
            min_insync,
            Seal(0, 0),
            in_sync="abc",
            now_ms=self.now_ms,
        )
        self.acknowledged = 0
        for node in self.mirrors:
            self.says(node)
            self.a_beat_comes(node)

    @rule(count=st.integers(1, 3))
    def writes(self, count: int) -> None:
        self.replication.written(self.replication.last_seq + count, 0, self.now_ms)

    @rule(node=mirrors, count=st.integers(1, 3))
    def takes(self, node: str, count: int) -> None:
        mirror = self.mirrors[node]
        mirror.held = min(mirror.held + count, self.replication.last_seq)
        key = (mirror.disk, str(mirror.boot))
        mirror.best[key] = max(mirror.best.get(key, 0), mirror.held)

    @rule(node=mirrors)
    def takes_all_and_is_heard(self, node: str) -> None:
        self.takes(node, self.replication.last_seq)
        self.is_heard(node)

    @rule(node=mirrors)
    def is_heard(self, node: str) -> None:
        self.says(node)
        while self.mirrors[node].heartbeats:
            self.a_beat_comes(node)
        self.replication.applied(node, *self.mirrors[node].said[-1], self.now_ms)

    @rule(node=mirrors)
    def says(self, node: str) -> None:
        mirror = self.mirrors[node]
        mirror.said.append((mirror.disk, str(mirror.boot), mirror.held))
        mirror.heartbeats.append((mirror.disk, str(mirror.boot)))

    @rule(node=mirrors, data=st.data())
    def an_answer_comes(self, node: str, data: st.DataObject) -> None:
        mirror = self.mirrors[node]
        if mirror.said:
            reported = data.draw(st.sampled_from(mirror.said))
            self.replication.applied(node, *reported, self.now_ms)

    @rule(node=mirrors)
    def a_beat_comes(self, node: str) -> None:
        """Heartbeats come in order, since overtaken ones are dropped."""
        mirror = self.mirrors[node]
        if mirror.heartbeats:
            mirror.newest_heard = mirror.heartbeats.pop(0)
            self.replication.booted(node, *mirror.newest_heard, self.now_ms)

    @rule(node=mirrors, lost=st.integers(1, 5), is_heard=st.booleans())
    def machine_crashes(self, node: str, lost: int, is_heard: bool) -> None:
        mirror = self.mirrors[node]
        mirror.boot += 1
        mirror.held = max(0, mirror.held - lost)
        mirror.best[mirror.disk, str(mirror.boot)] = mirror.held
        if is_heard:
            self.is_heard(node)

    @rule(node=mirrors)
    def disk_is_replaced(self, node: str) -> None:
        mirror = self.mirrors[node]
        mirror.disk, mirror.boot, mirror.held = f"new-{node}", mirror.boot + 1, 0

    @rule(node=mirrors, is_draining=st.booleans(), disk_out=st.booleans())
    def reports_its_state(self, node: str, is_draining: bool, disk_out: bool) -> None:
        self.replication.says(node, is_draining=is_draining, disk_out=disk_out)

    @rule(ms=st.sampled_from([1, INSYNC_MS // 2, INSYNC_MS + 1]))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        self.replication.tick(self.now_ms)

    @invariant()
    def w_members_hold_what_is_newly_acknowledged(self) -> None:
        reached = self.replication.high_watermark
        assert self.acknowledged <= reached <= self.replication.last_seq
        if reached > self.acknowledged:
            assert self._holders(reached) >= self.min_insync
            for node in self.replication.in_sync - {"a"}:
                assert self._held(node) >= reached
        self.acknowledged = reached

    def _holders(self, seq: int) -> int:
        return 1 + sum(self._held(node) >= seq for node in self.mirrors)

    def _held(self, node: str) -> int:
        """Held on the registered disk, in the latest life that the origin knows of."""
        mirror = self.mirrors[node]
        heard = mirror.newest_heard
        if heard is None or heard[0] != f"disk-{node}":
            return 0
        return mirror.best.get(heard, 0)


TestHolding = Holding.TestCase
TestHolding.settings = settings(stateful_step_count=50)


# --- against Kafka's rule, checked by looking at everything that ever was

events = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 3)),
        st.tuples(st.just("hear"), st.integers(0, 4)),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, INSYNC_MS // 2, INSYNC_MS])),
    ),
    max_size=40,
)


@given(events)
def test_the_set_is_that_of_the_rule(steps: list[tuple[str, int]]) -> None:
    line = Line("ab", min_insync=1)
    ends = [(line.now_ms, 0)]
    prefix = 0
    caught_up_ms = line.now_ms
    is_in_sync = True
    for what, value in steps:
        if what == "write":
            line.written(line.replication.last_seq + value)
            ends.append((line.now_ms, line.replication.last_seq))
        elif what == "hear":
            prefix = min(line.replication.last_seq, prefix + value)
            high_watermark = line.high_watermark
            line.applied("b", prefix)
            caught_up_ms = _caught_up_ms(ends, prefix, line.now_ms)
            has_caught_up = line.now_ms - caught_up_ms <= INSYNC_MS
            is_in_sync |= has_caught_up and prefix >= high_watermark
        else:
            line.after(value)
            lacks = prefix < line.replication.last_seq
            is_in_sync &= not (lacks and line.now_ms - caught_up_ms > INSYNC_MS)
        assert ("b" in line.replication.in_sync) == is_in_sync


def _caught_up_ms(ends: list[tuple[int, int]], prefix: int, now_ms: int) -> int:
    """The last time at which so much was all that there was."""
    return next((since_ms for since_ms, end in ends if end > prefix), now_ms)


# --- pushes to a mirror that loses some of them


@pytest.mark.parametrize("seed", range(8))
def test_a_mirror_gets_everything_in_the_end_whatever_is_lost(seed: int) -> None:
    line = Line("ab", min_insync=1, in_flight=12)
    held, once = 0, set[int]()
    for turn in range(400):
        if turn < 200:
            line.written(line.replication.last_seq + (turn + seed) % 4)
        is_heard = (turn * 7 + seed) % 23 > 2
        pushed = line.pushes("b" if is_heard else "")
        for number, (_, first, last) in enumerate(pushed):
            assert last <= held + 12
            assert first > held - 12
            once.update(range(first, last + 1))
            is_lost = turn < 200 and (turn * 5 + number + seed) % 9 == 0
            if not is_lost and first <= held + 1:
                held = max(held, last)
        if (turn + seed) % 3:
            line.applied("b", held)
        line.after(100)
    assert held == line.replication.last_seq == max(once)
    assert line.in_sync == "ab"
