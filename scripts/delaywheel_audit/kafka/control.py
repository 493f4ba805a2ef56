"""What the cluster reports as done, read from its control topic before anything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import KafkaException

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.kafka.control_topic import ControlReader
from delaywheel_replica.cleaner.outside.ports import ControlNotReadInTime, ControlUnreadable
from delaywheel_replica.core.protocol.control import (
    NEEDS_KEY,
    ControlState,
    IngressPartition,
    IngressRecord,
)
from delaywheel_replica.core.protocol.progress import Position, Progress
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings

_TIMEOUT_S = 60.0
NO_TIMES: Final[Mapping[str, int]] = {}


class ControlMissingError(Exception):
    """The control topic is missing, unreadable, or has no progress."""


@dataclass(frozen=True, slots=True)
class Done:
    """Which messages were done at one moment.

    Attributes:
        due_ms: Everything due up to this time, in frames up to `seqs`, is done.
        seqs: Wheel -> seq.
        split_seqs: Wheel -> seq: frames up to here of the millisecond after `due_ms` are done; 0:
            none.
        floor: Everything in earlier seconds is done.
        closed: Closed wheel -> its last seq.
        closed_ms: Closed wheel -> when it was closed, by the brokers' clock; without wheels whose
            record has no such time.
        numbers: Node -> the greatest wheel number that it was ever given.
        ingress: Ingress partition -> how far it was settled.
    """

    due_ms: int
    seqs: Mapping[str, int]
    split_seqs: Mapping[str, int]
    floor: int
    closed: Mapping[str, int]
    numbers: Mapping[str, int]
    ingress: Mapping[IngressPartition, IngressRecord] = field(default_factory=dict)
    closed_ms: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, state: ControlState, closed_ms: Mapping[str, int] = NO_TIMES) -> Done:
        """Reads the state of the control topic.

        Args:
            state: It.
            closed_ms: When wheels were closed.

        Raises:
            ControlMissingError: It has no progress record.
        """
        progress = state.progress
        if progress is None:
            raise ControlMissingError("the control topic has no progress record: no node ever led")
        return cls(
            due_ms=progress.due_ms,
            seqs={str(wheel): seq for wheel, seq in progress.seqs.items()},
            split_seqs={str(wheel): _split(progress, wheel) for wheel in progress.seqs},
            floor=progress.floor,
            closed={
                str(wheel): record.closed_at
                for wheel, record in state.wheels.items()
                if record.closed_at is not None
            },
            numbers={node: record.last_number for node, record in state.nodes.items()},
            ingress=state.ingress,
            closed_ms=closed_ms,
        )


def _split(progress: Progress, wheel: WheelId) -> int:
    """Handles a frame split by the position, whose messages the ledger cannot distinguish."""
    position = progress.position
    if position is None:
        return 0
    if wheel == position.wheel:
        return position.seq - 1
    return progress.seq(wheel) if Position(wheel, 0, 0) < position else 0


def read_done(cluster: str, client: Mapping[str, str]) -> Done:
    """Reads the control topic to its end.

    Raises:
        ControlMissingError: See there.
    """
    settings = KafkaSettings(KafkaNames(cluster), client)
    try:
        reader = ControlReader(settings)
        try:
            state = ControlState()
            closed_ms: dict[str, int] = {}
            for record in reader.read_to_end(_TIMEOUT_S):
                state = state.apply(record.key, record.value, record.offset)
                wheel = _closed_wheel(state, record.key)
                if wheel is not None and record.appended_ms >= 0:
                    closed_ms.setdefault(wheel, record.appended_ms)
        finally:
            reader.close()
    except (ControlUnreadable, ControlNotReadInTime, KafkaException) as error:
        raise ControlMissingError(f"{settings.names.control}: {error}") from error
    return Done.of(state, closed_ms)


def _closed_wheel(state: ControlState, key: bytes) -> str | None:
    """Returns the name of the closed wheel that a record is about."""
    text = key.decode(errors="replace")
    kind, _, name = text.partition("/")
    if kind != "wheel" or text == NEEDS_KEY:
        return None
    record = state.wheels.get(WheelId.parse(name))
    return None if record is None or record.closed_at is None else name
