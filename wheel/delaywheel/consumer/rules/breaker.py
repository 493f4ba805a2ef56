"""A circuit breaker: while too many attempts fail, one record is tried at a time.

What a handler needs may be away for longer than the delays of `retry` together; then every record
of a topic would become a dead letter.

| the circuit is | happens | then it is |
|---|---|---|
| closed | of the last `of` attempts, `share` have failed | open: nothing is handed out |
| open | `wait` is over | on trial: one record is handed out |
| on trial | that record is done | closed, and what failed before is forgotten |
| on trial | it has failed | open |
| on trial | it is neither, for `wait` | on trial, with another record |

An attempt has failed if its record is retried, or is dead for want of further attempts or time; it
has succeeded if the record is done. What is in hand when the circuit opens has its outcome as ever.

No clock, no lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from delaywheel.consumer.message import Outcome, ReceivedMessage, Settlement
from delaywheel.levels import Duration, length_ms


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """When a consumer hands out nothing but one record at a time.

    That is from when `share` of the last `of` attempts have failed; a record is tried each time
    that `wait` is over.
    """

    share: float = 0.5
    of: int = 20
    wait: Duration = "30s"

    def __post_init__(self) -> None:
        """Checks the numbers."""
        length_ms(self.wait)
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}: above 0, at most 1")
        if self.of < 1:
            raise ValueError(f"of={self.of}: at least 1")


_EXHAUSTED: Final = frozenset({"ATTEMPTS_EXHAUSTED", "TIME_EXHAUSTED", "HANDLER_TIMEOUT"})


class Circuit:
    """The circuit of one consumer; times are seconds of any one clock."""

    def __init__(self, given: CircuitBreaker) -> None:
        """Begins closed."""
        self._given = given
        self._wait_s = length_ms(given.wait) / 1000
        self._failed: deque[bool] = deque(maxlen=given.of)
        self._open_until_s: float | None = None
        self._trial: ReceivedMessage | None = None
        self._last = ""

    @property
    def text(self) -> str | None:
        """Why it is open, or on trial; None: it is closed."""
        if self._open_until_s is None:
            return None
        return (
            f"{sum(self._failed)} of the last {len(self._failed)} attempts have failed, and one"
            f" record is tried each {self._wait_s:g} s: {self._last}"
        )

    def most(self, most: int, now_s: float) -> int:
        """Returns how many of so many records may be handed out now."""
        if self._open_until_s is None:
            return most
        return 0 if now_s < self._open_until_s else 1

    def taken(self, message: ReceivedMessage, now_s: float) -> None:
        """Takes in that a record is handed out."""
        if self._open_until_s is not None:
            self._trial, self._open_until_s = message, now_s + self._wait_s

    def ended(self, message: ReceivedMessage, settlement: Settlement, now_s: float) -> None:
        """Takes in an outcome."""
        outcome = settlement.outcome
        has_failed = outcome is Outcome.RETRIED or settlement.reason in _EXHAUSTED
        if not has_failed and outcome is not Outcome.DONE:
            return
        if has_failed:
            self._last = settlement.why
        if self._open_until_s is not None:
            if message is self._trial:
                self._trial = None
                self._open_until_s = now_s + self._wait_s if has_failed else None
                if not has_failed:
                    self._failed.clear()
            return
        self._failed.append(has_failed)
        is_enough = len(self._failed) == self._given.of
        if is_enough and sum(self._failed) >= self._given.share * self._given.of:
            self._open_until_s = now_s + self._wait_s
