"""Short plans that lead straight to one rare situation; what varies is when, by the seed.

Each is a profile like those of `profiles.py`. Node a is the first leader in all of them, for it
stands first; the wheels that matter are of the last node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from sim.plan import Action, CancelOrder, Draft, Plan, Request, Settings, Step, in_order

Drill = Callable[["Script"], None]
DRILLS: dict[str, Drill] = {}

FOREVER_MS = 120_000
"""Until everything heals."""


class Script:
    """A plan while it is written."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"drill {seed}")
        self.settings = Settings(nodes=("a", "b", "c"), min_insync=2)
        self.until_ms = 0
        self._steps: list[Step] = []
        self._messages = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """In order."""
        return in_order(self._steps)

    def cluster(self, nodes: str, min_insync: int, **settings: Any) -> None:
        """Says who there is."""
        self.settings = replace(
            self.settings, nodes=tuple(nodes), min_insync=min_insync, **settings
        )

    def about(self, ms: int, by_ms: int = 100) -> int:
        """A time that varies from seed to seed."""
        return ms + self.random.randrange(by_ms)

    def do(self, at_ms: int, fault: str, /, **arguments: Any) -> None:
        """A fault, of `faults.FAULTS`."""
        self._steps.append(Action(at_ms, fault, arguments))

    def mute(self, at_ms: int, kinds: str, src: str, dsts: str, ms: int = FOREVER_MS) -> None:
        """Messages of these types are lost."""
        for kind in kinds.split():
            for dst in dsts:
                self.do(at_ms, "mute", src=src, dst=dst, kind=kind, ms=ms)

    def block(self, at_ms: int, src: str, dsts: str, ms: int = FOREVER_MS) -> None:
        """Nothing gets through in one direction."""
        for dst in dsts:
            self.do(at_ms, "block", src=src, dst=dst, ms=ms)

    def cut(self, at_ms: int, one: str, others: str, ms: int = FOREVER_MS) -> None:
        """Nothing gets through in either."""
        for other in others:
            self.do(at_ms, "cut", one=one, other=other, ms=ms)

    def send(self, at_ms: int, nodes: str, *, delay_ms: int, count: int = 1, **rest: Any) -> int:
        """A request with some messages of one due; the number of the first."""
        first = self._messages + 1
        self._messages += count
        drafts = tuple(Draft(number, delay_ms) for number in range(first, first + count))
        self._steps.append(Request(at_ms, drafts, tuple(nodes), **rest))
        return first

    def flow(self, begin_ms: int, end_ms: int, every_ms: int, node: str, **rest: Any) -> None:
        """One message after another."""
        for at_ms in range(begin_ms, end_ms, every_ms):
            self.send(at_ms, node, **{"delay_ms": 20_000, "patience_ms": 500, **rest})

    def cancel(self, at_ms: int, number: int, node: str) -> None:
        """A caller withdraws a message."""
        self._steps.append(CancelOrder(at_ms, number, (node,)))


def plan_of(name: str, seed: int) -> Plan:
    """The plan of a drill."""
    script = Script(seed)
    DRILLS[name](script)
    return Plan(seed, name, script.settings, script.steps, script.until_ms)


def _drill(function: Drill) -> Drill:
    DRILLS[function.__name__] = function
    return function


# --- fences


@_drill
def forgetful(script: Script) -> None:
    """A member promises, its answer counts, and it starts again; the origin finds only it."""
    script.flow(2_500, 3_300, 40, "c")
    script.cut(3_000, "c", "a")
    script.cut(3_000, "c", "b", ms=script.about(11_300))
    for node in "bc":
        script.do(12_000, "kafka_cut", node=node, ms=FOREVER_MS)
    if script.random.random() < 0.5:
        script.do(12_500, "slow_disk", node="b", us=script.about(300_000, 500_000), ms=1_500)
    script.do(script.about(13_300, 300), "kill_server", node="b")
    script.until_ms = 20_000


@_drill
def self_fenced(script: Script) -> None:
    """An origin hears that it is fenced, and then finds a mirror that does not."""
    script.mute(12_800, "Gossip", "a", "b")
    script.mute(12_800, "Gossip", "c", "ab")
    script.cut(3_000, "c", "ab", ms=script.about(10_200, 200))
    script.cut(14_500, "c", "ab")
    script.flow(2_500, 14_400, 50, "c", delay_ms=40_000)
    script.until_ms = 26_000


@_drill
def third_party(script: Script) -> None:
    """A frame that one member has not fenced is fetched by another one that has."""
    script.cluster("abcd", 3)
    script.block(3_000, "d", "ab")
    script.block(3_000, "a", "d")
    script.mute(3_000, "Gossip", "b", "d")
    script.mute(3_000, "Gossip", "c", "d")
    script.flow(3_020, 3_300, 40, "d")
    script.block(3_400, "d", "c")
    script.cut(3_400, "a", "c")
    for node in "bcd":
        script.do(10_000, "kafka_cut", node=node, ms=FOREVER_MS)
    script.mute(2_900, "Fetch", "b", "c", ms=script.about(10_800, 800))
    script.until_ms = 20_000


@_drill
def left_behind(script: Script) -> None:
    """An origin starts again; the leader lacks its last frames, and hears no other answer."""
    at_ms = script.about(5_000, 400)
    script.flow(2_500, at_ms, 15, "c", delay_ms=30_000)
    script.block(2_500, "a", "c")
    script.mute(at_ms - 150, "Frames", "c", "a", ms=2_000)
    script.mute(at_ms - 150, "Fetch", "a", "bc", ms=2_000)
    script.mute(at_ms - 150, "Promise", "b", "a", ms=script.random.choice((100, 900)))
    script.mute(at_ms - 150, "Promise", "c", "a", ms=script.random.choice((100, 900)))
    script.do(at_ms, "kill_server", node="c")
    script.until_ms = 8_000


@_drill
def told_fill(script: Script) -> None:
    """One leader has a member fill up a fenced wheel, the next one has that member's old answer.

    d writes frames that only c gets, and hears nobody's beats any more. a asks for promises, gets
    b's, and loses Kafka; c leads, and has b fill up from it; c loses Kafka, and a leads again.
    """
    script.cluster("abcd", 3)
    script.mute(2_900, "Fetch", "b", "c", ms=29_500)
    script.mute(2_900, "Fetch", "a", "bcd")
    script.mute(2_900, "Frames", "b", "a")
    script.mute(2_900, "Frames", "c", "a")
    script.mute(2_900, "Promise", "c", "a")
    script.mute(2_900, "Promise", "a", "c")
    script.mute(2_950, "Gossip", "d", "c")
    script.block(3_000, "d", "ab")
    script.block(3_000, "a", "d")
    for node in "bc":
        script.mute(3_000, "Gossip", node, "d")
    script.flow(3_020, 3_200, 40, "d", delay_ms=60_000)
    script.block(3_400, "d", "c")
    script.do(10_000, "kafka_cut", node="b", ms=FOREVER_MS)
    script.do(10_000, "kafka_cut", node="d", ms=FOREVER_MS)
    script.mute(12_500, "Promise", "b", "a", ms=1_800)
    script.do(script.about(14_000), "kafka_cut", node="a", ms=21_000)
    script.mute(15_600, "Promise", "b", "a")
    script.do(script.about(36_000), "kafka_cut", node="c", ms=FOREVER_MS)
    script.until_ms = 56_000


# --- what was lost


@_drill
def crash_behind(script: Script) -> None:
    """Interleaving 5: two hold what a third lacks; one loses it, the other is cut off."""
    _two_hold(script)
    script.do(5_150, "crash_machine", node="b", ms=400)
    _third_comes_back(script)


@_drill
def wiped_behind(script: Script) -> None:
    """The same, and the one that loses it loses everything, and is replaced."""
    _two_hold(script)
    script.do(5_150, "wipe", node="b", ms=400, replaced_ms=4_000)
    _third_comes_back(script)


def _two_hold(script: Script) -> None:
    """With Kafka away, so that nothing of it is taken account of."""
    script.do(2_500, "kafka_down", ms=4_500)
    script.do(2_600, "absence", node="a", ms=3_400)
    script.flow(2_700, 5_100, 20, "c", delay_ms=40_000)
    script.cut(script.about(5_100, 30), "c", "ab")


def _third_comes_back(script: Script) -> None:
    script.until_ms = 24_000


@_drill
def old_answers(script: Script) -> None:
    """Interleaving 5a: a mirror's word outlives what it held, and the origin does not know."""
    _lagging_third(script)
    script.block(3_090, "b", "c")
    script.cut(4_600, "c", "a")
    script.block(4_600, "c", "b")
    script.until_ms = 20_000


@_drill
def old_boots(script: Script) -> None:
    """The same, and the origin does know."""
    _lagging_third(script)
    script.mute(3_090, "Frames", "c", "b", ms=2_000)
    script.mute(3_090, "Fetch", "b", "ac", ms=2_000)
    script.until_ms = 6_000


def _lagging_third(script: Script) -> None:
    """Frames wait for a third mirror while the second one, which has answered, crashes."""
    script.do(2_500, "kafka_down", ms=4_000)
    script.mute(2_900, "Frames", "c", "a", ms=5_000)
    script.mute(2_900, "Fetch", "a", "bc", ms=5_000)
    script.flow(3_000, 3_060, 10, "c", delay_ms=30_000, timeout_ms=4_000)
    script.do(script.about(3_100, 60), "crash_machine", node="b", ms=200)


@_drill
def empty_disk(script: Script) -> None:
    """Interleaving 5b: a replaced mirror is all that an origin has left."""
    script.block(2_500, "a", "c")
    script.flow(3_000, 9_000, 60, "c")
    script.do(script.about(4_000), "wipe", node="b", ms=300, replaced_ms=700)
    script.until_ms = 10_000


@_drill
def slow_mirror(script: Script) -> None:
    """A mirror whose disk takes its time is all that an origin has."""
    script.block(2_500, "a", "c")
    script.do(4_000, "slow_disk", node="b", us=script.about(20_000, 80_000), ms=3_000)
    script.flow(3_000, 6_500, 60, "c")
    script.until_ms = 7_000


@_drill
def bad_copy(script: Script) -> None:
    """A frame goes bad in one place, before it is due."""
    script.flow(2_500, 4_000, 60, "c", delay_ms=4_000)
    for at_ms in (4_200, 4_700, 5_200):
        choice = script.random.randrange(1 << 30)
        script.do(at_ms, "bit_flip", node="a", what="slot", choice=choice)
    script.mute(4_000, "Fetch", "a", "bc", ms=3_000)
    script.until_ms = 9_000


@_drill
def lone(script: Script) -> None:
    """A node alone loses what it has forwarded."""
    script.cluster("a", 1)
    script.flow(1_500, 14_000, 100, "a", delay_ms=300)
    for at_ms in (4_000, 8_000, 12_000):
        script.do(script.about(at_ms, 2_000), "crash_machine", node="a", ms=300)
    script.until_ms = 15_000


# --- seals and the floor


@_drill
def deaf_spare(script: Script) -> None:
    """Interleaving 9: a wheel that nothing was written to, of a node that hears no leader."""
    script.mute(2_600, "Gossip", "a", "c")
    script.mute(2_600, "Gossip", "b", "c")
    script.do(2_700, "clock_step", node="c", step_ms=-20_000, ms=FOREVER_MS)
    script.flow(2_500, 15_000, 500, "a", delay_ms=200)
    for at_ms in range(11_000, 16_000, 500):
        script.send(at_ms, "c", delay_ms=-script.random.randrange(6_500, 9_000), patience_ms=300)
    script.until_ms = 17_000


@_drill
def spare_after_a_step(script: Script) -> None:
    """Interleaving 10: a spare has told its seal; it is opened under a clock set back."""
    at_ms = script.about(12_000, 1_000)
    script.flow(2_500, 13_000, 500, "a", delay_ms=200)
    script.do(at_ms, "clock_step", node="c", step_ms=-20_000, ms=FOREVER_MS)
    script.do(at_ms + 10, "kill_server", node="c")
    for later_ms in range(100, 2_000, 60):
        delay_ms = -script.random.randrange(6_500, 11_000)
        script.send(at_ms + later_ms, "c", delay_ms=delay_ms, patience_ms=50)
    script.until_ms = 17_000


@_drill
def clock_ahead(script: Script) -> None:
    """Interleaving 17: an origin's clock runs ahead of everybody's for a while."""
    script.do(2_500, "clock_step", node="c", step_ms=60_000, ms=script.about(1_000, 3_000))
    script.flow(3_000, 9_000, 100, "c", delay_ms=2_000)
    script.until_ms = 10_000


@_drill
def leader_ahead(script: Script) -> None:
    """The same with the leader's clock."""
    script.do(2_500, "clock_step", node="a", step_ms=60_000, ms=script.about(1_000, 3_000))
    script.flow(3_000, 9_000, 100, "a", delay_ms=2_000)
    script.until_ms = 10_000


@_drill
def slow_mirrors(script: Script) -> None:
    """Frames that nobody but their origin holds until long after their due."""
    script.mute(2_900, "Frames", "c", "ab", ms=script.about(10_000, 2_000))
    script.mute(2_900, "Fetch", "a", "bc", ms=12_000)
    script.mute(2_900, "Fetch", "b", "ac", ms=12_000)
    script.flow(3_000, 3_600, 60, "c", delay_ms=800, timeout_ms=25_000, patience_ms=30_000)
    script.until_ms = 17_000


# --- delivered once


@_drill
def sent_again(script: Script) -> None:
    """The wheel that a message went out of is closed when its copy comes."""
    for at_ms in range(2_500, 4_000, 100):
        script.send(at_ms, "ca", delay_ms=script.random.randrange(100, 1_500), again=True)
    script.do(script.about(4_000, 300), "kill_server", node="c")
    script.until_ms = 9_000


@_drill
def new_leader(script: Script) -> None:
    """Interleaving 21: a new leader lacks what the last one has forwarded, and gets the copy."""
    at_ms = script.about(4_000)
    script.mute(at_ms, "Frames", "a", "c", ms=4_000)
    script.mute(at_ms, "Fetch", "c", "ab", ms=4_000)
    script.do(at_ms, "lost_answers", share=1.0, ms=400)
    script.flow(at_ms + 10, at_ms + 150, 20, "ac", delay_ms=50, timeout_ms=700, patience_ms=4_000)
    script.do(at_ms + 350, "pause", node="b", part="cleaner", ms=8_000)
    script.do(at_ms + 400, "absence", node="a", ms=12_000)
    script.until_ms = 14_000


@_drill
def one_millisecond(script: Script) -> None:
    """Interleaving 19: a millisecond is split, one of its frames goes bad, the leader changes."""
    script.cluster("a", 1, first_cap_messages=4, cap_messages=8, max_frame_messages=3)
    script.send(2_500, "a", delay_ms=1_500, count=60)
    slow = {"way_us": (20_000, 30_000)}
    script.do(3_500, "kafka_faults", changes=slow, ms=3_000)
    script.do(script.about(4_150, 500), "bit_flip", node="a", what="slot", choice=script.about(0))
    script.do(script.about(4_250, 500), "kill_cleaner", node="a")
    script.until_ms = 9_000


@_drill
def late_cancel(script: Script) -> None:
    """A cancel lies behind late messages, of which a leader takes a few at a time."""
    script.cluster("abc", 2, first_cap_messages=4, cap_messages=6, max_frame_messages=3)
    for at_ms in (3_000, 6_000, 9_000):
        for node in "bc":
            script.mute(at_ms, "Applied Gossip", node, "a", ms=650)
        firsts = [
            script.send(at_ms + 10 * n, "a", delay_ms=400, count=3, patience_ms=500)
            for n in range(1, 12)
        ]
        for first in firsts[:3]:
            script.cancel(script.about(at_ms + 150), first, "a")
    script.until_ms = 12_000


@_drill
def slow_cancel(script: Script) -> None:
    """Interleaving 2: a cancel is mirrored slowly while the cleaner takes its message."""
    script.do(2_500, "kafka_faults", changes={"way_us": (30_000, 60_000)}, ms=9_000)
    for at_ms in range(3_000, 10_000, 1_500):
        first = script.send(at_ms, "cb", delay_ms=500)
        script.cancel(script.about(at_ms + 150), first, "a")
        for node in "bc":
            script.mute(at_ms + 100, "Applied Gossip", node, "a", ms=script.about(400, 250))
    script.until_ms = 12_000


# --- Kafka


@_drill
def candidates(script: Script) -> None:
    """Interleaving 1: inits and marks take so long that candidates overtake each other."""
    script.cluster("ab", 2)
    slow = {"init_us": (20_000, 1_500_000), "way_us": (20_000, 250_000)}
    script.do(100, "kafka_faults", changes=slow, ms=FOREVER_MS)
    for at_ms in range(5_000, 50_000, 3_000):
        script.do(script.about(at_ms, 2_000), "kill_cleaner", node=script.random.choice("ab"))
    script.until_ms = 50_000


@_drill
def first_leader(script: Script) -> None:
    """Interleaving 22: a candidate takes its time, and nobody disturbs it."""
    script.do(10, "slow_first_init", us=script.about(400_000, 300_000))
    script.flow(3_000, 4_000, 200, "abc", delay_ms=300, patience_ms=4_000)
    script.until_ms = 4_000


@_drill
def repeated_ends(script: Script) -> None:
    """Interleaving 20: the library sends the end of a transaction twice."""
    changes = {"retried_end": 0.5, "late_us": (5_000, 300_000), "way_us": (3_000, 9_000)}
    script.do(2_500, "kafka_faults", changes=changes, ms=6_000)
    script.flow(2_500, 8_000, 15, "abc", delay_ms=script.random.randrange(50, 300))
    script.until_ms = 9_000
