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

A slow Kafka must not be made slower: a new leader begins with one frame a transaction and
doubles while its transactions are full and quick. Nor may a transaction outgrow the time that a
call may last: Kafka's client sends a request for each partition, so messages for very many topics
cost as much time as partitions.

=============================================  =================================================
a commit                                       and then the cap
=============================================  =================================================
was full, and is expected in time with twice   is doubled
as many
took longer than the shortest by more than     is halved, but never below one frame
a quarter beyond the time that it may take,
and by more than the shortest and
`SLOW_COMMIT_MARGIN_MS`
did so again after the cap was halved, which   stays
had saved less than a quarter of the time
is anything else                               stays
=============================================  =================================================

It may take `LONGEST_COMMIT_MS`, or as long as its oldest message was late when it began, up to
`LONGEST_BEHIND_MS`: what has waited for that long is served by a higher rate, not by short
transactions. A leader that kept to a second would stay behind a Kafka that needs more for all
partitions, however few messages more that would take (decision 204). For the same reason a cap is
not halved again and again where that saves no time, unless a call might not last for it.

In time is within what it may take, or `BESIDE_SLOW_MS` beside the shortest, if that is longer.
Twice as many are expected to take the less of two times:

- What a commit took beyond the *shortest* one is what its messages cost, and twice as many cost
  twice as much at most.
- They cost less if they go to the same partitions again. What the last doubling added to a commit
  shows that: the next one adds twice as much at most, since the more messages there are, the fewer
  of them are the first for their partition.

Beyond `LONGEST_COMMIT_MS` three commits in a row must say so, since single ones vary; and what was
learned of twice or half as many is forgotten after `STEADY_COMMITS`: then the cap is doubled once,
which takes twice as long at most.

So what was doubled is not halved while Kafka stays as it is, even if all of the shortest one was
for its messages. The shortest is that of recent commits which were not full, or had the least cap:
those show what Kafka takes whatever a transaction holds. Full ones can only lower it, or it would
rise to theirs while they last, and the cap with it. With the least cap the last few count alone:
what idle commits took before says nothing of a Kafka that has too much to do since.
"""

from dataclasses import dataclass, replace
from statistics import median_low

LEAST_PAUSE_MS = 20
MOST_PAUSE_MS = 25
RECENT_COMMITS = 16
COMPARED_COMMITS = 3
"""So many full commits with a cap show what it takes, whatever single ones took."""
SLOW_COMMIT_MARGIN_MS = 300
LONGEST_COMMIT_MS = 1_000
"""How long a full transaction may take. Half of what a call may last at least: what is expected may
be wrong."""
LONGEST_BEHIND_MS = 3_000
"""The same of a leader that is far behind, a third of `MAX_CALL_MS`."""
STEADY_COMMITS = 8
"""After so many full commits that were not too long a leader that is far behind tries twice as
many messages, whatever it knows of earlier ones."""
BESIDE_SLOW_MS = 250
"""What messages may add to a commit that takes `LONGEST_COMMIT_MS` without."""


@dataclass(frozen=True, slots=True)
class CapLimits:
    """Bounds of what one transaction may hold.

    Attributes:
        frame_messages: The most messages that a frame may have; no cap is below.
        frame_bytes: The most bytes that a frame may have; no cap is below.
        max_messages: The configured cap.
        max_bytes: The configured cap.
        own_batch_bytes: The most bytes in one batch for a topic of our own.
    """

    frame_messages: int
    frame_bytes: int
    max_messages: int
    max_bytes: int
    own_batch_bytes: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Pace:
    """The cap of the next transaction, and when it may begin.

    Attributes:
        limits: The limits of the cap.
        cap_messages: The most messages of the next transaction.
        cap_bytes: The most bytes of the next transaction.
        recent_ms: How long the last commits took.
        spare_ms: The same of those that show what a commit takes at least.
        full_ms: The same of full ones with this cap.
        half_ms: What full ones took at half of this cap; None: it was not doubled to this.
        twice_ms: What the one took for which it was halved to this; None: it was not, or commits
            are quick again.
    """

    limits: CapLimits
    cap_messages: int
    cap_bytes: int
    recent_ms: tuple[int, ...] = ()
    spare_ms: tuple[int, ...] = ()
    full_ms: tuple[int, ...] = ()
    half_ms: int | None = None
    twice_ms: int | None = None

    @property
    def pause_ms(self) -> int:
        """Returns the least time between the beginnings of two transactions, in milliseconds."""
        if not self.recent_ms:
            return MOST_PAUSE_MS
        return min(max(LEAST_PAUSE_MS, 2 * median_low(self.recent_ms)), MOST_PAUSE_MS)

    def is_filled_by(self, messages: int, length_bytes: int) -> bool:
        """Whether so much is near the cap; what did not fit any more may be large."""
        return 2 * messages >= self.cap_messages or 2 * length_bytes >= self.cap_bytes

    def after_commit(self, duration_ms: int, *, full: bool, late_ms: int = 0) -> "Pace":
        """Returns the cap after one more committed transaction.

        Args:
            duration_ms: How long the commit took.
            full: The transaction was as large as the cap allowed.
            late_ms: How late its oldest message was when it began.
        """
        spare_ms = self.spare_ms
        if not full:
            spare_ms = (*spare_ms, duration_ms)[-RECENT_COMMITS:]
        elif self._is_least:  # of a Kafka that has become slow the others say nothing
            spare_ms = (*spare_ms, duration_ms)[-COMPARED_COMMITS:]
        shortest_ms = min((*spare_ms, duration_ms))
        beside_slow_ms = shortest_ms + BESIDE_SLOW_MS
        is_quick = 2 * duration_ms - shortest_ms <= max(LONGEST_COMMIT_MS, beside_slow_ms)
        pace = replace(
            self,
            recent_ms=(*self.recent_ms, duration_ms)[-RECENT_COMMITS:],
            spare_ms=spare_ms,
            full_ms=(*self.full_ms, duration_ms)[-RECENT_COMMITS:] if full else self.full_ms,
            twice_ms=None if is_quick else self.twice_ms,
        )
        allowed_ms = allowed_commit_ms(late_ms)
        too_long_ms = max(_tolerated(allowed_ms), shortest_ms + SLOW_COMMIT_MARGIN_MS)
        if duration_ms - shortest_ms > too_long_ms and _is_for_its_messages(self, duration_ms):
            return _with_cap(
                pace, self.cap_messages // 2, self.cap_bytes // 2, twice_ms=duration_ms
            )
        if full and (is_quick or _may_double(pace, shortest_ms, max(allowed_ms, beside_slow_ms))):
            half_ms = median_low(pace.full_ms)
            return _with_cap(pace, self.cap_messages * 2, self.cap_bytes * 2, half_ms=half_ms)
        return pace

    @property
    def _is_least(self) -> bool:
        limits = self.limits
        return self.cap_messages <= limits.frame_messages and self.cap_bytes <= limits.frame_bytes


def allowed_commit_ms(late_ms: int) -> int:
    """Returns how long a transaction may take whose oldest message is late by so much."""
    return max(LONGEST_COMMIT_MS, min(late_ms, LONGEST_BEHIND_MS))


def first_pace(limits: CapLimits) -> Pace:
    """Returns the cap of a new leader: one frame."""
    return Pace(limits, limits.frame_messages, limits.frame_bytes)


def _with_cap(
    pace: Pace,
    messages: int,
    length_bytes: int,
    *,
    half_ms: int | None = None,
    twice_ms: int | None = None,
) -> Pace:
    """Returns this pace with another cap, of which nothing else is known yet."""
    limits = pace.limits
    return replace(
        pace,
        cap_messages=max(limits.frame_messages, min(messages, limits.max_messages)),
        cap_bytes=max(limits.frame_bytes, min(length_bytes, limits.max_bytes)),
        full_ms=(),
        half_ms=half_ms,
        twice_ms=twice_ms,
    )


def _is_for_its_messages(pace: Pace, duration_ms: int) -> bool:
    """Whether a commit that took too long may take less with half of the messages."""
    if pace.twice_ms is None or duration_ms > _tolerated(LONGEST_BEHIND_MS):
        return True
    return 4 * duration_ms <= 3 * pace.twice_ms


def _may_double(pace: Pace, shortest_ms: int, longest_ms: int) -> bool:
    """Whether full commits say that twice as much is in time, or may be tried."""
    full_ms = pace.full_ms
    if pace.twice_ms is not None and pace.twice_ms <= longest_ms:
        return True
    if len(full_ms) < COMPARED_COMMITS:
        return False
    if 2 * max(full_ms[-COMPARED_COMMITS:]) - shortest_ms <= longest_ms:
        return True
    if longest_ms >= LONGEST_BEHIND_MS and len(full_ms) >= STEADY_COMMITS:
        return max(full_ms[-STEADY_COMMITS:]) <= _tolerated(LONGEST_BEHIND_MS)
    if pace.half_ms is None:
        return False
    now_ms = median_low(full_ms)
    return now_ms + 2 * max(0, now_ms - pace.half_ms) <= longest_ms


def _tolerated(allowed_ms: int) -> int:
    """Returns how long a commit may take in fact that may take so long: single ones vary."""
    return allowed_ms * 5 // 4
