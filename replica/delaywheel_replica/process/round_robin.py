"""What waits, in turns by who shares what is short: server and cleaner have the same rule."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

_Waits = TypeVar("_Waits", bound=Hashable)


class RoundRobin(Generic[_Waits]):
    """What waits, served in turn by sharer, and in order within each. For one thread.

    Who was served last comes after all that wait when the next one is taken, also after those that
    came meanwhile: so nobody waits for two turns of another.
    """

    def __init__(self) -> None:
        self._sharers: Final = OrderedDict[Hashable, OrderedDict[_Waits, None]]()
        self._served: Hashable = None

    def __bool__(self) -> bool:
        return bool(self._sharers)

    def add(self, sharer: Hashable, waits: _Waits) -> None:
        """Puts something behind what waits of its sharer, unless it is there already."""
        self._sharers.setdefault(sharer, OrderedDict()).setdefault(waits)

    def discard(self, sharer: Hashable, waits: _Waits) -> None:
        """Takes something out, if it is there."""
        of_sharer = self._sharers.get(sharer)
        if of_sharer is not None:
            of_sharer.pop(waits, None)
            if not of_sharer:
                del self._sharers[sharer]

    def of(self, sharer: Hashable) -> list[_Waits]:
        """Returns what waits of a sharer, in order."""
        return [*self._sharers.get(sharer, ())]

    def first(self, sharer: Hashable) -> _Waits | None:
        """Returns what is next of a sharer, if anything waits."""
        return next(iter(self._sharers.get(sharer, ())), None)

    def firsts(self) -> list[_Waits]:
        """Returns what is next of each sharer; on any thread, what was a moment ago."""
        # Whole copies: nothing can change while one is made.
        return [first for of_one in [*self._sharers.values()] for first in [*of_one][:1]]

    def next(self) -> _Waits:
        """Returns what is next."""
        if self._served in self._sharers:
            self._sharers.move_to_end(self._served)
        return next(iter(next(iter(self._sharers.values()))))

    def take(self) -> _Waits:
        """Takes out what is next."""
        waits = self.next()
        self._served = next(iter(self._sharers))
        self.discard(self._served, waits)
        return waits
