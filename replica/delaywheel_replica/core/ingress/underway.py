"""A record under way through its partition, and how it is settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from delaywheel_replica.core.ingress.moment import Kind
from delaywheel_replica.core.ingress.reading import Delayed, Incoming, Unfit, Wish
from delaywheel_replica.core.protocol.control import IngressRecord

_RECORD_BYTES: Final = 1_000
"""What a record takes in memory beside its content, about."""


class Deleted(NamedTuple):
    """Kafka deleted records before they were read; announced ones among them may be held."""

    first_offset: int
    last_offset: int
    is_cut_off: bool = False
    """They lay behind the end of a partition that lost its end."""


class Answer(Enum):
    """The server's answer about a record that it was handed."""

    HELD = "held"
    """W members have it."""
    SEALED = "sealed"
    """It did not take it: its second is sealed."""
    FULL = "full"
    """It did not take it: its second holds as much as it can."""
    NOT_NOW = "not now"
    """It did not take it."""
    UNKNOWN = "unknown"
    """It may have taken it."""


class Stage(Enum):
    """How far a record has come."""

    READ = "read"
    ANNOUNCED = "announced"
    HANDED = "handed"
    HELD = "held"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class Taken:
    """A record under way.

    Attributes:
        offset: where it lies; of deleted ones the last.
        wish: what it asks for.
        record: as it was read; None: deleted.
        stage: how far it has come.
        answer: of the server, once it is refused.
        perhaps_held: a server may have it.
    """

    offset: int
    wish: Wish | Deleted
    record: Incoming | None
    stage: Stage = Stage.READ
    answer: Answer | None = None
    perhaps_held: bool = False

    @property
    def slot(self) -> int | None:
        """Returns the slot of its due; None if it has no due."""
        return None if isinstance(self.wish, Unfit | Deleted) else self.wish.due_ms // 1000

    @property
    def held_bytes(self) -> int:
        """Returns about how much memory it takes."""
        return 0 if self.record is None else _RECORD_BYTES + self.record.length_bytes


class Goes(NamedTuple):
    """Settled: the message is forwarded in the transaction."""

    taken: Taken
    message: Delayed


class Dies(NamedTuple):
    """Settled: the transaction has a dead letter for it."""

    taken: Taken
    unfit: Unfit


class Gone(NamedTuple):
    """Settled: its records were deleted before they were read, which the transaction reports."""

    taken: Taken
    deleted: Deleted


Settled: TypeAlias = Goes | Dies | Gone


@dataclass(frozen=True, slots=True)
class IntakeStep:
    """What the next transaction carries for one partition.

    Attributes:
        record: what it leaves in the control topic.
        settled: what goes with it, in order; what is held has nothing to go with it.
        passed: so many of the first are settled by it.
        announced: those that it announces.
        length_bytes: of the records that go with it.
        taken_back: those that it announces no more.
        most: what is left of the moment's.
    """

    record: IngressRecord
    settled: tuple[Settled, ...] = ()
    passed: int = 0
    announced: tuple[Taken, ...] = ()
    length_bytes: int = 0
    taken_back: tuple[Taken, ...] = ()
    most: Mapping[Kind, int] = field(default_factory=dict)
