"""How much one transaction may carry where Kafka throttles the leader.

A broker whose quota for a client is used up takes a write, answers at once for how long it now
throttles, and then reads nothing more from that connection for so long. What a quota is worth is
not told: it is measured. A broker counts what it took within some ten seconds: so much may go out
at once after a rest. It throttles for as long as makes up for what went beyond, and again for that
and for what is new with each write, one for each partition, until the ten seconds are over.

So a transaction must be small enough that its records, and then the progress record, get through
before the brokers abort it; all else waits no longer than the quota makes it wait. The rate that a
throttled one shows is what went out within `WINDOW_S`, Kafka's own bytes for each message included,
over that time and the throttling. (Its own bytes over the time that it took say too much if a rest
had left some, and too little while a burst before it still counts.) The next one may have what that
rate takes in its share of a second, which is smaller the more partitions there are:

| a transaction | the rate is then | the share is then |
|---|---|---|
| was throttled, and no quota is known yet | what it shows; none, if less than | `FIRST_SHARE_S` |
|   | `LEAST_PORTION_BYTES` were sent within `WINDOW_S` | |
| was throttled, and had half of what it may | what it shows | so that it takes `TAKES_S` |
| was not throttled, and had half of what it may | a tenth more; none, once that is | as before |
|   | more than a transaction may have anyway | |
| had less, and a quota is known: what earlier ones left was measured | as before | as before |
| was aborted, for it was to be throttled for too long | as if it had ended: brokers count it | |

A quota of requests (`request_percentage`) throttles each of them for up to a second, however little
it carries: smaller transactions are no shorter then, and what they show falls with their size. So
once less than `_SPURIOUS` of what the first throttled one showed is left, the size of that one is
taken again, and then what takes `PATIENT_S`, throttled or not, by its size alone. A quota of bytes
that was lowered looks the same: its transactions take that time, too, and what is lost is that
others wait for so long.

While no quota is known, what is more than ever went out within `WINDOW_S` is written in portions of
a fifth of it, so that the first throttling is one of some seconds. Each portion waits for its
answers, and nobody's messages may be late for a quota that is not there: 10 MB are 28 of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

THROTTLED: Final = "THROTTLED"
"""Begins the cause of a transaction that was given up for this reason alone."""

WINDOW_S: Final = 10
FIRST_SHARE_S: Final = 0.1
LARGEST_SHARE_S: Final = 1.0
TAKES_S: Final = 1.5
"""How long a transaction may take, with the throttling that it brings about."""

MESSAGE_BYTES: Final = 250
"""What a message takes beside its key, value and headers, about."""

LEAST_PORTION_BYTES: Final = 32_000
PORTION: Final = 1 / 5

_GROWTH: Final = 1.1

PATIENT_S: Final = 3.5
"""How long a transaction may take where smaller ones are no shorter."""

_SPURIOUS: Final = 1 / 4


@dataclass(frozen=True, slots=True)
class ProducerQuota:
    """What is known of Kafka's quota for this leader.

    Attributes:
        bytes_per_s: What it takes; None: it has not throttled.
        share_s: Of how long one transaction may have that.
        recent: What was sent in each of the last seconds, by the second.
        proven_bytes: The most that went out within `WINDOW_S` without being throttled.
        first_bytes: What the first throttled transaction carried; `first_per_s`: the rate it
            showed.
        patient_bytes: What a transaction may have where smaller ones are no shorter; None: they
            are, as far as is known.
    """

    bytes_per_s: float | None = None
    share_s: float = FIRST_SHARE_S
    recent: tuple[tuple[int, int], ...] = ()
    proven_bytes: int = 0
    first_bytes: int = 0
    first_per_s: float = 0.0
    patient_bytes: int | None = None

    @property
    def most_bytes(self) -> int | None:
        """How much the next transaction may carry; None: no quota is known."""
        if self.patient_bytes is not None:
            return self.patient_bytes
        return None if self.bytes_per_s is None else max(1, round(self.bytes_per_s * self.share_s))

    def portions(self, now_ms: int) -> Iterator[int]:
        """Yields how much may be written at once, and then again and again."""
        if (most_bytes := self.most_bytes) is not None:
            sent_bytes = portion_bytes = 2 * most_bytes
        else:
            sent_bytes = self._with(0, now_ms // 1000).together_bytes
            portion_bytes = self.proven_bytes - sent_bytes
        while True:
            portion_bytes = max(LEAST_PORTION_BYTES, portion_bytes)
            yield portion_bytes
            sent_bytes += portion_bytes
            portion_bytes = round(sent_bytes * PORTION)

    @property
    def together_bytes(self) -> int:
        """What was sent within `WINDOW_S`."""
        return sum(each for _, each in self.recent)

    def after(
        self, sent_bytes: int, *, began_ms: int, throttled_ms: int, most_bytes: int
    ) -> ProducerQuota:
        """Returns what is known after one more transaction, which was sent from `began_ms` on.

        Args:
            sent_bytes: What was sent of it, as `wire_bytes` says.
            throttled_ms: How long after that Kafka takes more; 0: it did not throttle.
            most_bytes: What a transaction may have if there is no quota.
        """
        known = self._with(sent_bytes, began_ms // 1000)
        may_bytes = self.most_bytes
        if may_bytes is not None and 2 * sent_bytes < may_bytes:
            return known
        if throttled_ms:
            return known.after_throttled(sent_bytes, throttled_ms, most_bytes)
        if self.bytes_per_s is None:
            proven_bytes = max(self.proven_bytes, known.together_bytes)
            return replace(known, proven_bytes=proven_bytes)
        more = self.bytes_per_s * _GROWTH
        is_lifted = more * self.share_s >= most_bytes
        if self.patient_bytes is not None:
            known = replace(known, patient_bytes=2 * self.patient_bytes)
            is_lifted = 2 * self.patient_bytes >= most_bytes
        if is_lifted:
            return ProducerQuota(recent=known.recent, proven_bytes=known.together_bytes)
        return replace(known, bytes_per_s=more)

    def after_throttled(self, sent_bytes: int, throttled_ms: int, most_bytes: int) -> ProducerQuota:
        """Returns what a transaction shows that had what it may, and was throttled."""
        rate = max(1.0, self.together_bytes / (WINDOW_S + throttled_ms / 1000))
        known = replace(self, bytes_per_s=rate)
        if self.bytes_per_s is None:
            if self.together_bytes < LEAST_PORTION_BYTES:
                return self
            return replace(known, first_bytes=sent_bytes, first_per_s=rate)
        if self.patient_bytes is not None:
            factor = max(1 / 4, min(PATIENT_S * 1000 / throttled_ms, 2))
            patient_bytes = min(round(self.patient_bytes * factor), most_bytes)
            return replace(known, patient_bytes=max(1, patient_bytes))
        if rate < self.first_per_s * _SPURIOUS:
            return replace(known, patient_bytes=self.first_bytes)
        factor = max(1 / 4, min(TAKES_S * 1000 / throttled_ms, _GROWTH))
        return replace(known, share_s=min(self.share_s * factor, LARGEST_SHARE_S))

    def _with(self, sent_bytes: int, second: int) -> ProducerQuota:
        recent = dict(self.recent)
        recent[second] = recent.get(second, 0) + sent_bytes
        kept = ((at, each) for at, each in sorted(recent.items()) if at > second - WINDOW_S - 1)
        return replace(self, recent=tuple(kept))


def wire_bytes(messages: int, length_bytes: int) -> int:
    """Returns about how much messages take on the way to Kafka."""
    return length_bytes + messages * MESSAGE_BYTES
