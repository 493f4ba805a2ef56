"""The time and the limits for which a partition's next step is planned."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from delaywheel_replica.core.ingress.reading import Delayed, HalfCommit, Withdrawn

RequestKind: TypeAlias = type[Delayed] | type[Withdrawn]
"""The kind of a handed-over record: a server may accept cancels while it accepts no messages."""


def request_kind(request: object) -> RequestKind:
    """Returns the kind of a record, by its request; a commit counts as a cancel: both are rows."""
    return Withdrawn if isinstance(request, Withdrawn | HalfCommit) else Delayed


@dataclass(frozen=True, slots=True)
class Moment:
    """The time and limits at which a step is planned.

    Attributes:
        now_ms: the leader's wall clock.
        least_slot: records due before this slot are not handed over; well above the seal of the
            node's wheel. None: the node accepts nothing now, so no record is handed over.
        span_end_ms: the latest due that is accepted.
        floor: the committed floor: no wheel accepts anything below it.
        blocked: topics that cannot be forwarded to now, though others can.
        most: for each kind that the server does not accept now: how many records of this kind may
            wait announced.
        takes_halves: every leader from now on knows half messages; else they wait, and commits.
        halves_objection: why no group can be asked about a half; None: it can.
    """

    now_ms: int
    least_slot: int | None
    span_end_ms: int
    floor: int
    blocked: AbstractSet[str] = frozenset()
    most: Mapping[RequestKind, int] = field(default_factory=dict)
    takes_halves: bool = True
    halves_objection: str | None = None


class TransactionRoom(NamedTuple):
    """How much a transaction may carry; a larger record goes alone."""

    messages: int
    length_bytes: int = 1 << 62
