"""Whose turn it is in `run`: of the records with one key, one has a handler at a time.

| a record that is to be handed out | then it |
|---|---|
| has no key, or nobody has a turn with its key | has the turn: its handler begins |
| is the next of its key, whose turn has ended; or was put back for later, and that is now | has \
the turn |
| has a key with which another one has the turn | is parked: it waits as before, out of the way of |
|   | records with other keys |

Parked records are waiting ones in the book: a rebalance forgets them at once, and waits for those
alone that handlers have. (In queues by thread they counted as in hand, and 24 of 120 were handled
twice.) A turn ends with its handler, whatever became of the record.

No I/O, no clock, no lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from delaywheel.consumer.message import ReceivedMessage, State
from delaywheel.consumer.records import Partition


class KeyTurns:
    """The keys with which a record has its turn, and those that are parked behind it."""

    def __init__(self) -> None:
        # Of each key the record that has the turn, or is to be handed out next, and the parked.
        self._keys: dict[bytes, deque[ReceivedMessage]] = {}

    def begin(self, message: ReceivedMessage) -> bool:
        """Gives a record the turn, or parks it; returns whether it has the turn."""
        if message.key is None:
            return True
        queue = self._keys.get(message.key)
        if queue is None:
            self._keys[message.key] = deque((message,))
        elif queue[0] is not message:
            queue.insert(_place_in(queue, message), message)
            return False
        return True

    def end(self, message: ReceivedMessage) -> ReceivedMessage | None:
        """Ends a turn; returns who is next."""
        if message.key is None:
            return None
        queue = self._keys[message.key]
        queue.popleft()
        if queue:
            return queue[0]
        del self._keys[message.key]
        return None

    def keep(self, message: ReceivedMessage, again: ReceivedMessage) -> None:
        """Ends a turn that the same record is to have again, as another object, before others."""
        if message.key is not None:
            self._keys[message.key][0] = again

    def withdraw(self, partitions: Container[Partition]) -> list[ReceivedMessage]:
        """Parks nothing of these partitions; returns them, and others that are next, to go on."""
        found: list[ReceivedMessage] = []
        for key, queue in list(self._keys.items()):
            first = queue[0]
            is_next = first.state is State.WAITING
            parked = deque(one for one in queue if one.at not in partitions)
            found += [one for one in queue if one is not first and one.at in partitions]
            if not is_next and first.at in partitions:
                parked.appendleft(first)  # its handler goes on
            elif is_next and parked and parked[0] is not first:
                found.append(parked[0])
            if parked:
                self._keys[key] = parked
            else:
                del self._keys[key]
        return sorted(found, key=lambda one: one.place)


def _place_in(queue: deque[ReceivedMessage], message: ReceivedMessage) -> int:
    """Returns where a record is parked: one that was put back comes before later ones."""
    place = len(queue)
    while place > 1 and queue[place - 1].at == message.at:
        if queue[place - 1].place.offset < message.place.offset:
            break
        place -= 1
    return place
