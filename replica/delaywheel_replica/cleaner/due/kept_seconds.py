"""The seconds in memory, in order, and their sizes.

A second's weight is what it was loaded with: its records, and the bytes of its messages. Past
seconds (see window.py) are freed by three bounds, newest kept first, because late frames mostly
want the newest. A second that was freed and is wanted again is read from its files.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from delaywheel_replica.cleaner.due.seconds import Second


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound on the seconds in memory."""

    seconds: int
    messages: int
    length_bytes: int

    def is_reached(self, seconds: Iterable[Second]) -> bool:
        """Whether these seconds together reach any of the bounds."""
        load = _Load(self)
        for second in seconds:
            load.add(second)
            if load.is_full:
                return True
        return False


class _Load:
    """How much some seconds hold together."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._seconds = self._messages = self._length_bytes = 0

    @property
    def is_full(self) -> bool:
        bound = self._bound
        return (
            self._seconds >= bound.seconds
            or self._messages >= bound.messages
            or self._length_bytes >= bound.length_bytes
        )

    def add(self, second: Second) -> None:
        self._seconds += 1
        self._messages += len(second)
        self._length_bytes += second.length_bytes


class KeptSeconds:
    """Seconds by slot."""

    def __init__(self) -> None:
        self._slots: list[int] = []  # ascending
        self._seconds: dict[int, Second] = {}

    def get(self, slot: int) -> Second | None:
        """Returns the second of this slot."""
        return self._seconds.get(slot)

    def put(self, second: Second) -> None:
        """Adds a second; its slot must be absent."""
        insort(self._slots, second.slot)
        self._seconds[second.slot] = second

    def clear(self) -> None:
        """Frees all seconds."""
        self._slots.clear()
        self._seconds.clear()

    def from_slot(self, first: int) -> Iterator[Second]:
        """Returns the seconds from this slot on, in order."""
        for place in range(bisect_left(self._slots, first), len(self._slots)):
            yield self._seconds[self._slots[place]]

    def free_past(self, first: int, floor: int, bound: Bound, pinned: AbstractSet[int]) -> None:
        """Frees seconds before slot `first` that are below the floor or exceed the bound.

        The newest one is always kept, and so are those in `pinned`.
        """
        end = bisect_left(self._slots, first)
        load = _Load(bound)
        kept: list[int] = []
        for slot in reversed(self._slots[:end]):
            if slot in pinned or (slot >= floor and not (kept and load.is_full)):
                kept.append(slot)
                load.add(self._seconds[slot])
            else:
                del self._seconds[slot]
        self._slots[:end] = reversed(kept)
