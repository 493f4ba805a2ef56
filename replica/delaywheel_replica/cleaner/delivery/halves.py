"""What is sent of half messages, whose fates the step has decided (core/leader/halves.py).

| a half that the step takes | is sent | its outcome |
|---|---|---|
| and forwards, its message is due | to its topic; with `dw-committed`, if a release let it go | - |
| and forwards, its message is due later | to the ingress topic, with its own due | `committed` |
| and asks about | to the halves topic, as a letter to its group | `asked` |

The first two are messages like any other from here on: what their topic does not take becomes a
dead letter, which can be sent again. A letter is a record of our own, as an outcome is: the
transaction waits until Kafka takes it. But where the halves topic cannot be used, what waits would
hold up every other message. So a leader that knows of that (kafka/brokers.py) does without it:

| the halves topic, at the last check | a begin is | commit, rollback | nobody committed it |
|---|---|---|---|
| is as it should be | accepted | counts | asked about |
| is missing; Kafka does not let it be made | refused | counts | a dead letter |
| may not be described, nor its settings, or written to | refused | counts | a dead letter |
| is compacted, or takes too little | refused | counts | a dead letter |

Begins are refused by all nodes once they have heard of it, and records that begin halves become
dead letters. The dead letter holds the letter whole: it decides nothing, and when it is replayed,
the letter goes to the halves topic, and the group is asked. Between a topic that is taken away and
the check, which a failed transaction brings about, the transaction waits, and all messages with it.

None of them has the headers that make a half, or it would be one again; the letter, which no
ingress topic takes, says in such headers what it is about (docs/PROTOCOL.md). A time to live does
not end a message that is due later: it is marked as having none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from delaywheel.record_headers import COMMITTED
from delaywheel_replica.cleaner.delivery.dead_letters import Condemned
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason
from delaywheel_replica.cleaner.due.rows import ABSENT, DueMessage, DueRows, HalfState, Records
from delaywheel_replica.cleaner.due.steps import Step
from delaywheel_replica.cleaner.ingress.half_letters import letter_headers, split_headers
from delaywheel_replica.cleaner.ingress.rewriting import AsSent, requested, rewritten
from delaywheel_replica.kafka_settings import KafkaNames

_LONGEST_MS = 86_400_000
"""Holds are of seconds: more is the doing of a clock."""


def messages_of(step: Step, now_ms: int, names: KafkaNames) -> DueRows:
    """Returns the messages that a step sends, with its halves as they are sent.

    What is due later than `now_ms`, the leader's clock, goes to the ingress topic.
    """
    rows = step.messages
    halves = np.flatnonzero(rows.records["half"])
    if len(halves):
        early_ms = iter(_early_ms(rows.records.take(halves), now_ms).tolist())
        rows = rewritten(rows, halves, lambda half: _committed(half, next(early_ms), now_ms, names))
    return rows


def _early_ms(halves: Records, now_ms: int) -> NDArray[np.int64]:
    """How long before its due each half was committed, if a release lets it go; else 0.

    A release has the time of the node that wrote it. If that is still to come by the leader's
    clock, which the record's timestamp is of, it counts as now: nothing arrives before its commit.
    """
    until_due_ms = halves["due_ms"] - now_ms
    early: NDArray[np.int64] = np.maximum(halves["early_ms"], until_due_ms)
    return np.where(halves["released"] > 0, early.clip(max=_LONGEST_MS), 0)


def letters_of(step: Step, names: KafkaNames) -> DueRows:
    """Returns the letters about the halves of a step that nobody committed."""
    asked = step.dropped.asked
    return rewritten(asked, np.arange(len(asked)), lambda half: _letter(half, names))


def unasked(letters: DueRows, objection: str) -> list[Condemned]:
    """Returns letters that nobody can be asked with, as dead letters."""
    return [Condemned(each, DeadReason.HALVES_UNAVAILABLE, objection) for each in letters]


def _committed(half: DueMessage, early_ms: int, now_ms: int, names: KafkaNames) -> AsSent:
    own, _, deliver_at_ms = split_headers(half.headers)
    if deliver_at_ms is None or deliver_at_ms <= now_ms:
        if early_ms:
            own.append((COMMITTED, b"%d" % (half.due_ms - early_ms)))
        return AsSent(
            half.topic,
            own,
            half.partition,
            half.timestamp_ms,
            HalfState.NONE,
            has_ttl=True,
            early_ms=early_ms,
        )
    own += requested(half, deliver_at_ms)
    return AsSent(names.ingress, own, ABSENT, ABSENT, HalfState.PASSED_ON, has_ttl=False)


def _letter(half: DueMessage, names: KafkaNames) -> AsSent:
    headers = letter_headers(
        half.headers, half.topic, half.due_ms, half.partition, half.timestamp_ms
    )
    return AsSent(names.halves, headers, ABSENT, ABSENT, HalfState.NONE, has_ttl=False)
