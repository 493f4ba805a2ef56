"""Defers messages whose topic takes nothing: they come back through the ingress topic, later.

| a due message whose topic, or partition, takes nothing (troubles.py) | becomes |
|---|---|
| its patience has not ended, and the cluster's own ingress topic takes it | deferred |
| its patience has ended | a dead letter, `TOPIC_UNAVAILABLE` |
| there is no such topic, or it leads to some topics alone, or takes nothing itself | as without
                                        patience: a dead letter once troubles.py waits no longer |

A deferred message is done, with the outcome `deferred`; in the same transaction it goes to the
ingress topic, with its id (`id_to_send_again`) and another due, and is a message like any other
from there on. So

1. It is delivered once: each name (topic, id and due) has one end, and the next one begins in the
   same transaction. Whatever leaders come and go, nothing but Kafka and the wheels knows of it.
2. It lies on the disks of as many nodes as any message; no process has it in memory.
3. It holds up no other message, for however long its topic takes nothing.
4. Its first due travels with it (`dw-first-due`), from which its time to live counts, and when it
   was deferred at first (`dw-first-deferred`), from which patience does: a message may have been
   due long before, while Kafka was away, or no node led.
5. It can be cancelled by its present name; by an earlier one it is done.

It comes back after half the time that it has been deferred for by then, or that its topic has taken
nothing: so it is late by half of an outage more than the outage itself, and in an outage the
messages that come back are no more than twice those that fall due. Messages with one id that are
deferred together come back, and lose patience, a millisecond apart: with one due they would be
copies of one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from delaywheel.record_headers import FIRST_DEFERRED, FIRST_DUE, OF_DEFERRAL, last_of
from delaywheel_replica.cleaner.due.rows import ABSENT, DueMessage, DueRows, HalfState
from delaywheel_replica.cleaner.ingress.rewriting import AsSent, requested, rewritten
from delaywheel_replica.patterns import Pattern

LEAST_WAIT_MS: Final = 500
"""As often Kafka is asked whether a topic is well."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long messages wait for topics that take nothing, to come back through the ingress topic.

    Attributes:
        of_topics: How long for some topics; the first pattern that fits counts.
        span_ms: How far ahead a due may be.
    """

    ingress: str
    seconds: float
    of_topics: Sequence[tuple[Pattern, float]] = ()
    span_ms: int = 86_400_000

    def of(self, topic: str) -> float:
        """Returns how many seconds messages for a topic wait."""
        return next((s for pattern, s in self.of_topics if pattern.fits(topic)), self.seconds)

    def left_ms(self, rows: DueRows, now_ms: int) -> NDArray[np.int64]:
        """Returns how long each message of one topic waits from now on; 0 or less: no longer."""
        before = Counter[bytes]()
        since_ms = []
        for id_, headers in zip(rows.records["id"].tolist(), rows.headers(), strict=True):
            since_ms.append(int(last_of(headers, FIRST_DEFERRED) or now_ms + before[id_]))
            before[id_] += 1
        return np.array(since_ms, np.int64) + self._of_ms(rows) - now_ms

    def deferred(
        self,
        rows: DueRows,
        left_ms: NDArray[np.int64],
        waited_ms: int,
        partition: int,
        now_ms: int,
    ) -> DueRows:
        """Returns messages of one topic as they go to this partition of the ingress topic.

        `left_ms` of their patience is left, and their topic has taken nothing for `waited_ms`.
        """
        since_ms = now_ms + left_ms - self._of_ms(rows)
        waits_ms = np.maximum(now_ms - since_ms, waited_ms) // 2
        waits_ms = np.minimum(np.minimum(waits_ms, left_ms), self.span_ms // 2)
        dues_ms = _apart(rows, (now_ms + np.maximum(waits_ms, LEAST_WAIT_MS)).tolist())
        times_ms = iter([*zip(dues_ms, since_ms.tolist(), strict=True)])
        return rewritten(
            rows,
            np.arange(len(rows)),
            lambda message: self._sent(message, *next(times_ms), partition),
        )

    def _of_ms(self, rows: DueRows) -> int:
        (topic,) = rows.topic_names()
        return round(self.of(topic) * 1000)

    def _sent(self, message: DueMessage, due_ms: int, since_ms: int, partition: int) -> AsSent:
        first_ms = first_due_ms(message.headers, message.due_ms)
        headers = [each for each in message.headers if each[0] not in OF_DEFERRAL]
        headers += requested(message, due_ms)
        headers += ((FIRST_DUE, b"%d" % first_ms), (FIRST_DEFERRED, b"%d" % since_ms))
        state = HalfState.DEFERRED
        return AsSent(self.ingress, headers, partition, ABSENT, state, has_ttl=False)


def first_due_ms(headers: Iterable[tuple[str, bytes | None]], due_ms: int) -> int:
    """Returns when a message was due at first: before it was deferred, if it was.

    Example:
        >>> first_due_ms([], 7), first_due_ms([("dw-first-due", b"5")], 7)
        (7, 5)
    """
    return int(last_of(headers, FIRST_DUE) or due_ms)


def _apart(rows: DueRows, dues_ms: list[int]) -> list[int]:
    """Returns these dues, or later ones, so that no two messages with one id have the same."""
    next_ms = dict[tuple[bytes, int], int]()  # of a due that is taken: which one to try next
    apart_ms = []
    for id_, wanted_ms in zip(rows.records["id"].tolist(), dues_ms, strict=True):
        due_ms = wanted_ms
        while (id_, due_ms) in next_ms:
            due_ms = next_ms[id_, due_ms]
        next_ms[id_, wanted_ms] = next_ms[id_, due_ms] = due_ms + 1
        apart_ms.append(due_ms)
    return apart_ms


def partition_of(key: bytes, partitions: int) -> int:
    """Returns the partition that Kafka's clients choose for a key: murmur2, as Java's.

    Example:
        >>> [partition_of(key, 6) for key in (b"", b"a", b"order 17")]
        [3, 4, 2]
    """
    mask, m = 0xFFFF_FFFF, 0x5BD1_E995
    length = len(key)
    h = 0x9747_B28C ^ length
    whole = length - length % 4
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * m & mask
        h = h * m & mask ^ (k ^ k >> 24) * m & mask
    if whole < length:
        h = (h ^ int.from_bytes(key[whole:], "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return ((h ^ h >> 15) & 0x7FFF_FFFF) % partitions
