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
class Facts:
    """What was known of the cluster and its ledger before Kafka was read.

    Attributes:
        done: What the cluster said was done, before the ledger was listed.
        began_ms: When that was.
        extents: Wheel -> what its files cover, the whole ledger over.
        holes: What its files are missing, over the whole ledger.
    """

    done: Done
    began_ms: int
    extents: Mapping[str, Extent] = field(default_factory=dict)
    holes: Sequence[Hole] = ()

    def has_all_of(self, from_ms: int, to_ms: int) -> bool:
        """Whether the ledger covers all acceptances of this time, apart from holes.

        It reaches from before it to behind it, or from the first seq of a wheel to its last.
        """
        done = self.done
        wanted = {**done.seqs, **done.closed}
        for wheel in {*wanted, *self.extents}:
            extent = self.extents.get(wheel)
            if extent is None:
                if wanted[wheel]:
                    return False
                continue
            if from_ms < extent.from_ms and extent.first_seq > 1:
                return False
            if to_ms > extent.to_ms and extent.last_seq < wanted.get(wheel, 0):
                return False
        return True
