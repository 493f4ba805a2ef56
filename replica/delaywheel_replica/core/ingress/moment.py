"""When, and within which limits, a step of a partition is planned."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from delaywheel_replica.core.ingress.reading import Delayed, Withdrawn

Kind: TypeAlias = type[Delayed] | type[Withdrawn]
"""Of what is handed over: a server may take cancels, and no messages."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The time and limits at which a step is planned.

    Attributes:
        now_ms: the leader's wall clock.
        least_slot: what is for an earlier second is not handed over; None: nothing is, for the node
            takes nothing now. Well above the seal of its wheel.
        span_end_ms: no due may be later.
        floor: the committed one: no wheel takes anything below.
        blocked: topics that no message can go to now, though others can.
        most: of a kind that the server takes none of now: how many of it may wait for it announced.
    """

    now_ms: int
    least_slot: int | None
    span_end_ms: int
    floor: int
    blocked: AbstractSet[str] = frozenset()
    most: Mapping[Kind, int] = field(default_factory=dict)


class Room(NamedTuple):
    """How much may go with a transaction; of a record that is larger, it alone."""

    messages: int
    length_bytes: int = 1 << 62
