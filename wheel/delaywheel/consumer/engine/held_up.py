"""Partitions whose outcomes a topic does not take now: each holds up itself alone.

A topic may answer nothing for as long as a broker is away. A transaction that writes there fails
after a while, and with it the outcomes of all partitions that are committed together.

| what happens | is done |
|---|---|
| a transaction fails, and a topic has not answered what it writes: Kafka says that a partition of |
|   | it has no leader, or too few replicas in sync | the partitions with outcomes for that topic |
|   | are held up: nothing of them is committed, the others go on; what is held of them is bounded |
|   | as always |
| Kafka does not say that | it is tried again: a broker may be away for a moment |
| the next one fails like that | they are held up |
| `FIRST_S` later, and Kafka says that | Kafka is asked again, after as long |
| it does not | they are tried, without others: if that fails they wait for twice as long, |
|   | `LONGEST_S` at most, as a transaction that fails stops everything for a while |
| a letter does not fit into its topic, which takes less than the source; or there is a retry, |
|   | and its topic takes less | they are held up, and the topic is asked again like that: no |
|   | letter is shortened by it, and no retry leaves the group |
| a leader says that none reads the ingress topic: `ingress` is off | partitions with outcomes for |
|   | it are held up until one does: nobody would see what lies there |
| a transaction of theirs is committed, or refused | they are as the others |

No I/O, no clock, no lock: the engine's thread alone is here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from delaywheel.consumer.book import Book, Cut
from delaywheel.consumer.records import Partition

FIRST_S: Final = 10.0
LONGEST_S: Final = 120.0


@dataclass(slots=True)
class _Unanswering:
    partitions: set[Partition] = field(default_factory=set)
    why: str = ""
    wait_s: float = FIRST_S
    try_at_s: float = 0.0


class HeldUp:
    """The partitions of one consumer that are held up, by the topic that does not answer."""

    def __init__(self, book: Book) -> None:
        """Begins with none."""
        self._book = book
        self._topics: dict[str, _Unanswering] = {}
        self._failed: AbstractSet[str] = frozenset()

    @property
    def text(self) -> str | None:
        """Which they are, in words; None: none is."""
        if not self._topics:
            return None
        topic, its = next(iter(self._topics.items()))
        count = len(self._book.held_up)
        more = f", and {count - 1} more partitions wait" if count > 1 else ""
        return f"{min(its.partitions)} waits until topic {topic} takes its outcomes{its.why}{more}"

    def failed(
        self, cut: Cut, unanswered: AbstractSet[str], unable: AbstractSet[str], now_s: float
    ) -> None:
        """Takes in that a transaction failed; `unable` are the unanswered that Kafka explains."""
        silent = unanswered & (unable | self._failed | self._topics.keys())
        self._failed = unanswered
        for block, _, settlement in cut.settled():
            for topic in settlement.topics & silent:
                self.hold_up([block.at], topic, now_s)

    def hold_up(
        self, partitions: Collection[Partition], topic: str, now_s: float, why: str = ""
    ) -> None:
        """Holds up partitions until a topic takes their outcomes, and says why, in words."""
        its = self._topics.setdefault(topic, _Unanswering())
        if now_s >= its.try_at_s and its.partitions.intersection(partitions):
            its.wait_s = min(2 * its.wait_s, LONGEST_S)
        its.partitions.update(partitions)
        its.why = why and f": {why}"
        its.try_at_s = now_s + its.wait_s
        self._note()

    def due(self, now_s: float) -> str | None:
        """Returns a topic whose partitions are to be tried now, by themselves; None: none is."""
        return next((name for name, its in self._topics.items() if now_s >= its.try_at_s), None)

    def waiting_for(self, topic: str) -> Collection[Partition]:
        """Returns the partitions that have outcomes for a topic that is due."""
        return frozenset(self._topics[topic].partitions)

    def put_off(self, topic: str, now_s: float) -> None:
        """Takes in that a topic is as it was, of which Kafka was asked."""
        self._topics[topic].try_at_s = now_s + FIRST_S

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Takes in that partitions are answered, or no longer ours."""
        if not self._topics and not self._failed:
            return
        gone = set(partitions)
        self._failed = frozenset()
        for topic, its in list(self._topics.items()):
            its.partitions -= gone
            if not its.partitions:
                del self._topics[topic]
        self._note()

    def _note(self) -> None:
        self._book.held_up = frozenset().union(*(its.partitions for its in self._topics.values()))
