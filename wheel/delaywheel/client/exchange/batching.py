"""Batches messages into requests. No I/O, clocks or locks: the clients bring them.

`split` cuts a list by the service's limits. `Accumulator` groups what `produce_async` takes. A
request costs the caller and the nodes some 5 ms of CPU together, however few messages it has, so
messages gather into one, except where a caller or a due would notice. A batch that is full goes at
once; another one goes as soon as one of its messages does not wait any more:

=======================  ================================  =========================================
the message              while no request is under way     while one is
=======================  ================================  =========================================
has a caller who waits   does not wait                     waits for 20 ms since its caller does
has none                 waits until `Queue.linger` after  waits five times as long
                         the last request began
is due soon              waits for a fifth of the time to its due, but for 10 ms, since the last
                         request began; never longer than one that has no caller
=======================  ================================  =========================================

So a lone message goes at once, a caller who waits for each message is as fast as the node, and a
flow that nobody waits for makes one request per linger, or full ones. Where requests take longer
than that, since a node has much to do, such a flow makes fewer.

A node that does not know a topic asks Kafka, for seconds perhaps, and the answer waits. So
messages for topics for which this client has none accepted yet gather in batches of their own, by
the same table; one request is always left to the others.
"""

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Final

from delaywheel.client.exchange.pending import PendingResult, SendBatch
from delaywheel.client.exchange.settings import Queue
from delaywheel.errors import TimedOutError
from delaywheel.message import Message

ROW_BYTES: Final = 64
"""The most that the columns of a ColumnBatch take for a message, excluding its topic's name."""

AWAITED_LINGER_S: Final = 0.02
SOON_SHARE: Final = 0.2
SOON_LEAST_S: Final = 0.01
BUSY_LINGERS: Final = 5.0
"""How many times longer a message that nobody waits for lingers while a request is under way."""

_TRIED_MOST: Final = 10_000
"""So many topics are remembered; then it begins anew: some gather once more by themselves."""

_GATHER_MOST_S: Final = 1.0
_GATHER_SHARE: Final = 0.1
"""A batch that no sender has taken gathers for at most this long, or this share of the timeout, and
takes no message that has so much more time: its deadline is that of its first message."""


def split(
    messages: Sequence[Message], *, max_messages: int, max_bytes: int
) -> Iterator[Sequence[Message]]:
    """Splits messages into requests within the limits; one that is too long goes alone."""
    start = length_bytes = 0
    for row, message in enumerate(messages):
        row_bytes = message.length_bytes + len(message.topic) + ROW_BYTES
        full = row - start >= max_messages or length_bytes + row_bytes > max_bytes
        if full and row > start:
            yield messages[start:row]
            start, length_bytes = row, 0
        length_bytes += row_bytes
    if start < len(messages):
        yield messages[start:]


class Accumulator:
    """Messages that were taken and are not settled yet, in batches.

    Invariant: `messages` and `length_bytes` count every message from `add` to `finished`,
    whether its batch is open, closed or under way.
    """

    def __init__(
        self, queue: Queue, timeout_s: float, on_wait: Callable[[SendBatch], object]
    ) -> None:
        """Prepares an empty one.

        Args:
            queue: The bounds.
            timeout_s: The client's timeout.
            on_wait: Called by the first caller that waits for a batch, to `expedite` it.
        """
        self._queue: Final = queue
        self._on_wait: Final = on_wait
        self._gather_s: Final = min(_GATHER_MOST_S, _GATHER_SHARE * timeout_s)
        self._closed: Final[deque[SendBatch]] = deque()
        self._open: SendBatch | None = None
        self._untried: SendBatch | None = None  # the open one for topics that are not tried
        self._under_way: Final[set[SendBatch]] = set()
        self._tried: Final[set[str]] = set()
        self._length_bytes = 0
        self.messages = 0
        self._begun_s = -inf  # when the last request began
        self.loop: AbstractEventLoop | None = None
        """The event loop in which batches are sent, if it is one."""

    def unsettled(self) -> set[SendBatch]:
        """The batches that are not settled."""
        return {*self._closed, *self._under_way, *self._still_open()}

    def _still_open(self) -> list[SendBatch]:
        return [one for one in (self._open, self._untried) if one is not None]

    def has_room(self, length_bytes: int) -> bool:
        """Whether a message of that length fits; an empty queue accepts any message."""
        if not self.messages:
            return True
        fits = self._length_bytes + length_bytes <= self._queue.max_bytes
        return fits and self.messages < self._queue.max_messages

    def full(self, message: Message) -> TimedOutError:
        """Returns the error to raise when there was no room for a message in time."""
        return TimedOutError(
            f"no room: messages on their way: {self.messages:,}, bytes: {self._length_bytes:,}",
            outcome_known=True,
            failed=message,
        )

    def add(self, message: Message, now_s: float, deadline_s: float) -> PendingResult:
        """Adds a message that is given up at `deadline_s`."""
        is_tried = message.topic in self._tried
        batch = self._open if is_tried else self._untried
        if batch is not None and self._is_closing(batch, message.length_bytes, now_s, deadline_s):
            self._closed.append(batch)
            batch = None
        if batch is None:
            batch = SendBatch(now_s, deadline_s, self._on_wait, is_tried=is_tried, loop=self.loop)
            if is_tried:
                self._open = batch
            else:
                self._untried = batch
        self.messages += 1
        self._length_bytes += message.length_bytes
        linger_s, soon_s = self._queue.linger, inf
        if message.due_ms is not None:  # levels are resolved when it is sent
            ahead_s = message.due_ms / 1e3 - message.made_ns / 1e9
            soon_s = max(SOON_LEAST_S, SOON_SHARE * ahead_s)
        return batch.add(
            message,
            max(now_s, self._begun_s + min(linger_s, soon_s)),
            max(now_s, self._begun_s + min(BUSY_LINGERS * linger_s, soon_s)),
        )

    def expedite(self, batch: SendBatch | None, now_s: float) -> bool:
        """Notes that a caller waits for a batch (None: those open); whether it may go earlier."""
        still_open = self._still_open()
        for each in still_open if batch is None else [batch]:
            each.expedite(now_s + min(AWAITED_LINGER_S, self._queue.linger))
        return bool(still_open) if batch is None else batch in still_open

    def next_batch(self, now_s: float) -> SendBatch | None:
        """Returns the batch to send now, which is under way from then on."""
        if len(self._under_way) >= self._queue.in_flight:
            return None
        for batch in self._closed:
            if self._may_go(batch):
                self._closed.remove(batch)
                return self._begun(batch, now_s)
        for batch in self._still_open():
            if self._may_go(batch) and self._wait_of(batch, now_s) == 0.0:
                if batch is self._open:
                    self._open = None
                else:
                    self._untried = None
                return self._begun(batch, now_s)
        return None

    def _begun(self, batch: SendBatch, now_s: float) -> SendBatch:
        self._under_way.add(batch)
        self._begun_s = now_s
        return batch

    def _may_go(self, batch: SendBatch) -> bool:
        """Whether another request of its kind may be under way."""
        if batch.is_tried:
            return True
        untried = sum(not one.is_tried for one in self._under_way)
        return untried < max(1, self._queue.in_flight - 1)

    def wait_s(self, now_s: float) -> float | None:
        """Returns how long until `next_batch` has one; None if time alone changes nothing."""
        if len(self._under_way) >= self._queue.in_flight:
            return None
        if self._closed and any(map(self._may_go, self._closed)):
            return 0.0
        wait_s = None if self._open is None else self._wait_of(self._open, now_s)
        if self._untried is not None and self._may_go(self._untried):
            untried_s = self._wait_of(self._untried, now_s)
            return untried_s if wait_s is None else min(wait_s, untried_s)
        return wait_s

    def _wait_of(self, batch: SendBatch, now_s: float) -> float:
        """Returns how long an open batch lingers still."""
        is_full = len(batch.messages) >= self._queue.batch_messages
        if is_full or (batch.is_expedited and not self._under_way):
            return 0.0
        by_s = batch.send_busy_by_s if self._under_way else batch.send_by_s
        return max(0.0, by_s - now_s)

    def put_back(self, batch: SendBatch) -> None:
        """Has a batch sent anew whose sender was cancelled."""
        self._under_way.discard(batch)
        self._closed.appendleft(batch)

    def finished(self, batch: SendBatch) -> None:
        """Frees the room of a settled batch."""
        self._under_way.discard(batch)
        self.messages -= len(batch.messages)
        self._length_bytes -= batch.length_bytes
        if not batch.is_tried:
            if len(self._tried) > _TRIED_MOST:
                self._tried.clear()
            results = batch.results or ()
            self._tried.update(one.message.topic for one in results if one.handle is not None)

    def _is_closing(
        self, batch: SendBatch, length_bytes: int, now_s: float, deadline_s: float
    ) -> bool:
        return (
            len(batch.messages) >= self._queue.batch_messages
            or batch.length_bytes + length_bytes > self._queue.batch_bytes
            or now_s - batch.opened_s > self._gather_s
            # Its first message has less time: it waited for room, or its caller has no more.
            or deadline_s - batch.deadline_s > self._gather_s
        )
