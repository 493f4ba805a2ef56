"""Whose message may arrive: callers take turns, and who sends nothing loses its place."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from delaywheel_replica.server.access.callers import CallOrigin
from delaywheel_replica.server.intake.arrivals import (
    LOOKS_UNTIL_SLOW,
    Arrival,
    ArrivalBounds,
    Arrivals,
)

BOUNDS = ArrivalBounds(4, 2, slow=3)


def origin(caller: str) -> CallOrigin:
    """Those in capitals are connections of one principal."""
    return CallOrigin(caller, "many" if caller.isupper() else "")


@dataclass
class Site:
    """Calls of callers, by name, whose messages come when the test says so."""

    bounds: ArrivalBounds = BOUNDS
    now_s: float = 0.0
    calls: dict[str, Arrival] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arrivals = Arrivals(self.bounds)

    def call(self, *names: str) -> None:
        """Begins calls; the caller is the name's first letter."""
        for name in names:
            self.calls[name] = self.arrivals.begin(
                origin(name[0]), self.now_s, lambda: None, partial(self.refused.append, name)
            )

    def end(self, *names: str, arrived: bool = True) -> None:
        for name in names:
            self.arrivals.end(self.calls.pop(name), self.now_s, arrived=arrived)

    def look(self, times: int = 1, apart_s: float = 0.05) -> None:
        """Looks; who is refused ends."""
        for _ in range(times):
            self.now_s += apart_s
            self.arrivals.look(self.now_s)
            for name in [name for name in self.refused if name in self.calls]:
                self.end(name, arrived=False)

    @property
    def read(self) -> set[str]:
        return {name for name, arrival in self.calls.items() if arrival in self.arrivals.read}


def test_turns_go_round_by_caller_however_many_calls_each_has() -> None:
    site = Site(ArrivalBounds(1, 1, slow=1))
    site.call("a1", "a2", "a3", "a4", "b1", "c1")
    order = []
    while site.calls:
        [name] = site.read
        order.append(name)
        site.end(name)
    assert order == ["a1", "b1", "c1", "a2", "a3", "a4"]


def test_turns_go_round_by_principal_however_many_connections_each_has() -> None:
    site = Site(ArrivalBounds(1, 1, slow=1))
    site.call("A1", "A2", "B1", "C1", "d1", "d2", "e1")
    order = []
    while site.calls:
        [name] = site.read
        order.append(name)
        site.end(name)
    assert order == ["A1", "d1", "e1", "B1", "d2", "C1", "A2"]


def test_the_principal_with_most_calls_makes_room() -> None:
    site = Site(ArrivalBounds(1, 1, slow=1))
    site.call("A0", "A1", "B1", "C1", "C2", "d1", "d2")
    assert site.arrivals.make_room_for(origin("e"))
    assert site.refused == ["C2"]
    assert not site.arrivals.make_room_for(origin("C"))


def test_idle_callers_lose_places_to_one_that_waits_and_keep_the_rest() -> None:
    site = Site()
    site.call(*(f"{caller}{number}" for caller in "ab" for number in range(100)))
    assert site.read == {"a0", "a1", "b0", "b1"}
    site.call("c0")
    site.look(LOOKS_UNTIL_SLOW)
    assert len(site.refused) == 1
    assert "c0" in site.read
    site.end("c0")
    site.look(10)
    assert len(site.refused) == 1  # nobody prompt waits: nobody needs to go


def test_prompt_callers_are_not_behind_those_that_send_nothing() -> None:
    """However often they come: of 100 calls one after another, the first alone waits."""
    site = Site()
    site.call(*(f"{caller}{number}" for caller in "ab" for number in range(500)))
    site.look(LOOKS_UNTIL_SLOW)
    site.call("c0")
    site.look()
    for number in range(100):
        assert f"c{number}" in site.read
        site.end(f"c{number}")
        site.call(f"c{number + 1}")


def test_long_messages_keep_their_places_and_the_caller_with_most_gives_way() -> None:
    site = Site(ArrivalBounds(4, 4, slow=3))
    site.call("a1", "b1", "b2", "b3")
    site.look(LOOKS_UNTIL_SLOW)
    site.call("c1")
    site.look()
    assert site.refused == ["b3"]
    assert site.read == {"a1", "b1", "b2", "c1"}


def test_patience_ends_sooner_while_any_call_waits() -> None:
    site = Site()
    site.call("a1", "a2")
    site.look(apart_s=29)
    assert not site.refused
    site.call("a3")
    site.look()
    assert site.refused == ["a1", "a2"]
    assert site.read == {"a3"}


def test_a_late_caller_is_not_forgotten_among_prompt_ones() -> None:
    site = Site(ArrivalBounds(1, 1, slow=1))
    site.call("a1", "a2")
    site.look(LOOKS_UNTIL_SLOW)
    site.call("b0")
    site.end("a1", arrived=False)
    for number in range(100):
        if "a2" in site.read:
            break
        site.call(f"b{number + 1}")
        site.end(*site.read)
    assert "a2" in site.read


def test_ending_a_call_costs_the_same_however_many_wait() -> None:
    """It walked through all that waited: 4,096 calls kept the event loop for 20.9 s."""

    def cost_s(calls: int) -> float:
        arrivals = Arrivals(ArrivalBounds(16, 4, slow=12))
        begun = [arrivals.begin(origin(str(n % 64)), 0.0, bool, bool) for n in range(calls)]
        began_s = time.thread_time()
        for arrival in sorted(begun, key=lambda each: each not in arrivals.read):
            arrivals.end(arrival, 0.0, arrived=True)
        return (time.thread_time() - began_s) / calls

    assert min(cost_s(16_384) for _ in range(3)) < 4 * min(cost_s(1_024) for _ in range(3))


class ArrivingCalls(RuleBasedStateMachine):
    """Any order of calls, arrivals, departures and looks."""

    def __init__(self) -> None:
        super().__init__()
        self.site = Site()
        self.begun = 0

    @rule(caller=st.sampled_from("abcDEF"))
    def call(self, caller: str) -> None:
        self.begun += 1
        self.site.call(f"{caller}{self.begun}")

    @rule(data=st.data(), arrived=st.booleans())
    def end(self, data: st.DataObject, arrived: bool) -> None:
        if self.site.calls:
            name = data.draw(st.sampled_from(sorted(self.site.calls)))
            self.site.end(name, arrived=arrived and name in self.site.read)

    @rule(times=st.integers(1, 3), apart_s=st.sampled_from([0.05, 3.0]))
    def look(self, times: int, apart_s: float) -> None:
        self.site.look(times, apart_s)

    @rule(caller=st.sampled_from("abcDEF"))
    def make_room(self, caller: str) -> None:
        waiting = {name for name in self.site.calls if name not in self.site.read}
        made = self.site.arrivals.make_room_for(origin(caller))
        victims = waiting & set(self.site.refused)
        assert made == (len(victims) == 1)
        self.site.end(*victims, arrived=False)

    @invariant()
    def bounds_hold_and_no_place_is_wasted(self) -> None:
        read = self.site.read
        by_caller = {name: [each for each in read if each[0] == name] for name in "abcDEF"}
        assert len(read) <= BOUNDS.most
        assert all(len(names) <= BOUNDS.of_caller for names in by_caller.values())
        waiting = [name for name in self.site.calls if name not in read]
        assert self.site.arrivals.waiting == len(waiting)
        late = sum(self.site.calls[name].caller.is_late for name in read)
        if len(read) < BOUNDS.most:
            assert all(
                len(by_caller[name[0]]) == BOUNDS.of_caller
                or (self.site.calls[name].caller.is_late and late >= BOUNDS.slow)
                for name in waiting
            )


TestArrivingCalls = ArrivingCalls.TestCase
