"""Settings of both clients, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Final

from delaywheel.client.exchange.channel import Tls
from delaywheel.client.transport.real_time import RealTime
from delaywheel.message import ClockNs, PastDue, clock_ns

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.reports import EventReports
    from delaywheel.ways.spans import Spans

PAST_DUES: Final = ("deliver", "reject")


@dataclass(frozen=True, slots=True)
class Queue:
    """Bounds of the queue in this process, and of batches of `produce_async`.

    Attributes:
        max_messages: Messages waiting or under way; beyond, `produce_async` waits for room.
        max_bytes: The same, as bytes of keys, values and headers.
        batch_messages: The most messages in one request.
        batch_bytes: The most bytes of keys, values and headers in one request; a longer message
            goes alone.
        linger: Seconds a message may wait for others, counted from the last request, and five times
            as long while one is under way; but a fifth of the time to its due at most. Where a
            caller waits for a message of the batch, at most 20 ms, while a request is under way.
        in_flight: Requests under way at once, also for each `produce_many`.
    """

    max_messages: int = 100_000
    max_bytes: int = 64 * 1024 * 1024
    batch_messages: int = 1_000
    batch_bytes: int = 2 * 1024 * 1024
    linger: float = 0.05
    in_flight: int = 4

    def __post_init__(self) -> None:
        counts = (self.max_messages, self.max_bytes, self.batch_messages, self.batch_bytes)
        if min(*counts, self.in_flight) < 1 or self.linger < 0:
            raise ValueError(f"{self}: every bound is at least 1, linger at least 0")


DEFAULT_QUEUE: Final = Queue()


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """See the arguments of `delaywheel.Client`; seconds are monotonic."""

    past_due: PastDue
    timeout_s: float
    attempt_timeout_s: float
    queue: Queue
    tls: Tls | None
    clock: ClockNs = clock_ns
    trace: EventReports | None = None
    spans: Spans | None = None
    real_time: RealTime = field(default_factory=RealTime)

    def __post_init__(self) -> None:
        if self.past_due not in PAST_DUES:
            raise ValueError(f"past_due {self.past_due!r}: not one of {', '.join(PAST_DUES)}")
        if not isinstance(self.queue, Queue):
            raise TypeError(f"queue must be a Queue, not {type(self.queue).__name__}")
        if not isinstance(self.tls, Tls | None):
            raise TypeError(f"tls must be a Tls, not {type(self.tls).__name__}")
        check_trace(self.trace)
        check_spans(self.spans)
        for name, seconds in (
            ("timeout", self.timeout_s),
            ("attempt_timeout", self.attempt_timeout_s),
        ):
            if checked_seconds(name, seconds) <= 0:
                raise ValueError(f"{name} {seconds}: above 0 seconds")

    def deadline_s(self, timeout_s: float | None) -> float:
        """Returns when a call that begins now is given up; without a timeout, the client's.

        Raises:
            RuntimeError: It would not be: the clocks of this process do not show the time.
        """
        now_s = self.real_time.now_s()
        if timeout_s is None:
            return now_s + self.timeout_s
        return now_s + checked_seconds("timeout", timeout_s)

    def attempt_s(self, left_s: float, *, alone: bool) -> float:
        """Returns how long one attempt may take when `left_s` are left for all.

        If there may be other nodes (not `alone`), at most half of that: a node that hangs must
        leave time for another one. The last fifth of a second is not divided further.
        """
        share_s = left_s if alone or left_s <= 0.2 else left_s / 2
        return min(self.attempt_timeout_s, share_s)


def checked_seconds(name: str, seconds: object) -> float:
    """Returns a number of seconds.

    Raises:
        TypeError: It is no number.
        ValueError: It is infinite, or no number at all.
    """
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        raise TypeError(f"{name} must be a number of seconds, not {type(seconds).__name__}")
    if not isfinite(seconds):
        raise ValueError(f"{name} {seconds}: a finite number of seconds")
    return seconds


def check_trace(trace: object) -> None:
    """Checks that an argument is a trace, or None.

    Raises:
        TypeError: It is neither.
    """
    if trace is not None:
        from delaywheel.trace.reports import EventReports  # noqa: PLC0415 - only if one is given

        if not isinstance(trace, EventReports):
            raise TypeError(f"trace must be a Trace, not {type(trace).__name__}")


def check_spans(spans: object) -> None:
    """Checks that an argument makes spans, or is None.

    Raises:
        TypeError: It is neither.
    """
    if spans is not None:
        from delaywheel.ways.spans import Spans  # noqa: PLC0415 - only if they are given

        if not isinstance(spans, Spans):
            raise TypeError(f"spans must be Spans, not {type(spans).__name__}")
