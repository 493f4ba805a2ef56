"""Which events are kept: those of the sample, and failures, few a second.

A way is in the sample if a hash of its root says so: the CRC-32 of an id's 16 bytes, or of a
place's text, is below the share of 2**32. So all ends keep the same ways.

| an event | in the sample | else |
|---|---|---|
| a message was sent, and refused, or perhaps not | of these, 100 a second | |
| another failure | kept | with the former, 100 a second |
| all else | kept | left out |

A refused message has no further way, so that the sample loses nothing; and a quota that refuses
10,000 a second does not become 10,000 events. Failures beyond that are counted as dropped.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple
from zlib import crc32

MOST_FAILURES: Final = 100
"""In a second."""

_HASHES: Final = 2**32


class Chosen(NamedTuple):
    """Which of some events are kept, by number (None: all), and how many failures are too many."""

    rows: list[int] | None
    dropped: int = 0


class Sampling:
    """Chooses events.

    Threads may call it at once, and there is no lock that a fork could keep: then a few failures
    more are kept in that second.
    """

    def __init__(self, share: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._below: Final = int(share * _HASHES)
        self._now_s: Final = now_s
        self._second = 0
        self._failures = 0

    @property
    def takes_all(self) -> bool:
        """Whether all ways are in the sample: then roots are not looked at."""
        return self._below == _HASHES

    def of_sent(self, roots: Sequence[bytes], failed: Sequence[int]) -> Chosen:
        """Chooses among messages that were sent, of which some were not accepted."""
        if not failed:
            return Chosen(self._sampled(roots))
        allowed = self._allowed(len(failed))
        left_out = set(failed[allowed:])
        sampled = self._sampled(roots)
        among = range(len(roots)) if sampled is None else {*sampled, *failed}
        return Chosen(sorted(row for row in among if row not in left_out), len(left_out))

    def of_others(self, roots: Sequence[bytes], failed: Sequence[int]) -> Chosen:
        """Chooses among other events."""
        sampled = self._sampled(roots)
        if sampled is None or not failed:
            return Chosen(sampled)
        inside = set(sampled)
        outside = [row for row in failed if row not in inside]
        allowed = self._allowed(len(outside))
        return Chosen(sorted([*inside, *outside[:allowed]]), len(outside) - allowed)

    def _sampled(self, roots: Iterable[bytes]) -> list[int] | None:
        below = self._below
        if self.takes_all:
            return None
        return [row for row, hashed in enumerate(map(crc32, roots)) if hashed < below]

    def _allowed(self, count: int) -> int:
        """Returns how many of so many failures are kept."""
        second = int(self._now_s())
        if second != self._second:
            self._second, self._failures = second, 0
        allowed = min(count, max(0, MOST_FAILURES - self._failures))
        self._failures += allowed
        return allowed
