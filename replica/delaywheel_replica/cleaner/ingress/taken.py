"""The ingress part of a leader's transaction, and how it is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from delaywheel_replica.cleaner.due.rows import DueRows
from delaywheel_replica.cleaner.ingress.direct import direct_rows
from delaywheel_replica.core.ingress.term import IngressTerm, TermStep
from delaywheel_replica.core.ingress.underway import Deleted, Forwarded, GroupAnswered, Rejected
from delaywheel_replica.core.protocol.control import IngressPartition
from delaywheel_replica.process.logs import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """The ingress part of a transaction.

    Attributes:
        step: How far it moves each partition.
        rows: Messages that are forwarded directly.
        letters: Letters about halves whose hold is over; no dead letter takes their place.
        is_urgent: Commit now, without waiting for another reason.
        is_full: There was no room for more.
    """

    step: TermStep
    rows: DueRows
    letters: DueRows
    is_urgent: bool = False
    is_full: bool = False

    @property
    def unfit(self) -> Counter[str]:
        """Returns the reasons of its dead letters, with counts."""
        dead = (each for each in self.step.settled if isinstance(each, Rejected))
        return Counter(each.unfit.reason.value for each in dead)


NOTHING: Final = Taken(TermStep(), direct_rows([], 0), direct_rows([], 0))


def counted_of(term: IngressTerm, step: TermStep) -> Counter[str]:
    """Counts what a transaction settles and announces; call it before `IngressTerm.committed`."""
    counted: Counter[str] = Counter()
    offsets = term.offsets
    for at, each in step.steps.items():
        counted["ingress_settled"] += each.record.next_offset - offsets[at]
        counted["ingress_held"] += each.passed - len(each.settled)
        counted["ingress_announced"] += len(each.announced)
    for settled in step.settled:
        match settled:
            case Forwarded():
                counted["ingress_forwarded"] += 1
            case Rejected():
                counted["ingress_dead_letters"] += 1
                counted["dead_lettered"] += 1
            case GroupAnswered():
                counted[f"halves_answered_{settled.answered.answer.name.lower()}"] += 1
            case Deleted():
                first, last, is_cut_off = settled.deleted
                counter = "ingress_cut_off" if is_cut_off else "ingress_deleted"
                counted[counter] += last - first + 1
    return counted


def log_losses(step: TermStep) -> None:
    """Logs records that are lost, or may be."""
    for at, each in step.steps.items():
        for settled in each.settled:
            if isinstance(settled, Deleted):
                first, last, is_cut_off = settled.deleted
                log.warning(
                    "announced ingress records are lost with the end of their partition"
                    if is_cut_off
                    else "ingress records were deleted before they were read",
                    at=name_of(at),
                    first_offset=first,
                    last_offset=last,
                )
    for at, record in step.abandoned.items():
        if record.announced:
            log.warning(
                "an ingress topic was recreated: what it had announced was accepted, or is lost",
                at=name_of(at),
                offsets=record.announced.to_json(),
            )


def name_of(at: IngressPartition) -> str:
    """Returns a partition as text."""
    topic, partition = at
    return f"{topic}/{partition}"


def name_and_more(partitions: Sequence[IngressPartition]) -> str:
    """Returns the first of these partitions, and how many there are besides, for a sentence."""
    more = f" and {len(partitions) - 1} more" if partitions[1:] else ""
    return f"{name_of(partitions[0])}{more}"
