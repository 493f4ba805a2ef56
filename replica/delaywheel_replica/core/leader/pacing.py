"""How much goes into one transaction, and how far apart transactions are.

Every transaction costs the broker 4 to 9 ms of CPU and the leader 2, whatever it holds. So the next
one begins, after the last one began,

=============================================  =================================================
when                                           after
=============================================  =================================================
nothing is due                                 as long as the term lasts without: an idle commit
the last commits took 10 ms or less            `LEAST_PAUSE_MS`
they took longer (the median of the last 16)   twice as long: at most half of the time is spent in
                                               transactions, and the slower they are, the fewer
they took 12.5 ms or more, or there were none  `MOST_PAUSE_MS`, or once the last one has ended
=============================================  =================================================

and what falls due after a longer rest than that is sent at once. A message waits for half a pause
on average, and then for a commit: with `LEAST_PAUSE_MS` that is as early as Kafka's own
transactions at a cadence of 25 ms, and half of that would cost the leader half as much again
(decision 68).

A slow Kafka must not be made slower: a new leader begins with the least cap (`CapLimits`) and
doubles while its transactions are full and quick. Nor may a transaction outgrow the time that a
call may last: Kafka's client sends a request for each partition, so messages for very many topics
cost as much time as partitions.

=============================================  =================================================
a commit                                       and then the cap
=============================================  =================================================
took `UNSAFE_COMMIT_MS`                        is halved, but never below the least
was full, took longer than it may, and half    is halved likewise
of it is expected to take three quarters of
the time or less
was full, and twice as much is expected to     is doubled
take no longer than it may, or at most
`BESIDE_SLOW_MS` longer than it took now
is anything else                               stays
=============================================  =================================================

A full one may take `LONGEST_COMMIT_MS`, or as long as its oldest message was late when it began, up
to `LONGEST_BEHIND_MS`: what has waited for that long is served by a higher rate, not by short
transactions. A leader that kept to a second would stay behind a Kafka that needs more for all
partitions, however few messages more that would take.

What is expected is read off the transaction itself, not learned from how long others took, which
says little where a machine is busy: how many partitions all of its messages may touch, half of
them, and a quarter (decision 229). The more messages there are, the fewer of them are the first for
their partition. If a quarter touches 19 partitions, half 30 and all 40, then the last doubling
added ten elevenths of what the one before it did, and the next adds ten elevenths of that, or less.
So a commit that was doubled is not halved while Kafka stays as it is, and one that takes long
whatever it holds is not halved before a call might not last for it.
"""

from dataclasses import dataclass, replace
from statistics import median_low

from delaywheel_replica.core.protocol.producer_quota import MESSAGE_BYTES

LEAST_PAUSE_MS = 20
MOST_PAUSE_MS = 25
RECENT_COMMITS = 16
LONGEST_COMMIT_MS = 1_000
"""How long a transaction may take. Half of what a call may last at least: what is expected may
be wrong."""
LONGEST_BEHIND_MS = 3_000
"""The same of a leader that is far behind, a third of `MAX_CALL_MS`."""
UNSAFE_COMMIT_MS = 6_000
"""Whatever takes longer might not last for a call: two thirds of `MAX_CALL_MS`."""
BESIDE_SLOW_MS = 250
"""What as many messages again may add to a commit, whatever it takes without them."""
LEAST_BYTES_PER_MS = 2_000
"""What a slow Kafka takes in: bytes count in what is expected, although they rarely decide it."""


@dataclass(frozen=True, slots=True)
class CapLimits:
    """Bounds of what one transaction may hold: the least cap, which is the first, and the most.

    `own_batch_bytes` is the most in one batch for a topic of our own.
    """

    frame_messages: int
    frame_bytes: int
    max_messages: int
    max_bytes: int
    own_batch_bytes: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """What a full transaction asked of Kafka.

    Attributes:
        partitions: How many it may have touched, with those of our own topics.
        partitions_of_half: The same if it had half of the messages.
        partitions_of_quarter: The same of a quarter.
    """

    length_bytes: int
    partitions: int
    partitions_of_half: int
    partitions_of_quarter: int

    def doubled_ms(self, duration_ms: int) -> int:
        """Returns how long twice as much is expected to take, at most."""
        added_before = self.partitions_of_half - self.partitions_of_quarter
        ratio = min(2.0, self._added / added_before) if added_before else 2.0
        return round(duration_ms + self._share_ms(duration_ms, self._added * ratio, 1))

    def halved_ms(self, duration_ms: int) -> int:
        """Returns how long half of it is expected to take."""
        return round(duration_ms - self._share_ms(duration_ms, self._added, 1 / 2))

    @property
    def _added(self) -> int:
        """How many partitions the second half touched that the first one had not."""
        return self.partitions - self.partitions_of_half

    def _share_ms(self, duration_ms: int, partitions: float, messages: float) -> float:
        """Returns how much of the time is for this share of all messages, which is at most 1."""
        for_partitions_ms = duration_ms * partitions / max(1, self.partitions)
        for_bytes_ms = self.length_bytes * messages / LEAST_BYTES_PER_MS
        return min(duration_ms * messages, for_partitions_ms + for_bytes_ms)


@dataclass(frozen=True, slots=True)
class Pace:
    """The next transaction's cap, and when it may begin, by how long the last commits took."""

    limits: CapLimits
    cap_messages: int
    cap_bytes: int
    recent_ms: tuple[int, ...] = ()

    @property
    def pause_ms(self) -> int:
        """Returns the least time between the beginnings of two transactions, in milliseconds."""
        if not self.recent_ms:
            return MOST_PAUSE_MS
        return min(max(LEAST_PAUSE_MS, 2 * median_low(self.recent_ms)), MOST_PAUSE_MS)

    def within(self, most_bytes: int | None) -> "Pace":
        """Returns the same with no more than a quota takes (core/protocol/producer_quota.py)."""
        if most_bytes is None:
            return self
        most_messages = max(1, most_bytes // MESSAGE_BYTES)
        return replace(
            self,
            cap_messages=min(self.cap_messages, most_messages),
            cap_bytes=min(self.cap_bytes, most_bytes),
        )

    def is_filled_by(self, messages: int, length_bytes: int) -> bool:
        """Whether so much is near the cap; what did not fit any more may be large."""
        return 2 * messages >= self.cap_messages or 2 * length_bytes >= self.cap_bytes

    def after_commit(self, duration_ms: int, load: Load | None, *, late_ms: int = 0) -> "Pace":
        """Returns the cap after one more committed transaction.

        Args:
            load: What it held, if that was near the cap; None: it had room left.
            late_ms: How late its oldest message was when it began.
        """
        pace = replace(self, recent_ms=(*self.recent_ms, duration_ms)[-RECENT_COMMITS:])
        if duration_ms >= UNSAFE_COMMIT_MS:
            return _with_cap(pace, self.cap_messages // 2, self.cap_bytes // 2)
        if load is None:
            return pace
        may_take_ms = max(LONGEST_COMMIT_MS, min(late_ms, LONGEST_BEHIND_MS))
        # Half of it must take a quarter less time.
        saves_time = 4 * load.halved_ms(duration_ms) <= 3 * duration_ms
        if duration_ms > may_take_ms and saves_time:
            return _with_cap(pace, self.cap_messages // 2, self.cap_bytes // 2)
        doubled_ms = load.doubled_ms(duration_ms)
        if doubled_ms <= may_take_ms or doubled_ms - duration_ms <= BESIDE_SLOW_MS:
            return _with_cap(pace, self.cap_messages * 2, self.cap_bytes * 2)
        return pace


def first_pace(limits: CapLimits) -> Pace:
    """Returns the cap of a new leader: one frame."""
    return Pace(limits, limits.frame_messages, limits.frame_bytes)


def _with_cap(pace: Pace, messages: int, length_bytes: int) -> Pace:
    limits = pace.limits
    return replace(
        pace,
        cap_messages=max(limits.frame_messages, min(messages, limits.max_messages)),
        cap_bytes=max(limits.frame_bytes, min(length_bytes, limits.max_bytes)),
    )
