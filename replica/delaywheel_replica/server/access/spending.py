"""What principals and topics have used of their quotas.

A rate is kept as one moment, until which what was taken so far is paid for. A request is taken
while that moment is not ahead, however large it is, and moves it on by what it takes; an idle
second is kept, not more. So a principal sends exactly its rate over time, the largest requests
come through, and a request costs a comparison, not one for each message.

Who is refused is told when to come again. Refused callers are told moments one after the other, as
if each were taken at its own: otherwise a hundred clients of one principal would come at once for
the place of one, again and again.
"""

import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from delaywheel.reasons import Reason
from delaywheel_replica.process.topic_counts import TopicCounts
from delaywheel_replica.server.access.quotas import Quota, TopicQuota
from delaywheel_replica.server.node.pending_topics import PendingTopics
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, quoted

_KEPT_S: Final = 1.0
_TOLD_MOST_S: Final = 10.0
"""Nobody is told a moment further ahead than that after the next request can be taken."""
_PRINCIPALS_AT_MOST: Final = 4_096
_NO_LIMIT: Final = 1 << 62
_RATES: Final = ("messages_per_second", "bytes_per_second", "questions_per_second")


class Rate:
    """One rate of one principal."""

    __slots__ = ("_paid_s", "_told_s")

    def __init__(self) -> None:
        self._paid_s = self._told_s = 0.0

    def wait_s(self, amount: float, per_s: float, now_s: float) -> float:
        """Returns for how long a request has to wait; 0: it may be taken."""
        if self._paid_s <= now_s:
            return 0.0
        told_s = max(self._paid_s, self._told_s)
        self._told_s = min(told_s + amount / per_s, self._paid_s + _TOLD_MOST_S)
        return told_s - now_s

    def take(self, amount: float, per_s: float, now_s: float) -> None:
        """Counts a request."""
        self._paid_s = max(self._paid_s, now_s - _KEPT_S) + amount / per_s

    def is_idle(self, now_s: float) -> bool:
        """Whether it is as if nothing had been taken yet."""
        return self._paid_s <= now_s - _KEPT_S


class Spending:
    """What principals with a quota have taken. For the event loop's thread; the counts for any."""

    def __init__(self) -> None:
        self._rates: dict[str, tuple[Rate, ...]] = {}
        self.messages: Final = TopicCounts()
        self.length_bytes: Final = TopicCounts()
        self.refused: Final = TopicCounts()

    def spend(
        self,
        principal: str,
        quota: Quota,
        messages: int,
        length_bytes: int,
        now_s: float | None = None,
        *,
        questions: int = 0,
    ) -> None:
        """Counts a request, or refuses it as QUOTA_EXCEEDED if it is beyond the quota."""
        now_s = time.monotonic() if now_s is None else now_s
        used = [
            (name, rate, amount, per_s)
            for name, rate, amount, per_s in zip(
                _RATES,
                self._rates_of(principal, now_s),
                (messages, length_bytes, questions),
                (getattr(quota, name) for name in _RATES),
                strict=True,
            )
            if per_s is not None and amount
        ]
        for name, rate, amount, per_s in used:
            wait_s = rate.wait_s(amount, per_s, now_s)
            if wait_s:
                self.refused.add_one(principal, messages + questions)
                raise RequestRefusedError.of(
                    _quota_exceeded(principal, f"{name} {per_s:,}", wait_s)
                )
        for _, rate, amount, per_s in used:
            rate.take(amount, per_s, now_s)
        self.messages.add_one(principal, messages)
        self.length_bytes.add_one(principal, length_bytes)

    def charge(
        self, principal: str, quota: Quota, messages: int, now_s: float | None = None
    ) -> None:
        """Counts messages that a request turned out to concern: the next ones wait for that."""
        now_s = time.monotonic() if now_s is None else now_s
        if quota.messages_per_second is not None:
            rate = self._rates_of(principal, now_s)[0]
            rate.take(messages, quota.messages_per_second, now_s)
        self.messages.add_one(principal, messages)

    def _rates_of(self, principal: str, now_s: float) -> tuple[Rate, ...]:
        rates = self._rates.get(principal)
        if rates is None:
            if len(self._rates) >= _PRINCIPALS_AT_MOST:
                self._forget(now_s)
            rates = self._rates[principal] = tuple(Rate() for _ in _RATES)
        return rates

    def _forget(self, now_s: float) -> None:
        """Drops those that count for nothing; if there are none, all begin again."""
        self._rates = {
            name: rates
            for name, rates in self._rates.items()
            if not all(rate.is_idle(now_s) for rate in rates)
        }
        if len(self._rates) >= _PRINCIPALS_AT_MOST:
            self._rates.clear()


def _quota_exceeded(principal: str, what: str, wait_s: float) -> Refusal:
    return Refusal(
        Reason.QUOTA_EXCEEDED,
        f"{quoted(principal)}: more than {what}",
        after_ms=max(1, round(wait_s * 1000)),
        principal=principal,
    )


class TopicRoom(NamedTuple):
    """How much more may be pending in a topic."""

    messages: int
    length_bytes: int


TopicRooms: TypeAlias = Callable[[], Callable[[str], TopicRoom | None] | None]
"""Returns how to find a topic's room now; None: no topic has a quota."""


def no_quotas() -> None:
    """Says that no topic has a quota: `TopicRooms`."""


def no_room(topic: str, what: str) -> Refusal:
    """Returns the refusal of a message for which its topic has no room."""
    text = f"As many {what} are pending in {topic} on this node as its quota allows"
    return Refusal(Reason.QUOTA_EXCEEDED, text)


def topic_rooms(
    quota_of: Callable[[], Callable[[str], TopicQuota | None] | None],
    pending: PendingTopics,
    done_slot: Callable[[], int],
) -> Callable[[str], TopicRoom | None] | None:
    """Returns how to find a topic's room now, on any thread; None: no topic has a quota."""
    quota_now = quota_of()
    if quota_now is None:
        return None
    done = done_slot()

    def room_in(topic: str) -> TopicRoom | None:
        quota = quota_now(topic)
        if quota is None:
            return None
        messages, length_bytes = pending.of(topic, done)
        return TopicRoom(
            (quota.pending_messages or _NO_LIMIT) - messages,
            (quota.pending_bytes or _NO_LIMIT) - length_bytes,
        )

    return room_in
