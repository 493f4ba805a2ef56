"""A record under way through its partition, and how it is settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from delaywheel_replica.core.ingress.moment import RequestKind
from delaywheel_replica.core.ingress.reading import (
    CommittedRecord,
    Delayed,
    HalfAnswered,
    RecordRequest,
    Unfit,
)
from delaywheel_replica.core.protocol.control import IngressRecord

_RECORD_BYTES: Final = 1_000
"""Approximate memory of a record beside its content."""
_HEADER_BYTES: Final = 100
"""The same of a header."""


class DeletedRecords(NamedTuple):
    """Kafka deleted records before they were read; announced ones among them may be held."""

    first_offset: int
    last_offset: int
    is_cut_off: bool = False
    """The partition was cut off before them."""


class RecordAnswer(Enum):
    """The server's answer to a record that was handed to it."""

    HELD = "held"
    """W members have it."""
    SEALED = "sealed"
    """Not taken: the record's second is sealed."""
    FULL = "full"
    """Not taken: the record's second is full."""
    NOT_NOW = "not now"
    """Not taken, for a reason that may pass."""
    UNKNOWN = "unknown"
    """The server may have taken it."""


class Stage(Enum):
    """How far a record has come."""

    READ = "read"
    ANNOUNCED = "announced"
    HANDED = "handed"
    HELD = "held"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class RecordUnderWay:
    """A record under way.

    Attributes:
        offset: where it lies; for deleted records, the last offset.
        record: as read; None: deleted.
        answer: the server's, once the record is refused.
        perhaps_held: a server may have the record.
    """

    offset: int
    request: RecordRequest | DeletedRecords
    record: CommittedRecord | None
    stage: Stage = Stage.READ
    answer: RecordAnswer | None = None
    perhaps_held: bool = False

    @property
    def slot(self) -> int | None:
        """Returns the slot that it goes to; None if it goes to none."""
        if isinstance(self.request, Unfit | DeletedRecords | HalfAnswered):
            return None
        return self.request.due_ms // 1000

    @property
    def held_bytes(self) -> int:
        """Returns its approximate memory."""
        if self.record is None:
            return 0
        headers_bytes = _HEADER_BYTES * len(self.record.headers or ())
        return _RECORD_BYTES + headers_bytes + self.record.length_bytes


class Forwarded(NamedTuple):
    """Settled: the message is forwarded in the transaction."""

    taken: RecordUnderWay
    message: Delayed


class Rejected(NamedTuple):
    """Settled: the transaction carries its dead letter."""

    taken: RecordUnderWay
    unfit: Unfit


class Deleted(NamedTuple):
    """Settled: Kafka deleted the records before they were read, which the transaction reports."""

    taken: RecordUnderWay
    deleted: DeletedRecords


class GroupAnswered(NamedTuple):
    """Settled: the transaction carries the outcome that says what a group has answered."""

    taken: RecordUnderWay
    answered: HalfAnswered


SettledRecord: TypeAlias = Forwarded | Rejected | Deleted | GroupAnswered


@dataclass(frozen=True, slots=True)
class IntakeStep:
    """What the next transaction carries for one partition.

    Attributes:
        record: the control record that it writes.
        settled: settled records that the transaction carries, in order; held ones need nothing.
        passed: how many records under way it settles, from the first.
        length_bytes: total length of the records that it carries.
        taken_back: records whose announcement it withdraws.
        most: what remains of the moment's `most`.
    """

    record: IngressRecord
    settled: tuple[SettledRecord, ...] = ()
    passed: int = 0
    announced: tuple[RecordUnderWay, ...] = ()
    length_bytes: int = 0
    taken_back: tuple[RecordUnderWay, ...] = ()
    most: Mapping[RequestKind, int] = field(default_factory=dict)
