"""What is told of letters: what became of each, once that is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from delaywheel.deadletters.letter import Letter
from delaywheel.deadletters.marks import LetterState
from delaywheel.deadletters.settling import Decision, Keep, Settling
from delaywheel.record_headers import last_of
from delaywheel.ways.roots import hashed_of
from delaywheel.ways.values import id_in

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.counts import Cell, CellKey
    from delaywheel.trace.options import TraceOptions
    from delaywheel.trace.reports import EventReports


class DecidedLetter(NamedTuple):
    """A letter, and what became of it.

    Attributes:
        became: `replayed`, `dropped`, `kept` or `refused`: it could not be sent again.
        why: Why it was refused; empty: it was not.
        took_s: How long its handler had it; None: there is none.
    """

    letter: Letter
    became: str
    why: str
    took_s: float | None


class DecidedLetters:
    """Letters of one topic; those of a trace are told in any case: something has failed before."""

    def __init__(self, topic: str, decided: Sequence[DecidedLetter]) -> None:
        self._topic: Final = topic
        self._decided: Final = decided

    def roots(self) -> list[bytes]:
        """Returns what is hashed of where the way of each began."""
        return [
            b"%s/%d/%d" % (self._topic.encode(), *one.letter.place)
            if (root := one.letter.root) is None
            else hashed_of(root)
            for one in self._decided
        ]

    def failed(self) -> list[int]:
        """Returns all rows."""
        return list(range(len(self._decided)))

    def cells(self, _time_ms: int) -> dict[CellKey, Cell]:
        """Returns nothing: letters are no messages, and what is sent again is no accepted one."""
        return {}

    def rows(
        self, chosen: Sequence[int] | None, options: TraceOptions, time_ms: int
    ) -> tuple[dict[str, list[Any]], int]:
        """Returns the columns of these rows, and the length of their texts; None: of all."""
        decided = self._decided if chosen is None else [self._decided[row] for row in chosen]
        letters, count = [one.letter for one in decided], len(decided)
        keys, length_bytes = options.keys([letter.key for letter in letters])
        name, nothing = options.tags, [None] * count
        tags = nothing if name is None else [last_of(one.headers, name) for one in letters]
        ids = [id_in(letter.dw_headers.get("dw-id")) for letter in letters]
        roots = [root and root.decode() for root in (letter.root for letter in letters)]
        return {
            "id": ids,
            "due_ms": [letter.due_ms for letter in letters],
            "topic": [self._topic] * count,
            "time_ms": [time_ms] * count,
            "status": [one.became.upper() for one in decided],
            "key": keys,
            "tags": tags,
            "root": [
                None if id_ is not None and root == id_.hex() else root
                for root, id_ in zip(roots, ids, strict=True)
            ],
            "to_ms": nothing,
            "next_id": nothing,
            "partition": [letter.place.partition for letter in letters],
            "offset": [letter.place.offset for letter in letters],
            "forwarded_ms": nothing,
            "group": [letter.group or None for letter in letters],
            "attempt": nothing,
            "handler_us": [
                None if one.took_s is None else int(one.took_s * 1e6) for one in decided
            ],
            "why": [one.why or one.letter.reason or None for one in decided],
        }, length_bytes + sum(map(len, filter(None, tags)))


class LettersToTell:
    """Letters of one topic that were decided, until it is known what became of them."""

    def __init__(self, topic: str, trace: EventReports | None) -> None:
        """Begins with none; keeps none without a trace."""
        self._topic: Final = topic
        self._trace: Final = trace
        self._open: Final[list[tuple[Letter, Decision, float | None]]] = []

    def add(self, letter: Letter, decision: Decision, took_s: float | None) -> None:
        """Notes what was decided about a letter.

        Its value is not told: hundreds of letters wait together for their transaction.
        """
        if self._trace is not None:
            self._open.append((replace(letter, value=None), decision, took_s))

    def refused(self, letter: Letter, why: str) -> None:
        """Tells of a letter that cannot be sent again."""
        self._tell([DecidedLetter(letter, "refused", why, None)])

    def forget(self) -> None:
        """Tells nothing of those that are noted."""
        self._open.clear()

    def tell(self, settling: Settling, *, has_ended: bool = True) -> None:
        """Tells what became of those that are noted.

        `settling` knows what was committed, and why letters were refused, of some. Unless it
        `has_ended`, what became of those that wait is not known.
        """
        refused, decided = dict(settling.settled.examples), list[DecidedLetter]()
        for letter, decision, took_s in self._open:
            became = _became(decision, settling.marks.state_of(letter.place))
            if has_ended or became != "refused":
                decided.append(DecidedLetter(letter, became, refused.get(letter.place, ""), took_s))
        self._open.clear()
        self._tell(decided)

    def _tell(self, decided: Sequence[DecidedLetter]) -> None:
        if self._trace is not None and decided:
            self._trace.processed(DecidedLetters(self._topic, decided))


def _became(decision: Decision, state: LetterState) -> str:
    if isinstance(decision, Keep):
        return "kept"
    return "refused" if state is LetterState.WAITING else str(state.value)
