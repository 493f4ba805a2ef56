"""Counts deliveries that ended with the process, and finds the record that ends it.

A record whose handler kills the process (memory, a crash in C code) has no outcome, so its
partition begins at the same offset again, for ever. So a consumer notes beside the committed offset
that it has begun there, before it hands anything out; the first commit takes the note away, and
whoever gives the partition up in good order does so too. Who finds the note knows that its
predecessor died with records in hand. Then these are suspects: of each partition one is handed out,
once its delivery is noted, and what is blamed once is handed out alone.

| a partition is | beside its offset is noted | of it is handed out |
|---|---|---|
| free | nothing | everything |
| waiting: it was assigned with offsets behind its own, perhaps of no record | nothing | nothing |
| begun: the first record is there | `deliveries` 1 | the first `WINDOW`, counted by offsets from \
that record |
| suspect, up to the offset `suspect_until` | how often the first record was handed out: once \
beside suspects of other partitions, then alone | that one |
| suspect, and that was `max_deliveries` times alone | the same | nothing: that record is \
dead, POISON |

| in this state | happens | then it is |
|---|---|---|
| waiting | its first record comes | begun |
| waiting | the process dies | as before: nothing of it was in hand |
| begun | its first commit; it is given up in good order | free |
| begun | the process dies | suspect: none of its records was handed out alone yet |
| suspect | the record has an outcome | suspect, at the next record; free from `suspect_until` on |
| suspect | it is given up in good order | suspect, with one delivery less |
| begun, suspect | it is lost, and assigned to the same process again, with its own note | as if \
given up in good order: nobody died; at an offset once, as it may be a record that ends sessions |
| suspect | the process dies | suspect, with what is noted |

Who dies with suspects of several partitions in hand blames all of them, so none is condemned for
that: its successor hands each of them out while it has no other suspect in hand. A consumer with
one suspect partition hands them out alone at once.

Offsets have gaps, of ends of transactions, of what was aborted, and of what a compacted topic no
longer has: behind the committed offset there may be no record within the window, or none at all
until one is written. So nothing is noted or handed out before the first record is seen, and it
begins the window; a suspect's range reaches as far from there.

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
    is_in_hand: bool = False  # the first record is a suspect, and handed out
    before: int = 0  # the deliveries without that
    next_deliveries: tuple[int, int] = (0, 0)  # what was noted last, beside which offset

    @property
    def is_suspect(self) -> bool:
        return self.until > 0

    @property
    def note(self) -> DeliveryMark:
        return DeliveryMark(self.offset, self.deliveries, self.until)


class Deliveries:
    """The begun and the suspect partitions of one consumer."""

    def __init__(self, book: Book, most: int | None) -> None:
        """Begins with none; a suspect is dead after `most` deliveries alone. None: never."""
        self._book = book
        self._most = most
        self._watched: dict[Partition, _Watched] = {}
        self._left: dict[Partition, _Watched] = {}
        self._forgiven: dict[Partition, int] = {}

    @property
    def is_watching(self) -> bool:
        """Whether any partition is not free."""
        return bool(self._watched)

    @property
    def is_urgent(self) -> bool:
        """Whether a commit is: it would take a note away, or is waited for."""
        return any(one.has_begun for one in self._watched.values())

    @property
    def suspects(self) -> dict[Partition, int]:
        """The partitions whose records are handed out one by one, with the offsets up to which."""
        return {at: one.until for at, one in self._watched.items() if one.is_suspect}

    def assigned(
        self,
        positions: Mapping[Partition, int | None],
        known: Mapping[Partition, Passed | None],
        ends: Mapping[Partition, int],
    ) -> None:
        """Takes in partitions that the book has; a position of None is the beginning."""
        self.forget(positions)
        for at, position in positions.items() if self._most is not None else ():
            passed, end = known.get(at), ends.get(at, 0)
            if passed is None or passed.offset != position:
                passed = Passed(position or 0)
            offset = passed.offset
            left = self._left.get(at)
            note = DeliveryMark(offset, passed.deliveries, passed.suspect_until)
            if left is not None and left.note == note and self._forgiven.get(at) != offset:
                passed = passed._replace(deliveries=left.before)
            else:
                self._left.pop(at, None)
            if passed.suspect_until > offset:
                noted = passed.deliveries
                self._watched[at] = _Watched(offset, noted, passed.suspect_until, before=noted)
                self._book.limit(at, offset)
            elif passed.deliveries and offset < end:
                self._watched[at] = _Watched(offset, 0, min(end, offset + WINDOW))
                self._book.limit(at, offset)
            elif offset < end:
                self._watched[at] = _Watched(offset, 0, 0)
                self._book.limit(at, offset)

    def to_begin(self) -> dict[Partition, DeliveryMark]:
        """Returns what is to be noted of partitions whose first record is there now."""
        marks: dict[Partition, DeliveryMark] = {}
        for at, one in self._watched.items():
            message = None if one.has_begun else self._book.first_kept(at)
            if message is None:
                continue
            if not one.is_suspect:
                marks[at] = DeliveryMark(one.offset, deliveries=1)
                continue
            one.has_begun = True
            if message.place.offset >= one.until:
                one.until = message.place.offset + WINDOW
        return marks

    def begin(self, partitions: Iterable[Partition]) -> None:
        """Lets partitions begin with their first record, whether that is noted or not."""
        for at in partitions:
            first = self._book.first_kept(at)
            if first is not None:
                self._watched[at].has_begun = True
                self._book.limit(at, first.place.offset + WINDOW)

    def next_suspects(self) -> dict[Partition, DeliveryMark | None]:
        """Returns the partitions whose suspect comes next, and what is to be noted before.

        No note: It is condemned, and in hand from now on.
        """
        in_hand = [one for one in self._watched.values() if one.is_in_hand]
        if any(one.deliveries > 1 for one in in_hand):
            return {}
        waiting = {
            at: one
            for at, one in self._watched.items()
            if one.is_suspect and not one.is_in_hand and not self._book.is_withheld(at)
            if self._book.first_kept(at) is not None
        }
        blamed = [at for at, one in waiting.items() if one.deliveries]
        if not blamed:
            deliveries = self._first_delivery
            return {
                at: DeliveryMark(one.offset, deliveries, one.until) for at, one in waiting.items()
            }
        at, one = blamed[0], waiting[blamed[0]]
        if in_hand:
            return {}
        assert self._most is not None
        if one.deliveries > self._most:
            one.is_in_hand, one.before = True, one.deliveries
            return {at: None}
        return {at: DeliveryMark(one.offset, one.deliveries + 1, one.until)}

    @property
    def _first_delivery(self) -> int:
        """The count of a suspect that is handed out for the first time: 1, or 2 if it is alone."""
        return 2 if len(self.suspects) == 1 else 1

    def marked(self, marks: Mapping[Partition, DeliveryMark]) -> None:
        """Takes in what was noted; suspects may be handed out then."""
        for at, mark in marks.items():
            if (left := self._left.pop(at, None)) is not None:
                self._forgiven[at] = left.offset
            one = self._watched.get(at)
            if one is None:
                continue
            # Less than before: it was given back, and is not to be given back twice.
            one.before, one.deliveries = min(one.deliveries, mark.deliveries), mark.deliveries
            if one.is_suspect:
                self._release(at)

    def beside(self, at: Partition, offset: int) -> tuple[int, int]:
        """Returns what the next commit notes beside an offset: deliveries, and `suspect_until`."""
        one = self._watched.get(at)
        if one is None or offset >= one.until:
            return 0, 0
        # The next record goes out with the same commit if it is here, and none is to be alone.
        others = [each for each in self._watched.values() if each is not one and each.is_suspect]
        is_others_turn = any(each.deliveries > each.is_in_hand for each in others)
        goes_on = not is_others_turn and self._book.is_kept_after(at, offset)
        deliveries = self._first_delivery if goes_on else 0
        one.next_deliveries = offset, deliveries
        return deliveries, one.until

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Takes in what was committed."""
        for at, offset in offsets.items() if self._watched else ():
            one = self._watched.get(at)
            if one is None or offset <= one.offset:
                continue
            self._left.pop(at, None)
            one.is_in_hand = False
            if offset >= one.until:
                del self._watched[at]
                self._book.limit(at, None)
                continue
            noted, deliveries = one.next_deliveries
            one.offset, one.deliveries = offset, deliveries if noted == offset else 0
            one.before = 0
            if one.deliveries:
                self._release(at)

    def to_give_back(self, partitions: Iterable[Partition]) -> dict[Partition, DeliveryMark]:
        """Returns what is to be noted of partitions that are given up in good order."""
        return {
            at: DeliveryMark(one.offset, one.before, one.until)
            for at in partitions
            for one in (self._left.get(at, self._watched.get(at)),)
            if one is not None and one.deliveries != one.before
        }

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Forgets partitions, but for what was noted of them."""
        for at in partitions:
            if at in self._watched:
                self._left.setdefault(at, self._watched.pop(at))

    def _release(self, at: Partition) -> None:
        message = self._book.first_kept(at)
        if message is not None:
            self._watched[at].is_in_hand = True
            self._book.limit(at, message.place.offset + 1)
