"""Counts deliveries that ended with the process, and finds the record that ends it.

A record whose handler kills the process (memory, a crash in C code) has no outcome: its partition
begins at the same offset again, for ever. So a consumer notes beside the committed offset that it
has begun there, before it hands anything out; the first commit takes the note away, and whoever
gives the partition up in good order does so too. Who finds the note knows that its predecessor
died. Then records are suspects: each is handed out alone, once its delivery is noted.

| a partition is | beside its offset is noted | of it is handed out |
|---|---|---|
| free | nothing | everything |
| begun: it was assigned with records behind its offset | `deliveries` 1 | the first `WINDOW`, \
counted by offsets from the first record that is there |
| suspect, up to the offset `suspect_until` | how often the first record was handed out | that one |
| suspect, and that was `max_deliveries` times | the same | nothing: that record is dead, POISON |

| in this state | happens | then it is |
|---|---|---|
| begun | its first commit; it is given up in good order | free |
| begun | the process dies | suspect: none of its records was handed out alone yet |
| suspect | the record has an outcome | suspect, at the next record; free from `suspect_until` on |
| suspect | it is given up in good order | suspect, with one delivery less |
| suspect | the process dies | suspect, with what is noted |

Of all suspect partitions of a consumer one at a time has a record in hand.

Offsets have gaps, of ends of transactions, of what was aborted, and of what a compacted topic no
longer has: behind the committed offset there may be no record within the window, or none at all
until one is written. So nothing is handed out before the first record is seen, and it begins the
window; a suspect's range reaches as far from there.

What died with a note that could not be written, or with partitions that were lost, counts as one
delivery less or more: the count is of suspicions, and a record is condemned only by deaths during
which no other suspect was in hand.

A note costs a transaction for each assignment of partitions that have something to read, and for
each suspect; none for other records. No I/O, no clock, no lock: the engine's thread alone is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from delaywheel.consumer.book import Book
from delaywheel.consumer.message import ReceivedMessage
from delaywheel.consumer.records import Partition, Passed

WINDOW: Final = 100
"""How many records of a partition may be in hand until its first commit: these are the suspects if
the process dies."""


class DeliveryMark(NamedTuple):
    """What is to be noted beside an offset that stays."""

    offset: int
    deliveries: int = 0
    suspect_until: int = 0


@dataclass(slots=True)
class _Watched:
    offset: int
    deliveries: int
    until: int
    has_begun: bool = False  # its first record was seen
    next_deliveries: tuple[int, int] = (0, 0)  # what was noted last, beside which offset

    @property
    def is_suspect(self) -> bool:
        return self.until > 0


class Deliveries:
    """The begun and the suspect partitions of one consumer."""

    def __init__(self, book: Book, most: int | None) -> None:
        """Begins with none.

        Args:
            book: Where records are held back.
            most: After how many deliveries a suspect is dead; None: nothing is counted.
        """
        self._book = book
        self._most = most
        self._watched: dict[Partition, _Watched] = {}
        self._current: Partition | None = None

    @property
    def is_watching(self) -> bool:
        """Whether any partition is begun or suspect: its next commit is urgent."""
        return bool(self._watched)

    @property
    def has_suspects(self) -> bool:
        """Whether records are handed out one by one."""
        return any(one.is_suspect for one in self._watched.values())

    def assigned(
        self,
        positions: Mapping[Partition, int | None],
        known: Mapping[Partition, Passed | None],
        ends: Mapping[Partition, int],
    ) -> dict[Partition, DeliveryMark]:
        """Takes partitions in, which the book has; returns what is to be noted.

        Args:
            positions: Where each is read on; None: from its beginning.
            known: What was committed for each.
            ends: Where each ends.
        """
        self.forget(positions)
        marks: dict[Partition, DeliveryMark] = {}
        for at, position in positions.items() if self._most is not None else ():
            passed, end = known.get(at), ends.get(at, 0)
            if passed is None or passed.offset != position:
                passed = Passed(position or 0)
            offset = passed.offset
            if passed.suspect_until > offset:
                self._watched[at] = _Watched(offset, passed.deliveries, passed.suspect_until)
                self._book.limit(at, offset)
            elif passed.deliveries and offset < end:
                self._watched[at] = _Watched(offset, 0, min(end, offset + WINDOW))
                self._book.limit(at, offset)
            elif offset < end:
                self._watched[at] = _Watched(offset, 0, 0)
                self._book.limit(at, offset)
                marks[at] = DeliveryMark(offset, deliveries=1)
        return marks

    def begin_windows(self) -> bool:
        """Lets partitions whose first record is there now begin with it; whether any did."""
        any_began = False
        for at, one in self._watched.items():
            message = None if one.has_begun else self._book.first_kept(at)
            if message is None:
                continue
            any_began = one.has_begun = True
            first = message.place.offset
            if not one.is_suspect:
                self._book.limit(at, first + WINDOW)
            elif first >= one.until:
                one.until = first + WINDOW
        return any_began

    def suspect(self) -> tuple[Partition, ReceivedMessage, DeliveryMark | None] | None:
        """Returns the record that comes next, with what is to be noted; no note: it is condemned.

        None: One is in hand, or none is there.
        """
        if self._current is not None:
            return None
        for at, one in self._watched.items():
            is_next = one.is_suspect and not self._book.is_withheld(at)
            message = self._book.first_kept(at) if is_next else None
            if message is not None:
                assert self._most is not None
                if one.deliveries >= self._most:
                    self._current = at
                    return at, message, None
                return at, message, DeliveryMark(one.offset, one.deliveries + 1, one.until)
        return None

    def marked(self, marks: Mapping[Partition, DeliveryMark]) -> None:
        """Takes in what was noted; a suspect may be handed out then."""
        for at, mark in marks.items():
            one = self._watched.get(at)
            if one is None:
                continue
            one.deliveries = mark.deliveries
            if one.is_suspect:
                self._release(at)

    def beside(self, at: Partition, offset: int) -> tuple[int, int]:
        """Returns what the next commit notes beside an offset: deliveries, and `suspect_until`."""
        one = self._watched.get(at)
        if one is None or offset >= one.until:
            return 0, 0
        # The next record goes out with the same commit if it is here.
        goes_on = self._current in (None, at) and self._book.is_kept_after(at, offset)
        one.next_deliveries = offset, int(goes_on)
        return int(goes_on), one.until

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Takes in what was committed."""
        for at, offset in offsets.items() if self._watched else ():
            one = self._watched.get(at)
            if one is None or offset <= one.offset:
                continue
            if self._current == at:
                self._current = None
            if offset >= one.until:
                del self._watched[at]
                self._book.limit(at, None)
                continue
            noted, deliveries = one.next_deliveries
            one.offset, one.deliveries = offset, deliveries if noted == offset else 0
            if one.deliveries:
                self._release(at)

    def to_give_back(self, partitions: Iterable[Partition]) -> dict[Partition, DeliveryMark]:
        """Returns what is to be noted of partitions that are given up in good order."""
        return {
            at: DeliveryMark(one.offset, one.deliveries - 1, one.until)
            for at in partitions
            for one in (self._watched.get(at),)
            if one is not None and one.deliveries and (not one.is_suspect or self._current == at)
        }

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Forgets partitions."""
        for at in partitions:
            self._watched.pop(at, None)
            if self._current == at:
                self._current = None

    def _release(self, at: Partition) -> None:
        message = self._book.first_kept(at)
        if message is not None:
            self._current = at
            self._book.limit(at, message.place.offset + 1)
