"""The result of a reconciliation in one small document: `summary.json` beside the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, TypeAlias

from delaywheel_audit.matching.findings import is_error

By: TypeAlias = Literal["due", "accepted"]

FATES = (
    "forwarded",
    "cancelled",
    "committed",
    "asked",
    "deferred",
    "duplicates_dropped",
    "dead",
    "lost",
    "pending",
    "not_verifiable",
    "missing",
)
"""What becomes of an accepted message: together they are `accepted`."""

ANSWERS = ("asked_committed", "asked_rolled_back", "asked_undecided", "asked_open")
"""What groups have answered about the `asked` ones: together they are `asked`."""

COUNTS = ("accepted", "acknowledged", *FATES, *ANSWERS, "duplicated", "unexpected", "early", "late")
"""The counting columns of the table `buckets`, in its order."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One reconciliation.

    Attributes:
        cluster: Whose books they are.
        from_ms: The range of `by`, from here on; None: from the first message there is.
        to_ms: Not included; None: to the last.
        by: Which time of a message the range and the buckets go by.
        interval_ms: The length of a bucket.
        late_tolerance_ms: Messages later than this are reported as late.
        topics: What was asked for; none: every topic of the ledger.
        made_at_ms: When the job began.
        progress_ms: Up to which due everything was done when it began.
        kafka_ends: Topic -> partition -> offset: how far Kafka was read.
        counts: `COUNTS` -> of the whole range; `unpublished` and `unbooked` beside them.
        lateness: p50, p99, max of all that was forwarded, in milliseconds.
        findings: Kind -> how many.
        ledger_gaps: Where the ledger has holes: wheel, first_seq, last_seq, how it is known.
        balanced: Whether nothing was found that makes the exit code 1.
        seconds: How long it took.
        command: How it was called.
        notes: What a reader of the figures should know, in words.
        ends: What programs counted in the range, and how many minutes are in which state; None: it
            was not asked for.
        final: Whether nothing more can be accepted or published for the range: asked again, the
            books would say the same. Balanced books that are not final are balanced so far.
    """

    cluster: str
    from_ms: int | None
    to_ms: int | None
    by: By
    interval_ms: int
    late_tolerance_ms: int
    topics: Sequence[str]
    made_at_ms: int
    progress_ms: int
    kafka_ends: Mapping[str, Mapping[int, int]]
    counts: Mapping[str, int]
    lateness: Mapping[str, int | None]
    findings: Mapping[str, int]
    ledger_gaps: Sequence[Mapping[str, Any]]
    balanced: bool
    seconds: float
    command: str
    notes: Sequence[str] = field(default=())
    final: bool = True
    ends: Mapping[str, int] | None = None

    @property
    def is_unproven(self) -> bool:
        """Whether nothing is known to be wrong, but the proof was deleted from Kafka."""
        wrong = {kind for kind, number in self.findings.items() if number and is_error(kind)}
        return wrong == {"not_verifiable"}

    def to_json(self) -> str:
        """Returns a JSON document for programs and people."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote."""
        values = json.loads(text)
        values["kafka_ends"] = {
            topic: {int(partition): end for partition, end in ends.items()}
            for topic, ends in values["kafka_ends"].items()
        }
        return cls(**values)
