"""Writes short plans that lead straight to one rare situation.

Only the times vary from seed to seed. Node a is the first leader in all of them,
since it stands first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from sim.plans.plan import (
    Action,
    AskOrder,
    CancelManyOrder,
    CancelOrder,
    Draft,
    HalfOrder,
    IngressDraft,
    IngressOrder,
    Plan,
    Request,
    RescheduleOrder,
    Settings,
    Step,
    in_order,
)

FOREVER_MS = 120_000
"""Until everything heals."""


class Script:
    """A plan while it is being written."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"drill {seed}")
        self.settings = Settings(nodes=("a", "b", "c"), min_insync=2)
        self.until_ms = 0
        self._steps: list[Step] = []
        self._messages = 0
        self._records = 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps, in order of time."""
        return in_order(self._steps)

    def cluster(self, nodes: str, min_insync: int, **settings: Any) -> None:
        """Sets the nodes."""
        self.settings = replace(
            self.settings, nodes=tuple(nodes), min_insync=min_insync, **settings
        )

    def about(self, ms: int, by_ms: int = 100) -> int:
        """A time that varies from seed to seed."""
        return ms + self.random.randrange(by_ms)

    def do(self, at_ms: int, fault: str, /, **arguments: Any) -> None:
        """Adds a fault of `faults.FAULTS`."""
        self._steps.append(Action(at_ms, fault, arguments))

    def mute(self, at_ms: int, kinds: str, src: str, dsts: str, ms: int = FOREVER_MS) -> None:
        """Loses messages of these types."""
        for kind in kinds.split():
            for dst in dsts:
                self.do(at_ms, "mute", src=src, dst=dst, kind=kind, ms=ms)

    def block(self, at_ms: int, src: str, dsts: str, ms: int = FOREVER_MS) -> None:
        """Blocks one direction."""
        for dst in dsts:
            self.do(at_ms, "block", src=src, dst=dst, ms=ms)

    def cut(self, at_ms: int, one: str, others: str, ms: int = FOREVER_MS) -> None:
        """Blocks both directions."""
        for other in others:
            self.do(at_ms, "cut", one=one, other=other, ms=ms)

    def send(
        self,
        at_ms: int,
        nodes: str,
        *,
        delay_ms: int,
        count: int = 1,
        topic: str | None = None,
        ttl_s: int | None = None,
        keyed: bool = True,
        twin_of: int | None = None,
        **rest: Any,
    ) -> int:
        """Sends a request with some messages of one due; returns the number of the first.

        Args:
            twin_of: The first of as many messages: each has the id and due of one of them.
        """
        first = self._messages + 1
        self._messages += count
        numbers = range(first, first + count)
        drafts = tuple(
            Draft(
                number,
                delay_ms,
                keyed=keyed,
                topic=topic,
                ttl_s=ttl_s,
                twin_of=None if twin_of is None else twin_of + number - first,
            )
            for number in numbers
        )
        self._steps.append(Request(at_ms, drafts, tuple(nodes), **rest))
        return first

    def records(
        self,
        at_ms: int,
        asks: str = "delay",
        *,
        delay_ms: int = 0,
        count: int = 1,
        partition: int = 0,
        of: int | None = None,
        **rest: Any,
    ) -> int:
        """Sends records to the ingress topic; returns the number of the first."""
        first = self._records + 1
        self._records += count
        drafts = tuple(
            IngressDraft(number, asks, partition, delay_ms, of=of)
            for number in range(first, first + count)
        )
        self._steps.append(IngressOrder(at_ms, drafts, **rest))
        return first

    def stream(self, begin_ms: int, end_ms: int, every_ms: int, **rest: Any) -> None:
        """Sends one record after another, to each partition in turn."""
        for turn, at_ms in enumerate(range(begin_ms, end_ms, every_ms)):
            self.records(at_ms, **{"delay_ms": 2_000, "partition": turn, **rest})

    def send_again(self, at_ms: int, first: int, nodes: str, *, count: int = 1) -> None:
        """Sends earlier messages again, as a caller who lost the answer does."""
        drafts = tuple(Draft(number, 0) for number in range(first, first + count))
        self._steps.append(Request(at_ms, drafts, tuple(nodes)))

    def flow(self, begin_ms: int, end_ms: int, every_ms: int, node: str, **rest: Any) -> None:
        """Sends one message after another."""
        for at_ms in range(begin_ms, end_ms, every_ms):
            self.send(at_ms, node, **{"delay_ms": 20_000, "patience_ms": 500, **rest})

    def half(
        self,
        at_ms: int,
        nodes: str,
        *,
        hold_ms: int,
        told: str = "",
        later_ms: int | None = None,
        **rest: Any,
    ) -> int:
        """Begins a half; its caller says to the nodes `told`, or the same, how it went."""
        self._messages += 1
        draft = Draft(self._messages, hold_ms, is_half=True, later_ms=later_ms)
        begin = Request(at_ms, (draft,), tuple(nodes))
        usual: dict[str, Any] = {"ends": "commit", "says": True, "after_ms": 20}
        order = HalfOrder(at_ms, begin, nodes=tuple(told or nodes), **{**usual, **rest})
        self._steps.append(order)
        return self._messages

    def ask(self, at_ms: int, number: int | None, node: str) -> None:
        """Asks a node for a message; without a number, for all that is pending."""
        self._steps.append(AskOrder(at_ms, number, node))

    def cancel(self, at_ms: int, number: int, nodes: str, **rest: Any) -> None:
        """Cancels a message."""
        self._steps.append(CancelOrder(at_ms, number, tuple(nodes), **rest))

    def cancel_many(self, at_ms: int, numbers: Iterable[int], node: str) -> None:
        """Cancels several messages with one call."""
        self._steps.append(CancelManyOrder(at_ms, tuple(numbers), (node,)))

    def reschedule(self, at_ms: int, number: int, delay_ms: int, nodes: str) -> None:
        """Gives a message another due."""
        self._steps.append(RescheduleOrder(at_ms, number, delay_ms, tuple(nodes)))


Drill = Callable[[Script], None]


@dataclass(frozen=True, slots=True)
class Situation:
    """A drill, and how to see that it reached its situation.

    Attributes:
        drill: writes the plan.
        reaches: regular expressions for lines of the trace, in this order, before all heals.
    """

    drill: Drill
    reaches: tuple[str, ...]

    def plan(self, seed: int) -> Plan:
        """The plan of a seed."""
        script = Script(seed)
        self.drill(script)
        name = self.drill.__name__
        return Plan(seed, name, script.settings, script.steps, script.until_ms)


class Drills(dict[str, Situation]):
    """Situations by name."""

    def __call__(self, *reaches: str) -> Callable[[Drill], Drill]:
        """Registers a drill."""

        def take(drill: Drill) -> Drill:
            self[drill.__name__] = Situation(drill, reaches)
            return drill

        return take
