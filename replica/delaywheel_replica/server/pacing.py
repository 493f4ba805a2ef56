"""How the store's one thread shares its time between callers and work that takes long.

Callers' groups, mirrored frames, and everything the member machine waits for go through one queue,
in order. On a slow disk a single file may take 50 ms to open, to sync or to delete, and some work
is about thousands of files. So none of it is one job:

=====================  ==========================================================================
work                   done
=====================  ==========================================================================
sweep, delete a wheel  in steps (`LongWork`), each of which goes behind all that came meanwhile
mirror, serve          in pieces, each as many frames as one `Turn` takes
repair, cut            file by file
=====================  ==========================================================================

Between two pieces or files, one waiting group of callers is written. A turn is at least one file.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from delaywheel_replica.core.member_events import Deleted, DeleteWheel, Event, Failed, Sweep
from delaywheel_replica.server.store import Store

TURN_MS: Final = 40


class Turn:
    """One turn of a long job: at least one file or frame, and no more once it is over.

    Attributes:
        has_ended: it is over.
    """

    def __init__(self, now_ms: Callable[[], int], most: int | None = None) -> None:
        """It begins.

        Args:
            now_ms: the monotonic clock.
            most: so many files or frames at most; None: as many as the time allows.
        """
        self._now_ms = now_ms
        self._until_ms = now_ms() + TURN_MS
        self._left = most
        self.has_ended = False

    def is_over(self) -> bool:
        """To be asked after each file or frame."""
        if self._left is not None:
            self._left -= 1
        self.has_ended = self._left == 0 or self._now_ms() >= self._until_ms
        return self.has_ended


class LongWork:
    """What is deleted, in steps. For the store's thread."""

    def __init__(self, store: Store, now_ms: Callable[[], int], *, most_files: int | None) -> None:
        """Nothing is to be done yet.

        Args:
            store: whose files are deleted.
            now_ms: the monotonic clock.
            most_files: a step deletes no more; None: as many as a turn takes.
        """
        self._store = store
        self._now_ms = now_ms
        self._most_files = most_files
        self._work: deque[tuple[Sweep | DeleteWheel, Iterator[int]]] = deque()

    def begin(self, effect: Sweep | DeleteWheel) -> bool:
        """Takes in an effect; whether it is the first, so that a step is to be done.

        A sweep raises the floor at once; one that has not begun to delete gives way to it.
        """
        match effect:
            case Sweep():
                steps = self._store.sweep(effect.floor)
                if len(self._work) > 1 and isinstance(self._work[-1][0], Sweep):
                    self._work.pop()
            case DeleteWheel():
                steps = self._store.delete_wheel(effect.wheel)
        self._work.append((effect, steps))
        return len(self._work) == 1

    def step(self) -> tuple[Event | None, bool]:
        """Does one turn of the oldest work: what the machine is to be told, and if more is left."""
        effect, steps = self._work[0]
        turn = Turn(self._now_ms, self._most_files)
        event: Event | None = None
        try:
            for _ in steps:
                if turn.is_over():
                    return None, True
            if isinstance(effect, DeleteWheel):
                event = Deleted(effect.wheel)
        except OSError as error:
            event = Failed(effect, str(error))
        self._work.popleft()
        return event, bool(self._work)
