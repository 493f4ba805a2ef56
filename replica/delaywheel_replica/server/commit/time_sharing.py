"""How the store's only thread divides its time between callers and long work.

Callers' groups, mirrored frames, and everything the member machine waits for go through one queue,
in order. On a slow disk it may take 50 ms to open, sync or delete a single file, and some work
concerns thousands of files. So none of that work is a single job:

=====================  ==========================================================================
work                   done
=====================  ==========================================================================
sweep, delete a wheel, in steps (`LongWork`), each queued behind all that came meanwhile
verify a wheel, look
again for its missing
frames
mirror, serve          in pieces, each as many frames as one `TimeSlice` takes
repair, cut            file by file
=====================  ==========================================================================

Between two pieces or files, one waiting group of callers is written. A time slice handles at
least one file. A group that has waited for as long as one lasts is written before the next effect,
since many short effects take long, too.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Final, TypeAlias

from delaywheel.storage.files.wheel_folder import MetaDamaged, WheelMissing
from delaywheel_replica.core.node.events import (
    DeleteWheel,
    Event,
    Failed,
    FoundAgain,
    ReadAgain,
    Sweep,
    Verified,
    VerifyWheel,
    WheelDeleted,
)
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.store.store import Store

TIME_SLICE_MS: Final = 40

_log = get_logger(__name__)

AllOfAWheel: TypeAlias = Sweep | DeleteWheel | VerifyWheel | ReadAgain
"""Effects that concern any number of files."""


class TimeSlice:
    """A part of a long job: at least one file or frame, and none once its time is over."""

    def __init__(self, now_ms: Callable[[], int], most: int | None = None) -> None:
        """Begins now, by the monotonic clock; None: as many files or frames as the time allows."""
        self._now_ms = now_ms
        self._until_ms = now_ms() + TIME_SLICE_MS
        self._left = most
        self.has_ended = False

    def is_over(self) -> bool:
        """Whether it is over; call it after each file or frame."""
        if self._left is not None:
            self._left -= 1
        self.has_ended = self._left == 0 or self._now_ms() >= self._until_ms
        return self.has_ended


class LongWork:
    """Work on any number of files, in steps. For the store's thread.

    Work that frees disk space comes first: verifying may take minutes.

    Attributes:
        verifies: Whether wheels are verified; false once the process is to end.
    """

    def __init__(self, store: Store, now_ms: Callable[[], int], *, most_files: int | None) -> None:
        """Begins without work; the clock, and the files of a step, are as in `TimeSlice`."""
        self._store = store
        self._now_ms = now_ms
        self._most_files = most_files
        self._deleting: deque[tuple[AllOfAWheel, Iterator[object]]] = deque()
        self._verifying: deque[tuple[AllOfAWheel, Iterator[object]]] = deque()
        self.verifies = True

    def begin(self, effect: AllOfAWheel) -> bool:
        """Adds an effect; returns whether it is the first, so that a step has to be queued.

        A sweep raises the floor at once, and replaces an earlier one that has not begun to delete.
        """
        is_first = not self._deleting and not self._verifying
        match effect:
            case Sweep():
                swept = self._store.sweep(effect.floor)
                if len(self._deleting) > 1 and isinstance(self._deleting[-1][0], Sweep):
                    self._deleting.pop()
                self._deleting.append((effect, swept))
            case DeleteWheel():
                self._deleting.append((effect, self._delete(effect)))
            case VerifyWheel():
                self._verifying.append((effect, self._verify(effect)))
            case ReadAgain():
                self._verifying.append((effect, self._read_again(effect)))
        return is_first

    def step(self) -> tuple[Event | None, bool]:
        """Does some of the oldest work; returns an event, and whether more is left."""
        if not self.verifies:
            self._verifying.clear()
        work = self._deleting or self._verifying
        if not work:
            return None, False
        effect, steps = work[0]
        time_slice = TimeSlice(self._now_ms, self._most_files)
        event: Event | None
        try:
            while True:
                next(steps)
                if time_slice.is_over():
                    return None, True
        except StopIteration as end:
            event = end.value
        except (OSError, MetaDamaged, WheelMissing) as error:
            _log.warning("not done", work=str(effect), error=str(error))
            event = Failed(effect, str(error))
        work.popleft()
        return event, bool(self._deleting or self._verifying)

    def _delete(self, effect: DeleteWheel) -> Generator[object, None, Event]:
        yield from self._store.delete_wheel(effect.wheel)
        return WheelDeleted(effect.wheel)

    def _verify(self, effect: VerifyWheel) -> Generator[object, None, Event]:
        held = yield from self._store.verifying(effect.wheel, effect.record, now_ms=self._now_ms())
        return Verified(held)

    def _read_again(self, effect: ReadAgain) -> Generator[object, None, Event]:
        found = yield from self._store.reading_again(effect.wheel, effect.seqs)
        return FoundAgain(self._store.held(effect.wheel), found)
