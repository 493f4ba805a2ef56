"""The kinds of findings: their meanings, and what to do about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding, for people.

    Attributes:
        means: What the finding means.
        then: What to do.
        is_error: Whether the books do not balance with it: exit code 1.
        is_of_ends: Whether only `--ends` looks for it.
    """

    means: str
    then: str
    is_error: bool
    is_of_ends: bool = False


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "missing": Kind(
            "Accepted, due and done, but neither in its topic nor among the outcomes.",
            "Look first whether the topic's retention or a deletion took it. If not, "
            "a promise was broken: keep data folders, ledger and topics, and send it again.",
            is_error=True,
        ),
        "not_returned": Kind(
            "Deferred, or a half committed with a delay: it went to the ingress topic, its new due "
            "is past, and it was neither accepted from there nor lies there unread.",
            "See whether the ingress topic was deleted, or a partition of it lost its end. `wheel` "
            "and `seq` name the acceptance that ended: the message must be sent again.",
            is_error=True,
        ),
        "overdue": Kind(
            "Accepted and not delivered, by more than `--late-tolerance` after its due when this "
            "began: it is pending, and should not be.",
            "Look whether a node leads and Kafka takes its messages (`delaywheel status`). It is "
            "delivered once they do; then reconcile again.",
            is_error=True,
        ),
        "not_verifiable": Kind(
            "Accepted, due and done, and Kafka has deleted records of that time, or compacts the "
            "topic: whether it was in its topic or among the outcomes is unknown.",
            "Nothing is known to be wrong, and nothing is proven. Reconcile sooner, or have the "
            "topics, the outcomes topic above all, keep their records for longer.",
            is_error=True,
        ),
        "duplicated": Kind(
            "More than once in Kafka, by id and due: `detail` names the first copy, `partition` "
            "and `offset` the last.",
            "See which programs may write to the topic. Consumers must drop one of the copies.",
            is_error=True,
        ),
        "early": Kind(
            "Visible before its due, by the forwarding node's clock.",
            "Compare the clocks of nodes and brokers; where the topic stamps with the broker's "
            "time, only a difference beyond `--clock-tolerance` is reported.",
            is_error=True,
        ),
        "lost": Kind(
            "In a frame that no member could read any more; the cluster has said so itself. "
            "Without an id: the ledger has no row of these frames.",
            "`wheel` and `seq` name the frame, `detail` the reason. The message must be sent "
            "again by its sender.",
            is_error=True,
        ),
        "changed": Kind(
            "In Kafka, but not as it was accepted: another due, topic, time of acceptance or "
            "wheel, or headers that cannot be read. `detail` says what.",
            "See which program wrote it, or changed it on its way: usually mirroring tools and "
            "transforming proxies.",
            is_error=True,
        ),
        "unexpected": Kind(
            "In Kafka with headers of ours, and never accepted.",
            "Another program wrote it: forged, or copied from another cluster or topic with its "
            "headers. Give the topic's write right to the service alone.",
            is_error=True,
        ),
        "ledger_gap": Kind(
            "A part of the ledger is not there. Messages are not lost by it, but what was "
            "accepted there cannot be proven.",
            "Bring the file back from a backup and run again. Where the ledger was given up for "
            "want of disk (`detail` says so), nothing can be done: give its place more room.",
            is_error=True,
        ),
        "lost_before": Kind(
            "Programs were answered that more messages were accepted than the ledger has: a minute "
            "of dues in a topic a row.",
            "A promise was broken, or a program sends through another cluster than it counts for. "
            "Its trace names the messages: those without `accepted`.",
            is_error=True,
            is_of_ends=True,
        ),
        "lost_after": Kind(
            "A consumer group has passed records and has not consumed them: `detail` has its name, "
            "and how many.",
            "Were its offsets set forward, or does a member of it consume without a trace? "
            "The index of the trace names those that were consumed.",
            is_error=True,
            is_of_ends=True,
        ),
        "consumed_twice": Kind(
            "A consumer group has consumed more than Kafka has: some records again, after it had "
            "committed that they are done.",
            "Were its offsets set back, or is the topic also read under another of its names?",
            is_error=True,
            is_of_ends=True,
        ),
        "ids_differ": Kind(
            "As many messages on both sides, and not the same ones: as many are lacking as there "
            "are too many.",
            "As for `lost_before` and `lost_after`: `detail` says whose count it is.",
            is_error=True,
            is_of_ends=True,
        ),
        "late": Kind(
            "Forwarded later than its due by more than `--late-tolerance`.",
            "Compare with failovers, outages of Kafka and the rate at that time.",
            is_error=False,
        ),
        "dead_letter": Kind(
            "Not forwarded, since Kafka would not take it: `detail` says why, `partition` and "
            "`offset` where it lies in the dead-letter topic.",
            "Mend what the reason names, and send it again from there; docs/OPERATIONS.md has a "
            "line for each reason.",
            is_error=False,
        ),
        "content_differs": Kind(
            "A second message with the id and due of another was dropped as its duplicate, "
            "though key, value or headers differ.",
            "A caller gives one id to different messages: have it make a new id for each.",
            is_error=False,
        ),
        "reporter_ended": Kind(
            "A program was killed: what it counted in its last ten seconds may be missing, and is "
            "no loss of messages.",
            "Nothing, if that is known.",
            is_error=False,
            is_of_ends=True,
        ),
        "clock_differs": Kind(
            "The clock of a program differs from the brokers': so much are its dues by delay off.",
            "Set the clock of that machine.",
            is_error=False,
            is_of_ends=True,
        ),
    }
)
"""Kinds by name, in the order of display."""


def is_error(kind: str) -> bool:
    """Whether the books do not balance because of it; unknown kinds count as errors."""
    return kind not in KINDS or KINDS[kind].is_error
