"""The parameters of a reconciliation, and what it knows besides the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from delaywheel_audit.kafka.control import Done
from delaywheel_audit.matching.summary import By
from delaywheel_audit.sources.ledger_files import END_MS, Extent, Hole


@dataclass(frozen=True, slots=True)
class Terms:
    """What is examined, and how strictly.

    Attributes:
        by: The time of a message that range and buckets go by.
        from_ms: From here on; None: from the first.
        to_ms: Not included; None: to the last.
        topics: None named: all of the ledger.
        interval_ms: The length of a bucket.
        late_tolerance_ms: Messages later than this after their due are reported.
        clock_tolerance_ms: By how much the clocks of brokers and nodes may differ. Counts for
            topics that stamp with the broker's time, and for what was forwarded at the moment of
            the progress record.
        span_ms: How long before its due a message is accepted at most; None: not known.
        late_window_ms: How long after its due at most. Both are of now: what was accepted under
            others is found by `reaching_all`.
    """

    by: By = "due"
    from_ms: int | None = None
    to_ms: int | None = None
    topics: tuple[str, ...] = ()
    interval_ms: int = 60_000
    late_tolerance_ms: int = 1_000
    clock_tolerance_ms: int = 1_000
    span_ms: int | None = None
    late_window_ms: int = 86_400_000

    @property
    def start_ms(self) -> int:
        """Returns `from_ms` as a number."""
        return 0 if self.from_ms is None else self.from_ms

    @property
    def end_ms(self) -> int:
        """Returns `to_ms` as a number."""
        return END_MS if self.to_ms is None else self.to_ms

    def accepted_range(self) -> tuple[int, int]:
        """Returns the range of acceptance times of the requested messages; the end is exclusive."""
        if self.by == "accepted":
            return self.start_ms, self.end_ms
        from_ms = 0 if self.span_ms is None else self.start_ms - self.span_ms
        # By its node's clock: a little more on both sides.
        slack = self.late_window_ms + self.clock_tolerance_ms
        return max(0, from_ms - self.clock_tolerance_ms), min(END_MS, self.end_ms + slack)

    def reaching_all(self) -> Terms:
        """Returns the same terms without a range of acceptance times.

        For those that are asked for by due: the settings of now may allow less than those did
        under which they were accepted.
        """
        return replace(self, span_ms=None, late_window_ms=END_MS)


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Seqs of a wheel before its first file in the ledger, or after its last.

    Attributes:
        hole: They, with the time in which they were accepted.
        is_before_first: Where they are.
        is_awaited: They may be published yet. Otherwise nothing will publish them.
    """

    hole: Hole
    is_before_first: bool
    is_awaited: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What was known of the cluster and its ledger before Kafka was read.

    Attributes:
        done: What the cluster said was done, before the ledger was listed.
        began_ms: When that was.
        extents: Wheel -> what its files cover, the whole ledger over.
        holes: What its files are missing, over the whole ledger.
        seal_ms: How often nodes publish.
    """

    done: Done
    began_ms: int
    extents: Mapping[str, Extent] = field(default_factory=dict)
    holes: Sequence[Hole] = ()
    seal_ms: int = 60_000

    def has_all_of(self, from_ms: int, to_ms: int) -> bool:
        """Whether the ledger covers all acceptances of this time, apart from holes."""
        return not self.uncovered(from_ms, to_ms)

    def uncovered(self, from_ms: int, to_ms: int) -> list[Uncovered]:
        """Returns the seqs that no file has, and that may have been accepted in this time.

        | the seqs of a wheel | were accepted | and are |
        |---|---|---|
        | before its first file | before the first row of it | deleted by retention, or lost |
        | after its last file, of a closed wheel | before it was closed | as `_is_awaited` says |
        | after its last file, of another wheel | until now | awaited |

        The last seq of a wheel that is not closed is the last that was done.
        """
        wanted = {**self.done.seqs, **self.done.closed}
        found = []
        for wheel in sorted({*wanted, *self.extents}):
            extent = self.extents.get(wheel)
            if extent is not None and extent.first_seq > 1 and from_ms < extent.from_ms:
                hole = Hole(wheel, 1, extent.first_seq - 1, 0, extent.from_ms, _BEFORE_FIRST)
                found.append(Uncovered(hole, is_before_first=True, is_awaited=False))
            last_seq, last_ms = (0, 0) if extent is None else (extent.last_seq, extent.to_ms)
            end = wanted.get(wheel, 0)
            closed_ms = self.done.closed_ms.get(wheel, self.began_ms)
            if end > last_seq and to_ms > last_ms and from_ms <= closed_ms:
                hole = Hole(wheel, last_seq + 1, end, last_ms, closed_ms, _BEHIND_LAST)
                awaited = self._is_awaited(wheel)
                found.append(Uncovered(hole, is_before_first=False, is_awaited=awaited))
        return found

    def _is_awaited(self, wheel: str) -> bool:
        """Whether the rest of a wheel may be published yet.

        A closed wheel is published to its end, by another node if its own is lost.
        """
        closed_ms = self.done.closed_ms.get(wheel)
        return closed_ms is None or self.began_ms < closed_ms + self.seal_ms + _PUBLISHED_MS


_BEFORE_FIRST = "the wheel's first files are not there: deleted by retention, or lost"
_BEHIND_LAST = "the wheel was closed with these seqs, and no file has them"
_PUBLISHED_MS = 600_000
"""A closed wheel is published this much later at most, beside `seal_ms`, if its place answers."""
