"""Progress: the one record that says what is done.

``(w, p, V, floor)``: every message in frames <= V[wheel] with due <= w is done, and of
millisecond w + 1 those up to position p, in the order of positions. It is committed last in
every transaction, which holds exactly the messages between the old state and the new one: so
what is visible in Kafka and what is recorded as done are one thing.

Invariants, all in `violations`: nothing ever goes back; V rests while one millisecond is being
split; a wheel leaves V only when it is unregistered.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from delaywheel.identity import WheelId
from delaywheel_replica.core.fields import Fields, MalformedError, parse_wheel


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """The place of one message; messages of one millisecond are taken in this order."""

    wheel: WheelId
    seq: int
    row: int

    def __str__(self) -> str:
        return f"{self.wheel}/{self.seq}/{self.row}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``<wheel>/<seq>/<row>``.

        Raises:
            MalformedError: it is none.
        """
        match text.split("/"):
            case [wheel, seq, row] if seq.isdecimal() and row.isdecimal():
                return cls(parse_wheel(wheel), int(seq), int(row))
        raise MalformedError(f"{text!r} is not <wheel>/<seq>/<row>")


@dataclass(frozen=True, slots=True)
class Progress:
    """What is done.

    Attributes:
        due_ms: w. Due milliseconds up to here are done, as far as `seqs` go.
        position: p. Within millisecond w + 1, done up to and with this message; None: none.
        seqs: V. Frames up to this seq are taken account of; a wheel not named: 0.
        floor: every slot below is done and may be deleted.
    """

    due_ms: int
    position: Position | None
    seqs: Mapping[WheelId, int] = field(default_factory=dict)
    floor: int = 0

    def seq(self, wheel: WheelId) -> int:
        """V of one wheel."""
        return self.seqs.get(wheel, 0)

    def covers(self, due_ms: int, position: Position) -> bool:
        """Whether the message at this place, due then, is done."""
        if position.seq > self.seq(position.wheel):
            return False
        if due_ms <= self.due_ms:
            return True
        return due_ms == self.due_ms + 1 and self.position is not None and position <= self.position

    def without(self, wheels: Collection[WheelId]) -> "Progress":
        """The same, when these wheels are unregistered."""
        if not wheels:
            return self
        return replace(self, seqs={w: seq for w, seq in self.seqs.items() if w not in wheels})

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "due_ms": self.due_ms,
            "position": None if self.position is None else str(self.position),
            "seqs": {str(wheel): seq for wheel, seq in self.seqs.items()},
            "floor": self.floor,
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            MalformedError: it is something else.
        """
        fields = document if isinstance(document, Fields) else Fields(document)
        position = fields.optional_text("position")
        seqs = fields.object("seqs")
        return cls(
            due_ms=fields.integer("due_ms"),
            position=None if position is None else Position.parse(position),
            seqs={parse_wheel(name): seqs.integer(name, at_least=0) for name in seqs.names()},
            floor=fields.integer("floor"),
        )


def first_progress(now_ms: int, late_window_s: int) -> Progress:
    """What the first leader of an empty cluster commits."""
    return Progress(due_ms=now_ms, position=None, seqs={}, floor=time_floor(now_ms, late_window_s))


def time_floor(due_ms: int, late_window_s: int) -> int:
    """The floor that w alone would allow: slots whose late window w has passed are below it."""
    return due_ms // 1000 - late_window_s


def violations(before: Progress, after: Progress, leaving: Collection[WheelId] = ()) -> list[str]:
    """Why `after` may not be committed over `before`; empty: it may.

    Args:
        before: the committed progress.
        after: what a transaction would commit.
        leaving: the wheels that the same transaction unregisters.
    """
    found = []
    if after.due_ms < before.due_ms:
        found.append(f"due goes back from {before.due_ms} to {after.due_ms}")
    if after.due_ms == before.due_ms and before.position is not None:
        found += _violations_of_a_split(before, before.position, after, leaving)
    if after.floor < before.floor:
        found.append(f"floor goes back from {before.floor} to {after.floor}")
    for wheel, seq in before.seqs.items():
        if wheel not in after.seqs and wheel in leaving:
            continue
        if after.seq(wheel) < seq:
            found.append(f"seq of {wheel} goes back from {seq} to {after.seq(wheel)}")
    found += [f"{wheel} leaves but is named" for wheel in leaving if wheel in after.seqs]
    return found


def _violations_of_a_split(
    before: Progress, position: Position, after: Progress, leaving: Collection[WheelId]
) -> list[str]:
    """What must hold from one transaction to the next within one millisecond."""
    found = []
    if after.position is None or after.position < position:
        found.append(f"position goes back from {position} to {after.position}")
    if dict(after.seqs) != dict(before.without(leaving).seqs):
        found.append("seqs move while one millisecond is being split")
    return found
