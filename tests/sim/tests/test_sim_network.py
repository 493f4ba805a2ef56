"""Messages between simulated nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.machine.network import HELD, PATIENCE_US, Network, Quality
from sim.machine.scheduler import US_PER_MS, US_PER_S, Process, Scheduler

STEADY = Quality(delay_us=1_000, jitter_us=0, break_chance=0.0)
BREAKS = Quality(delay_us=1_000, jitter_us=0, break_chance=1.0)


class Party:
    """Nodes on one network, and what each of them has received."""

    def __init__(self, quality: Quality, nodes: str = "abc") -> None:
        self.scheduler = Scheduler(1)
        self.network = Network(self.scheduler, quality=quality)
        self.heard: dict[str, list[tuple[str, object]]] = {node: [] for node in nodes}
        self.broken: dict[str, list[str]] = {node: [] for node in nodes}
        self.processes: dict[str, Process] = {}
        for node in nodes:
            self.live(node)

    def live(self, node: str) -> None:
        process = self.processes[node] = self.scheduler.process(node)
        heard, broken = self.heard[node], self.broken[node]
        self.network.attach(
            node, process, lambda src, message: heard.append((src, message)), broken.append
        )

    def die(self, node: str, *, silently: bool = False) -> None:
        self.processes[node].kill()
        self.network.detach(node, silently=silently)

    def run(self, seconds: float = 1.0) -> None:
        self.scheduler.run_for(seconds)

    def send(self, src: str, dst: str, *messages: object) -> None:
        for message in messages:
            self.network.send(src, dst, message)


@pytest.fixture
def steady() -> Iterator[Party]:
    party = Party(STEADY)
    yield party
    party.scheduler.close()


@pytest.fixture
def breaks() -> Iterator[Party]:
    party = Party(BREAKS)
    yield party
    party.scheduler.close()


def test_a_message_takes_its_time(steady: Party) -> None:
    steady.send("a", "b", "hello")
    steady.scheduler.run_until(999)
    assert not steady.heard["b"]
    steady.scheduler.run_until(1_000)
    assert steady.heard["b"] == [("a", "hello")]
    assert (steady.network.sent, steady.network.delivered) == (1, 1)


@given(st.integers(0, 500), st.integers(0, 5_000))
def test_messages_keep_their_order(delay_us: int, jitter_us: int) -> None:
    party = Party(Quality(delay_us=delay_us, jitter_us=jitter_us))
    party.send("a", "b", *range(50))
    party.run()
    assert [message for _, message in party.heard["b"]] == list(range(50))


def test_messages_overtake_each_other_on_demand() -> None:
    party = Party(Quality(reordering=0.3))
    party.send("a", "b", *range(100))
    party.run()
    found = [message for _, message in party.heard["b"]]
    assert found != list(range(100))
    assert set(found) == set(range(100))


def test_messages_are_lost_and_doubled_on_demand() -> None:
    party = Party(Quality(loss=0.2))
    party.network.link("a", "c").quality = Quality(duplication=0.2)
    party.send("a", "b", *range(1_000))
    party.send("a", "c", *range(1_000))
    party.run()
    assert 700 < len(party.heard["b"]) < 900
    assert 1_100 < len(party.heard["c"]) < 1_300


def test_a_block_holds_one_direction_only(steady: Party) -> None:
    steady.network.block("a", "b")
    steady.send("a", "b", 1)
    steady.send("b", "a", 2)
    steady.run()
    assert (steady.heard["b"], steady.heard["a"]) == ([], [("b", 2)])
    assert steady.network.is_blocked("a", "b")
    assert not steady.network.is_blocked("b", "a")


def test_a_connection_that_lasts_brings_late_what_was_sent(steady: Party) -> None:
    steady.network.block("a", "b")
    steady.send("a", "b", *range(HELD + 5))
    steady.run()
    steady.network.unblock("a", "b")
    steady.send("a", "b", "new")
    steady.run()
    assert [message for _, message in steady.heard["b"]] == [*range(HELD), "new"]
    assert steady.broken == {"a": [], "b": [], "c": []}


def test_a_connection_that_breaks_loses_it_and_notifies_both_ends(breaks: Party) -> None:
    breaks.send("b", "a", "under way")
    breaks.network.block("a", "b")
    breaks.send("a", "b", "held")
    breaks.run()
    breaks.network.unblock("a", "b")
    breaks.run()
    assert (breaks.heard["a"], breaks.heard["b"]) == ([], [])
    assert breaks.broken == {"a": ["b"], "b": ["a"], "c": []}
    breaks.send("a", "b", "again")
    breaks.run()
    assert breaks.heard["b"] == [("a", "again")]


def test_patience_ends(steady: Party) -> None:
    steady.network.block("a", "b")
    steady.send("a", "b", 1)
    steady.run(PATIENCE_US / US_PER_S + 1)
    steady.network.unblock("a", "b")
    steady.run()
    assert not steady.heard["b"]
    assert steady.broken["a"] == ["b"]


def test_patience_begins_anew_with_each_block(steady: Party) -> None:
    for _ in range(3):
        steady.network.block("a", "b")
        steady.run(PATIENCE_US / US_PER_S - 1)
        steady.network.unblock("a", "b")
        steady.run(0.5)
    assert not steady.broken["a"]


def test_blocks_are_counted_and_healing_ends_them_all(steady: Party) -> None:
    network = steady.network
    network.cut("a", "b")
    network.block("a", "b")
    network.mend("a", "b")
    assert (network.is_blocked("a", "b"), network.is_blocked("b", "a")) == (True, False)
    network.link("b", "c").quality = Quality(loss=1.0)
    network.heal()
    assert not network.is_blocked("a", "b")
    assert network.link("b", "c").quality == STEADY
    network.unblock("a", "b")  # the end of a fault that healing has ended already
    network.block("a", "b")
    assert network.is_blocked("a", "b")


def test_a_partition_cuts_sides_and_nothing_inside_them(steady: Party) -> None:
    steady.network.partition("a", "abc")
    blocked = {
        src + dst
        for src in "abc"
        for dst in "abc"
        if src != dst and steady.network.is_blocked(src, dst)
    }
    assert blocked == {"ab", "ba", "ac", "ca"}


def test_a_flapping_link_ends_open(steady: Party) -> None:
    network = steady.network
    network.flap("a", "b", period_us=20 * US_PER_MS, until_us=US_PER_S)
    states = []
    for _ in range(100):
        steady.run(0.01)
        states.append(network.is_blocked("a", "b"))
    assert 20 < sum(states) < 80
    steady.run(1.0)
    assert not network.is_blocked("a", "b")


def test_healing_stops_flapping(steady: Party) -> None:
    network = steady.network
    network.flap("a", "b", period_us=20 * US_PER_MS, until_us=9 * US_PER_S)
    steady.run(0.1)
    network.heal()
    network.block("a", "b")
    steady.run(1.0)
    assert network.is_blocked("a", "b")
    network.unblock("a", "b")
    steady.run(1.0)
    assert not network.is_blocked("a", "b")


def test_what_is_on_its_way_to_the_dead_is_lost_and_from_them_arrives(steady: Party) -> None:
    steady.send("a", "b", "to the dead")
    steady.send("b", "a", "from the dead")
    steady.die("b")
    steady.live("b")
    steady.run()
    assert (steady.heard["b"], steady.heard["a"]) == ([], [("b", "from the dead")])


def test_peers_hear_of_a_dead_process_and_not_of_a_dead_machine(steady: Party) -> None:
    steady.network.block("b", "c")
    steady.die("b")
    steady.run()
    assert steady.broken == {"a": ["b"], "b": [], "c": []}
    steady.die("a", silently=True)
    steady.run()
    assert steady.broken["c"] == []


def test_a_message_to_nobody_is_lost(steady: Party) -> None:
    steady.die("b")
    steady.send("a", "b", 1)
    steady.live("b")
    steady.run()
    assert not steady.heard["b"]


def test_a_node_that_stopped_listening_hears_nothing(steady: Party) -> None:
    steady.send("a", "b", 1)
    steady.network.detach("b")
    steady.run()
    assert not steady.heard["b"]


def test_a_paused_node_hears_everything_later(steady: Party) -> None:
    steady.processes["b"].pause()
    steady.send("a", "b", 1, 2)
    steady.run()
    assert not steady.heard["b"]
    steady.processes["b"].resume()
    steady.run()
    assert steady.heard["b"] == [("a", 1), ("a", 2)]
