"""Delays before further attempts: a list, an exponential back-off, or a function of the program.

| given | the delay before attempt n + 1 | after that |
|---|---|---|
| `("5s", "30s")` | the nth of the list | dead, ATTEMPTS_EXHAUSTED |
| `ExponentialBackoff` | `first * factor ** (n - 1)`, at most `cap` | after `retries`: the same |
| a function of message and error | what it returns | None: dead, NOT_RETRIABLE |
| and that raises, or returns no delay | the nth of `DEFAULT_RETRY` | dead, ATTEMPTS_EXHAUSTED |

Jitter makes a delay longer, never shorter, by a part of itself that follows from the record's
origin and attempt: what failed together comes back spread out, and the same record always alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from delaywheel.consumer.message import ReceivedMessage
from delaywheel.functions import check_begun, check_plain
from delaywheel.levels import Duration, length_ms

Failure: TypeAlias = BaseException | str | None
"""How a handler failed; None: it did not say."""


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """Delays that grow by a factor, from `first`, before the second attempt, to `cap` at most.

    After `retries` further attempts a record is dead.

    Example:
        Ten further attempts, after 5 s, 10 s, 20 s, …, at most 10 min::

            ExponentialBackoff("5s", cap="10m", retries=10)
    """

    first: Duration
    cap: Duration = "1h"
    factor: float = 2.0
    retries: int = 10

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if length_ms(self.first) > length_ms(self.cap):
            raise ValueError(f"cap={self.cap!r}: below first={self.first!r}")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"factor={self.factor}: at least 1")
        if self.retries < 0:
            raise ValueError(f"retries={self.retries}: at least 0")

    def delay_ms(self, attempt: int) -> int | None:
        """Returns the delay after this attempt; None: it was the last one."""
        if attempt > self.retries:
            return None
        cap_ms = length_ms(self.cap)
        try:
            grown_ms = math.ceil(length_ms(self.first) * self.factor ** (attempt - 1))
        except OverflowError:  # of the power, or an infinite product
            return cap_ms
        return min(cap_ms, grown_ms)


Backoff: TypeAlias = (
    Iterable[Duration] | ExponentialBackoff | Callable[[ReceivedMessage, Failure], Duration | None]
)
"""What the options take: see above."""


DEFAULT_RETRY: Final = ("5s", "30s", "2m", "10m", "30m")


class Delays(NamedTuple):
    """A checked back-off: `after` returns a delay in milliseconds; None: that attempt was the last.

    The longest delay is 0 if it is unknown; `is_chosen` if the program chooses the last attempt.
    """

    after: Callable[[ReceivedMessage, Failure], int | None]
    longest_ms: int = 0
    is_chosen: bool = False


def delays_of(given: Backoff) -> Delays:
    """Checks a back-off; raises ValueError for a text that is no duration, else TypeError."""
    if isinstance(given, str):
        raise TypeError(f"retry={given!r}: give a list of delays, such as ({given!r},)")
    if isinstance(given, ExponentialBackoff):
        longest_ms = given.retries and (given.delay_ms(given.retries) or 0)  # the last one
        return Delays(lambda message, _: given.delay_ms(message.attempt), longest_ms)
    if callable(given):
        check_plain("retry", given)
        return Delays(_chosen_by(given), is_chosen=True)
    if not isinstance(given, Iterable):
        raise TypeError(f"retry={given!r}: give a list of delays, such as {DEFAULT_RETRY}")
    levels_ms = tuple(length_ms(delay) for delay in given)

    def after(message: ReceivedMessage, _: Failure) -> int | None:
        return levels_ms[message.attempt - 1] if message.attempt <= len(levels_ms) else None

    return Delays(after, max(levels_ms, default=0))


DEFAULT_DELAYS: Final = delays_of(DEFAULT_RETRY)


def with_jitter(delay_ms: int, message: ReceivedMessage, jitter: float) -> int:
    """Returns a delay that is up to this part of itself longer, by where the record is from."""
    if not jitter:
        return delay_ms
    digest = hashlib.blake2b(f"{message.origin}#{message.attempt}".encode(), digest_size=4).digest()
    return delay_ms + int(delay_ms * jitter * int.from_bytes(digest) / 0xFFFF_FFFF)


def _chosen_by(
    choose: Callable[[ReceivedMessage, Failure], Duration | None],
) -> Callable[[ReceivedMessage, Failure], int | None]:
    def after(message: ReceivedMessage, error: Failure) -> int | None:
        chosen = choose(message, error)
        check_begun(choose, chosen)
        return None if chosen is None else length_ms(chosen)

    return after
