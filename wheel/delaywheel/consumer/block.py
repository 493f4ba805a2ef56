"""Records of one partition in columns: what was fetched together, and the state of each.

A consumer that reads 100,000 records a second has no time for an object of each. A block keeps the
client's columns as they came; states are one byte a record, so that a range of them is counted and
changed at once; a `ReceivedMessage` is made when a handler asks for it, and is the same one then.

    begin                        a run: some records of a block that follow each other
      |                              |
      v                              v
    [ committed | settled | in hand .... | waiting ... ]

No I/O, no clock, no lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from delaywheel.consumer.message import ReceivedMessage, SettledError, Settlement, State
from delaywheel.consumer.records import (
    FetchedRecords,
    Incoming,
    Place,
    RecordHeaders,
    Writes,
    unpack_retry,
)
from delaywheel.headers import content_bytes
from delaywheel.transactional import Outgoing

if TYPE_CHECKING:
    from delaywheel.consumer.engine.dispatcher import Dispatcher

_SETTLED: Final = bytes((State.SETTLED,))


class RecordBlock:
    """Records of one partition that were fetched together, until each has left the consumer.

    Attributes:
        states: A `State` for each.
        handed_s: When each was handed out, on the monotonic clock.
        took_s: How long a handler had each until it was settled; below 0: none has settled it.
        settlements: Of those that are settled, by index; not of what is merely done.
        writes: What handlers have written, by the index of a record that is in hand.
        begin: The index of the first that is not committed.
        was_taken_back: Whether any is handed out again, as another object.
    """

    __slots__ = (
        "_ends_bytes",
        "_fetched",
        "_made",
        "at",
        "begin",
        "desk",
        "handed_s",
        "has_headers",
        "is_retry",
        "offsets",
        "settlements",
        "states",
        "took_s",
        "was_taken_back",
        "writes",
    )

    def __init__(self, desk: Dispatcher, fetched: FetchedRecords, *, is_retry: bool) -> None:
        """Takes records in, one at least, all of them waiting; `desk` is where they are settled."""
        count = len(fetched.offsets)
        self.desk = desk
        self.at = fetched.at
        self.offsets = fetched.offsets
        self.states = bytearray(count)
        self.handed_s = array("d", bytes(8 * count))
        self.took_s = array("d", (-1.0,)) * count
        self.settlements: dict[int, Settlement] = {}
        self.writes: dict[int, Writes] = {}
        self.begin = 0
        self.has_headers = any(fetched.headers) or bool(fetched.unread)
        self.was_taken_back = False
        self._fetched = fetched
        self.is_retry = is_retry
        self._made: dict[int, ReceivedMessage] = {}
        if self.has_headers:
            sizes = map(content_bytes, fetched.keys, fetched.values, fetched.headers)
            self._ends_bytes = list(accumulate(sizes, initial=0))
        else:
            columns = zip(fetched.keys, fetched.values, strict=True)
            lengths = [len(key or b"") + len(value or b"") for key, value in columns]
            self._ends_bytes = list(accumulate(lengths, initial=0))

    def __len__(self) -> int:
        return len(self.offsets)

    def length_bytes(self, begin: int, end: int) -> int:
        """Returns the length of keys, values and headers of these records."""
        return self._ends_bytes[end] - self._ends_bytes[begin]

    def message(self, index: int) -> ReceivedMessage:
        """Returns one record as the object that handlers see."""
        made = self._made.get(index)
        # Handlers and the consumer's thread may ask at once: the first object is kept.
        return made or self._made.setdefault(index, self._make(index))

    def _make(self, index: int) -> ReceivedMessage:
        fetched = self._fetched
        topic, number = self.at
        place = Place(topic, number, fetched.offsets[index], fetched.timestamps_ms[index])
        key, value = fetched.keys[index], fetched.values[index]
        made = ReceivedMessage(self, index, place, key, value, fetched.headers[index] or [])
        if self.is_retry:
            made.take_trip(*unpack_retry(Incoming(place, key, value, made.headers)))
        if fetched.unread:
            made.are_headers_unread = index in fetched.unread
        return made

    def made(self) -> list[ReceivedMessage]:
        """Returns the objects that there are; handlers may have more made meanwhile."""
        return list(self._made.values())

    def keys(self, begin: int, end: int) -> Sequence[bytes | None]:
        """Returns the keys of these records."""
        return self._fetched.keys[begin:end]

    def timestamps_ms(self, begin: int, end: int) -> Sequence[int]:
        """Returns the timestamps of these records."""
        return self._fetched.timestamps_ms[begin:end]

    @property
    def headers(self) -> Sequence[RecordHeaders | None]:
        """The client's list of each record; None for one without any."""
        return self._fetched.headers

    def values(self, begin: int, end: int) -> Sequence[bytes | None]:
        """Returns the values of these records."""
        return self._fetched.values[begin:end]

    def settled_end(self) -> int:
        """Returns the index behind the settled records at the beginning."""
        rest = self.states[self.begin :]
        return len(self.states) - len(rest.lstrip(_SETTLED))

    def take_back(self, index: int) -> ReceivedMessage:
        """Makes another object of a record, which waits; the present one is forgotten."""
        self.message(index).is_given_back = True
        self.writes.pop(index, None)
        again = self._make(index)
        self.states[index] = State.WAITING
        self._made[index] = again
        self.was_taken_back = True
        return again


class RecordRun(NamedTuple):
    """Records of a block that follow each other."""

    block: RecordBlock
    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.end - self.begin

    @property
    def first_offset(self) -> int:
        """The offset of the first."""
        return self.block.offsets[self.begin]

    def messages(self) -> Iterator[ReceivedMessage]:
        """Yields each as the object that handlers see."""
        return map(self.block.message, range(self.begin, self.end))


def runs_of(messages: Iterable[ReceivedMessage]) -> list[RecordRun]:
    """Returns the places of messages in their blocks, except of those that were given back."""
    runs: list[RecordRun] = []
    for message in messages:
        block, index = message.block, message.index
        if message.is_given_back:
            continue
        if runs and runs[-1].block is block and runs[-1].end == index:
            runs[-1] = RecordRun(block, runs[-1].begin, index + 1)
        else:
            runs.append(RecordRun(block, index, index + 1))
    return runs


def write(message: ReceivedMessage, record: Outgoing) -> int:
    """Holds what the handler of a record in hand writes; returns how many bytes that takes.

    0: the record is forgotten, or is to be handed out again. SettledError: it has an outcome;
    MessageInvalidError: that is more than one transaction takes.
    """
    if message.is_settled:
        raise SettledError.of(message)
    if message.state is not State.IN_HAND:
        return 0
    return message.block.writes.setdefault(message.index, Writes()).add(record)


def with_writes(block: RecordBlock, index: int, settlement: Settlement) -> Settlement:
    """Returns the settlement of a record that is done, with what its handler has written."""
    writes = block.writes.pop(index, None)
    return settlement if writes is None else settlement._replace(writes=writes)
