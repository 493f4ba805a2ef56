"""Letters on their way into transactions, by what was decided about each.

| decided | written, in one transaction |
|---|---|
| `Replay` | the record, and a mark of the letter |
| `Drop` | a mark of the letter |
| `Keep` | nothing |

Handlers of letters have a position besides, in each partition of the letters: how far they have
decided. It is written in the same transactions, so no letter that was decided is handled again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from delaywheel.deadletters.counting import Settled
from delaywheel.deadletters.errors import DeadLettersError, DeadLettersReason
from delaywheel.deadletters.letter import Letter, LetterPlace
from delaywheel.deadletters.marks import LetterState, Marks, make_marks, make_positions
from delaywheel.deadletters.writing import LetterWriter
from delaywheel.transactional import Outgoing, is_aftermath

BATCH_LETTERS: Final = 500
BATCH_BYTES: Final = 4_000_000
"""The most that one transaction deals with, unless a single letter is larger."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Send the message again, to its own topic unless `to` is another.

    `as_new`: without the partition and timestamp that the message was given, and for a consumer
    group without its attempts.
    """

    to: str | None = None
    as_new: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """The letter is dealt with, and nothing is sent."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The letter waits for somebody else."""


REPLAY: Final = Replay()
DROP: Final = Drop()
KEEP: Final = Keep()
Decision: TypeAlias = Replay | Drop | Keep


@dataclass(frozen=True, slots=True)
class _Decided:
    place: LetterPlace
    decision: Replay | Drop
    record: Outgoing | None


class Settling:
    """The letters of one claim."""

    def __init__(
        self,
        writer: LetterWriter,
        marks: Marks,
        again: Callable[[Letter, Replay], Outgoing | str],
        limit: int | None = None,
        on_progress: Callable[[Settled], None] | None = None,
    ) -> None:
        """Settles nothing yet.

        The marks are all before the claim; `again` returns the record that sends a letter's message
        again, or why there is none; `limit` is the most letters to settle.
        """
        self.settled = Settled()
        self.marks = marks
        self._writer = writer
        self._again = again
        self._limit = limit
        self._on_progress = on_progress
        self._batch: list[_Decided] = []
        self._batch_bytes = 0
        self._passed: dict[int, int] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether there are letters whose transaction is still to come."""
        return bool(self._batch)

    def has_reached_limit(self) -> bool:
        """Whether enough letters are done, or enough are under way that they may be."""
        if self._limit is None:
            return False
        if self.settled.done + len(self._batch) >= self._limit:
            self.end()
        return self.settled.done >= self._limit

    def take(self, letter: Letter, decision: Replay | Drop) -> str | None:
        """Settles a letter that still waits; returns why it cannot be sent again, if it cannot."""
        if self.marks.state_of(letter.place) is not LetterState.WAITING:
            return None
        record = self._again(letter, decision) if isinstance(decision, Replay) else None
        if isinstance(record, str):
            self.settled.refuse(letter.place, record)
            return record
        self._batch.append(_Decided(letter.place, decision, record))
        self._batch_bytes += record.length_bytes if record is not None else 0
        if len(self._batch) >= BATCH_LETTERS or self._batch_bytes >= BATCH_BYTES:
            self.end()
        return None

    def passed(self, letter: Letter) -> None:
        """Notes that a letter's handler has decided: `end` commits this with what it decided."""
        self._passed[letter.place.partition] = letter.place.offset + 1

    def end(self) -> None:
        """Deals with the remaining letters."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        passed, self._passed = self._passed, {}
        positions = make_positions(self.marks.topic_id, passed)
        if not self._transact(batch, positions) and positions:
            self._writer.forget(positions)
        self.marks.positions.update(passed)

    def _transact(
        self, batch: Sequence[_Decided], positions: Sequence[tuple[bytes, bytes]] = ()
    ) -> bool:
        """Transacts all of these except refused ones, in as few transactions as possible.

        Returns whether it was one, with all of them and the positions.
        """
        if not batch:
            return False
        records = [one.record for one in batch if one.record is not None]
        written = [*self._marks_of(batch), *positions]
        ended = self._writer.transact(records, written)
        if ended is not None and is_aftermath(ended.why):
            ended = self._writer.transact(records, written)
        if ended is None:
            for one in batch:
                partition, offset = one.place
                self.marks.add(partition, _state(one.decision), [(offset, offset)])
            self.settled.done += len(batch)
            if self._on_progress is not None:
                self._on_progress(self.settled)
            return True
        if not records:
            raise DeadLettersError(DeadLettersReason.KAFKA_REFUSED, ended.why)
        # Records are those of the letters, in order, of which some have none.
        sent = [n for n, one in enumerate(batch) if one.record is not None]
        if ended.number is not None:
            refused = sent[ended.number]
            self.settled.refuse(batch[refused].place, ended.why)
            self._transact([*batch[:refused], *batch[refused + 1 :]])
        elif len(batch) == 1:
            self.settled.refuse(batch[0].place, ended.why)
        else:
            half = len(batch) // 2
            self._transact(batch[:half])
            self._transact(batch[half:])
        return False

    def _marks_of(self, batch: Sequence[_Decided]) -> list[tuple[bytes, bytes]]:
        alike: dict[tuple[LetterState, str | None], list[LetterPlace]] = {}
        for one in batch:
            to = one.decision.to if isinstance(one.decision, Replay) else None
            alike.setdefault((_state(one.decision), to), []).append(one.place)
        now_ms = time.time_ns() // 1_000_000
        return [
            mark
            for (state, to), places in alike.items()
            for mark in make_marks(self.marks.topic_id, places, state, at_ms=now_ms, to=to)
        ]


def _state(decision: Replay | Drop) -> LetterState:
    return LetterState.REPLAYED if isinstance(decision, Replay) else LetterState.DROPPED
