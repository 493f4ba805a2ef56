"""Progress: the one record of which messages are done.

``(w, p, V, floor)``: every message in frames <= V[wheel] with due <= w is done, and of millisecond
w + 1 those up to position p, in the order of positions. It is written last in every transaction,
which holds exactly the messages between the old state and the new one: so what is visible in Kafka
and what is recorded as done never differ.

A leader whose clock was ahead leaves w in the future. An operator may set it back
(`Progress.set_back`); what was done then stays done as another (w, p, V), *done ahead*, until w has
passed it. Nothing else ever decreases; docs/PROTOCOL.md, "Progress", has all that must not follow.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Self

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.codec import MalformedError, Natural, parse_wheel

MOST_AHEAD: Final = 4
"""How often w may be set back before it has passed what was done ahead: it bounds the record."""


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """The place of one message; messages of one millisecond are taken in this order."""

    wheel: WheelId
    seq: Natural
    row: Natural

    def __str__(self) -> str:
        return f"{self.wheel}/{self.seq}/{self.row}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``<wheel>/<seq>/<row>``, or raises MalformedError."""
        match text.split("/"):
            case [wheel, seq, row] if seq.isdecimal() and row.isdecimal():
                return cls(parse_wheel(wheel), int(seq), int(row))
        raise MalformedError(f"{text!r} is not <wheel>/<seq>/<row>")


@dataclass(frozen=True, slots=True)
class Reached:
    """How far progress has come; identifies one progress record within a cluster.

    `set_backs` counts how often w was set back, `due_ms` is w, `position` p.
    """

    set_backs: Natural
    due_ms: Natural
    position: Position | None

    def __str__(self) -> str:
        split = "" if self.position is None else f" and {self.position}"
        back = f", set back {self.set_backs} times" if self.set_backs else ""
        return f"{self.due_ms}{split}{back}"

    @property
    def order(self) -> tuple[int, int, tuple[Position, ...]]:
        """Grows with everything that is done; w alone does not, since it can be set back."""
        return self.set_backs, self.due_ms, () if self.position is None else (self.position,)


@dataclass(frozen=True, slots=True)
class Done:
    """A set of messages that are done.

    Attributes:
        due_ms: `w`. Due milliseconds up to here are done, as far as `seqs` go.
        position: `p`. Within millisecond w + 1, done up to and including this message; None: none.
        seqs: `V`. Frames up to this seq are accounted for; a wheel not named: 0.
    """

    due_ms: int
    position: Position | None
    seqs: Mapping[WheelId, Natural] = field(default_factory=dict)

    @property
    def last_due_ms(self) -> int:
        """The latest due of any message that is done."""
        return self.due_ms + (self.position is not None)

    def seq(self, wheel: WheelId) -> int:
        """Returns V of one wheel: the seq up to which it is done."""
        return self.seqs.get(wheel, 0)

    def counts(self, rows: Iterable[Position]) -> bool:
        """Whether one of these rows, which name messages, is accounted for."""
        return any(row.seq <= self.seq(row.wheel) for row in rows)

    def includes(self, due_ms: int, position: Position) -> bool:
        """Whether the message at this place, with this due, is done."""
        if position.seq > self.seq(position.wheel):
            return False
        if due_ms <= self.due_ms:
            return True
        return due_ms == self.due_ms + 1 and self.position is not None and position <= self.position

    def includes_all(self, wheel: WheelId, seq: int, due_ms: int) -> bool:
        """Whether all messages of a frame are done, given its last due."""
        return seq <= self.seq(wheel) and due_ms <= self.due_ms

    def but_for(self, wheels: Collection[WheelId]) -> Self:
        """Returns the set without these wheels."""
        return replace(self, seqs={w: seq for w, seq in self.seqs.items() if w not in wheels})


class SetBackRefusal(StrEnum):
    """Why w is not set back; the names are those of `delaywheel.reasons`."""

    NOTHING_TO_SET_BACK = "NOTHING_TO_SET_BACK"
    SET_BACK_TOO_OFTEN = "SET_BACK_TOO_OFTEN"


@dataclass(frozen=True, slots=True)
class Progress(Done):
    """Which messages are done: `Done`, and those done ahead of w.

    Attributes:
        floor: Every slot below is done and may be deleted.
        ahead: Done under clocks that were ahead; newest last, so with w falling and V growing.
        set_backs: How often w was set back.
    """

    floor: int = 0
    ahead: tuple[Done, ...] = ()
    set_backs: Natural = 0

    @property
    def reached(self) -> Reached:
        """How far progress has come."""
        return Reached(self.set_backs, self.due_ms, self.position)

    @property
    def order(self) -> tuple[int, int, tuple[Position, ...], int]:
        """Grows with every commit."""
        return *self.reached.order, self.floor

    @property
    def ahead_ms(self) -> int | None:
        """The latest due of messages done ahead of w; None: there are none."""
        return max(done.last_due_ms for done in self.ahead) if self.ahead else None

    def covers(self, due_ms: int, position: Position) -> bool:
        """Whether the message at this place, with this due, is done."""
        if self.includes(due_ms, position):
            return True
        return bool(self.ahead) and any(done.includes(due_ms, position) for done in self.ahead)

    def covers_all(self, wheel: WheelId, seq: int, due_ms: int) -> bool:
        """Whether all messages of a frame are done, given its last due."""
        return self.includes_all(wheel, seq, due_ms) or any(
            done.includes_all(wheel, seq, due_ms) for done in self.ahead
        )

    def moved(
        self, due_ms: int, position: Position | None, seqs: Mapping[WheelId, int]
    ) -> "Progress":
        """Returns the progress with more done; what w has passed no longer counts as done ahead."""
        ahead = tuple(done for done in self.ahead if done.last_due_ms > due_ms)
        return replace(self, due_ms=due_ms, position=position, seqs=seqs, ahead=ahead)

    def set_back(self, now_ms: int) -> "Progress | SetBackRefusal":
        """Returns the progress with w set back to the clock; all done messages are done ahead."""
        if now_ms >= self.due_ms:
            return SetBackRefusal.NOTHING_TO_SET_BACK
        if len(self.ahead) >= MOST_AHEAD:
            return SetBackRefusal.SET_BACK_TOO_OFTEN
        done = Done(self.due_ms, self.position, self.seqs)
        return replace(
            self,
            due_ms=now_ms,
            position=None,
            ahead=(*self.ahead, done),
            set_backs=self.set_backs + 1,
        )

    def without(self, wheels: Collection[WheelId]) -> "Progress":
        """Returns the progress without these wheels, which are unregistered."""
        if not wheels:
            return self
        ahead = tuple(done.but_for(wheels) for done in self.ahead)
        return replace(self.but_for(wheels), ahead=ahead)


def first_progress(now_ms: int, late_window_s: int) -> Progress:
    """Returns what the first leader of an empty cluster commits."""
    return Progress(due_ms=now_ms, position=None, seqs={}, floor=time_floor(now_ms, late_window_s))


def time_floor(due_ms: int, late_window_s: int) -> int:
    """Returns the floor that w alone allows: slots whose late window has passed are below it."""
    return due_ms // 1000 - late_window_s
