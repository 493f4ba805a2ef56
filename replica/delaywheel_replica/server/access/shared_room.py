"""Room for so much at once, which sharers have together.

A sharer takes no more than is left to others: alone half of the room, two of them a third each. So
there is room for whoever comes next, however much one asks for. What has no room does not wait for
it (`node.turns`), but is refused.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Final


class SharedRoom:
    """How much of the room is taken, and by whom. For one thread."""

    def __init__(self, most: int, most_of_one: int | None = None) -> None:
        """Begins with nothing taken; `most_of_one` bounds a sharer even if more is left."""
        self._most: Final = most
        self._most_of_one: Final = most if most_of_one is None else most_of_one
        self._taken_by: Final = Counter[Hashable]()
        self.taken = 0

    def left(self, sharer: Hashable) -> int:
        """Returns how much more a sharer may take now."""
        taken = self._taken_by[sharer]
        return max(0, min(self._most_of_one - taken, (self._most - self.taken - taken + 1) // 2))

    def take(self, sharer: Hashable, count: int = 1) -> None:
        """Takes what is left to a sharer, or a part."""
        self.taken += count
        self._taken_by[sharer] += count

    def give_back(self, sharer: Hashable, count: int = 1) -> None:
        """Gives back what a sharer has taken, or a part."""
        self.taken -= count
        self._taken_by[sharer] -= count
        if not self._taken_by[sharer]:
            del self._taken_by[sharer]

    @contextmanager
    def place(self, sharer: Hashable) -> Iterator[bool]:
        """Takes a place until the context is left; whether there was one."""
        has_place = self.left(sharer) > 0
        if has_place:
            self.take(sharer)
        try:
            yield has_place
        finally:
            if has_place:
                self.give_back(sharer)
