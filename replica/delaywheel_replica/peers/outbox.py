"""The sending side of a stream: messages are written at once if the kernel accepts them.

The rest waits, in order and bounded in bytes, only the newest heartbeat among it, until the
stream's own thread sees that there is room (dialling.py). Messages are level-triggered: what is
lost is sent or asked for again. So a full outbox drops new messages instead of making senders wait,
and a heartbeat followed by a newer one is not sent.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from delaywheel_replica.peers.framing import PING, Part, head_of
from delaywheel_replica.peers.sockets import Channel
from delaywheel_replica.peers.states import Counters


@dataclass(slots=True)
class _Message:
    """One message being sent.

    Attributes:
        number: Its position among the others.
        buffers: The parts not sent yet.
        length_bytes: Of the message itself; 0: it is a ping.
    """

    number: int
    buffers: Sequence[Part]
    length_bytes: int


class Outbox:
    """Outgoing messages of one connection; any thread may send, and none blocks."""

    def __init__(
        self, channel: Channel, max_bytes: int, tally: Counters, *, wake: Callable[[], object]
    ) -> None:
        """Begins empty, on a connection on which nothing else sends.

        Args:
            max_bytes: How much may wait; a single message fits whatever its size.
            tally: Counts sent and dropped messages.
            wake: Called, with a lock held, when a message begins to wait.
        """
        self._channel = channel
        self._max_bytes = max_bytes
        self._tally = tally
        self._wake = wake
        self._lock = threading.Lock()
        # By ascending number, which is a heartbeat's position among the others.
        self._waiting: deque[_Message] = deque()
        self._heartbeat: _Message | None = None
        self._number = 0
        self._bytes = 0
        self._sent_s = time.monotonic()
        self._is_closed = False

    @property
    def waits(self) -> bool:
        """Whether a message waits for room, or a part of one that is encrypted."""
        return bool(self._waiting) or self._heartbeat is not None or self._channel.has_unsent

    def put(self, parts: Sequence[Part], *, is_heartbeat: bool) -> None:
        """Sends, queues or drops a message. A heartbeat replaces one that waits.

        It goes to the end of the queue: it describes the state after all earlier messages.
        """
        head = head_of(parts)
        length_bytes = sum(map(len, parts))
        with self._lock:
            if is_heartbeat and self._heartbeat is not None:
                self._bytes -= self._heartbeat.length_bytes
                self._heartbeat = None
                self._tally.superseded += 1
            full = self._bytes and self._bytes + length_bytes > self._max_bytes
            if self._is_closed or full:
                self._drop(length_bytes)
                return
            self._keep((head, *parts), length_bytes, is_heartbeat=is_heartbeat)

    def flush(self) -> None:
        """Sends waiting messages as far as there is room."""
        with self._lock:
            self._flush()

    def ping(self, idle_s: float) -> float:
        """Sends a ping if nothing was sent for long; returns how long until the next is due."""
        with self._lock:
            left_s = self._sent_s + idle_s - time.monotonic()
            if left_s > 0:
                return left_s
            if not self._is_closed and not self.waits:
                self._keep((PING,), 0, is_heartbeat=False)
            return idle_s

    def end(self) -> None:
        """Ends the connection, which its thread will notice."""
        self._channel.end()

    def is_gone(self) -> bool:
        """Whether the peer has closed the connection, or its process has ended."""
        return self._channel.is_gone()

    def close(self) -> None:
        """Drops waiting and later messages; nothing more is sent."""
        with self._lock:
            self._close()

    # --- with the lock held

    def _keep(self, buffers: Sequence[Part], length_bytes: int, *, is_heartbeat: bool) -> None:
        waited = self.waits
        self._number += 1
        self._bytes += length_bytes
        message = _Message(self._number, buffers, length_bytes)
        if is_heartbeat:
            self._heartbeat = message
        else:
            self._waiting.append(message)
        if not waited:
            self._flush()
            if self.waits:
                self._wake()

    def _flush(self) -> None:
        try:
            self._channel.push()
        except OSError:
            self._close()
        while (message := self._first()) is not None:
            count = self._write(message.buffers)
            if not count:
                return
            message.buffers = _without(count, message.buffers)
            if message is self._heartbeat:
                self._heartbeat = None
                if message.buffers:
                    # It has begun, so it cannot be replaced: it waits like the others.
                    self._waiting.appendleft(message)
            elif not message.buffers:
                self._waiting.popleft()
            if not message.buffers:
                self._count_sent(message)

    def _first(self) -> _Message | None:
        heartbeat, waiting = self._heartbeat, self._waiting
        if waiting and (heartbeat is None or waiting[0].number < heartbeat.number):
            return waiting[0]
        return heartbeat

    def _write(self, buffers: Sequence[Part]) -> int:
        """Returns how many bytes the kernel accepted; 0 also if the connection broke."""
        try:
            count = self._channel.send_some(buffers)
        except BlockingIOError:
            return 0
        except OSError:
            self._close()
            return 0
        self._sent_s = time.monotonic()
        return count

    def _count_sent(self, message: _Message) -> None:
        self._bytes -= message.length_bytes
        if message.length_bytes:
            self._tally.sent += 1
            self._tally.sent_bytes += message.length_bytes

    def _close(self) -> None:
        self._is_closed = True
        for message in self._waiting:
            self._drop(message.length_bytes)
        if self._heartbeat is not None:
            self._drop(self._heartbeat.length_bytes)
        self._waiting.clear()
        self._heartbeat = None

    def _drop(self, length_bytes: int) -> None:
        if length_bytes:
            self._tally.dropped += 1
            self._tally.dropped_bytes += length_bytes


def _without(count: int, buffers: Sequence[Part]) -> list[Part]:
    left: list[Part] = []
    for buffer in buffers:
        if count < len(buffer):
            left.append(memoryview(buffer)[count:] if count else buffer)
            count = 0
        else:
            count -= len(buffer)
    return left
