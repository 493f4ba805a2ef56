"""The cleaner's end: hands records to the server of its node during one term.

It creates a socket pair and sends one end over the link. So the hand-over ends with the term or the
process, and leaves no half batch for the next one. When the server closes its end, every record
without an answer is UNKNOWN.

Nothing here blocks. Bytes that the socket does not accept at once are queued, and `fileno`, that of
an epoll, is readable whenever there is something to do.
"""

import contextlib
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple, Self

from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.ingress.reading import Delayed, HalfCommit, Withdrawn
from delaywheel_replica.core.ingress.term import Handed
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.handover.answers import take_answers
from delaywheel_replica.handover.batches import (
    BATCH_BYTES,
    FORMAT,
    UNANSWERED_BYTES,
    HandedRequest,
    encode,
    kind_of,
    length_bytes,
)
from delaywheel_replica.link import HandoverBegins
from delaywheel_replica.process.logs import get_logger

_READ_BYTES: Final = 64 << 10
# The kernel takes 1,024 parts in one call.
_PARTS: Final = 512

_log = get_logger(__name__)


class _Batch(NamedTuple):
    records: tuple[Handed, ...]
    length_bytes: int


class Handover:
    """Hands records over, and collects the answers. For one thread.

    Once it `is_broken`, it no longer accepts records.
    """

    def __init__(self, ours: socket.socket) -> None:
        ours.settimeout(0)
        self._socket = ours
        self._epoll = select.epoll()
        self._epoll.register(ours, select.EPOLLIN)
        self._unsent = deque[bytes | memoryview]()
        self._waits_to_send = False
        self._received = bytearray()
        self._unanswered: dict[int, _Batch] = {}
        self._unanswered_bytes = 0
        self._batches = 0
        self._answers: list[tuple[Handed, RecordAnswer]] = []
        self.is_broken = False

    @classmethod
    def begun(cls, send: Callable[[HandoverBegins], bool]) -> Self | None:
        """Creates a socket pair, and sends the server its end; None if the link is full now."""
        ours, theirs = socket.socketpair()
        with theirs:
            if send(HandoverBegins(FORMAT, theirs.fileno())):
                return cls(ours)
        ours.close()
        return None

    def fileno(self) -> int:
        """Returns the descriptor that is readable once `answers` has something to do."""
        return self._epoll.fileno()

    @property
    def room_bytes(self) -> int:
        """How much may be handed over now; the first record may be longer."""
        return 0 if self.is_broken else max(0, UNANSWERED_BYTES - self._unanswered_bytes)

    def hand(self, records: Sequence[Handed]) -> None:
        """Hands records over; each gets one answer."""
        if self.is_broken:
            self._answers += [(record, RecordAnswer.NOT_NOW) for record in records]
            return
        for batch in _batches(records):
            self._batches = (self._batches + 1) & 0xFFFF_FFFF
            self._unanswered[self._batches] = batch
            self._unanswered_bytes += batch.length_bytes
            self._unsent += encode(self._batches, [_request(each) for each in batch.records])
        self._go_on()

    def answers(self) -> list[tuple[Handed, RecordAnswer]]:
        """Returns the answers since the last call."""
        self._go_on()
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Closes the socket; unanswered records stay unanswered."""
        self._socket.close()
        self._epoll.close()

    def _go_on(self) -> None:
        if self.is_broken:
            return
        try:
            self._receive()
            self._transmit()
        except (OSError, EOFError, MalformedError) as error:
            self._break(error)

    def _transmit(self) -> None:
        unsent = self._unsent
        with contextlib.suppress(BlockingIOError):
            while unsent:
                sent = self._socket.sendmsg(list(islice(unsent, _PARTS)))
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = memoryview(unsent[0])[sent:]
        if self._waits_to_send != bool(unsent):
            self._waits_to_send = bool(unsent)
            wanted = select.EPOLLIN | (select.EPOLLOUT if unsent else 0)
            self._epoll.modify(self._socket, wanted)

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                content = self._socket.recv(_READ_BYTES)
                if not content:
                    raise EOFError("the server has closed the hand-over")
                self._received += content
                self._take_answers()

    def _take_answers(self) -> None:
        most = max((len(batch.records) for batch in self._unanswered.values()), default=0)
        for number, answers in take_answers(self._received, most):
            batch = self._unanswered.pop(number, None)
            if batch is None or len(answers) != len(batch.records):
                raise MalformedError(f"an answer of {len(answers)} records to batch {number}")
            self._unanswered_bytes -= batch.length_bytes
            self._answers += zip(batch.records, answers, strict=True)

    def _break(self, error: Exception) -> None:
        _log.warning("hand-over broken", error=str(error), batches=len(self._unanswered))
        self.is_broken = True
        for batch in self._unanswered.values():
            self._answers += [(record, RecordAnswer.UNKNOWN) for record in batch.records]
        self._unanswered.clear()
        self._unsent.clear()
        self._epoll.unregister(self._socket)
        self._socket.close()


def _request(record: Handed) -> HandedRequest:
    request = record.taken.request
    if not isinstance(request, Delayed | Withdrawn | HalfCommit):
        raise TypeError(f"{record.at} {record.taken.offset} is nothing for a server")
    return request


def _batches(records: Sequence[Handed]) -> Iterator[_Batch]:
    """Splits records into batches of one kind each; a wheel does not depend on their order."""
    for kind in Kind:
        batch: list[Handed] = []
        batch_bytes = 0
        for record in records:
            request = _request(record)
            if kind_of(request) is not kind:
                continue
            length = length_bytes(request)
            if batch and batch_bytes + length > BATCH_BYTES:
                yield _Batch(tuple(batch), batch_bytes)
                batch, batch_bytes = [], 0
            batch.append(record)
            batch_bytes += length
        if batch:
            yield _Batch(tuple(batch), batch_bytes)
