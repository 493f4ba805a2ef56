"""What waits to be sent on one stream: bounded in bytes, in order, of beats only the newest.

Messages are level-triggered: what is lost is told or asked for again. So a full outbox drops what
comes, and never keeps anybody waiting; a beat that a newer one follows is not worth its time.

Beats are paced. The first after a pause goes at once; under load, when a high watermark moves with
every group that is written, they would cost more than the messages they tell of: each takes gRPC
some 0.25 ms of CPU at either end.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

BEAT_GAP_S: Final = 0.005
"""Beats to one peer are so far apart at least."""


@dataclass(slots=True)
class Tally:
    """Counts of one stream to or from one peer, over all its connections; see `Counters`."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    dropped: int = 0
    dropped_bytes: int = 0
    malformed: int = 0
    superseded: int = 0
    connects: int = 0


class Outbox:
    """Messages of one connection, filled by any thread and emptied by one."""

    def __init__(self, max_bytes: int, tally: Tally, *, beat_gap_s: float = BEAT_GAP_S) -> None:
        """Empty.

        Args:
            max_bytes: how much may wait; one message fits whatever its size.
            tally: where sent and dropped messages are counted.
            beat_gap_s: how long after a beat the next one is given out at the earliest.
        """
        self._max_bytes = max_bytes
        self._tally = tally
        self._condition = threading.Condition()
        # With ascending numbers, by which a beat knows its place between the others.
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._beat: tuple[int, bytes] | None = None
        self._beat_gap_s = beat_gap_s
        self._next_beat_s = 0.0
        self._number = 0
        self._bytes = 0
        self._is_closed = False

    def put(self, data: bytes, *, is_beat: bool) -> None:
        """Takes a message, or drops it. A beat takes the place of one that still waits.

        Its place in the order is the end: it says what was true after all that went before.
        """
        with self._condition:
            if self._beat is not None and is_beat:
                self._bytes -= len(self._beat[1])
                self._beat = None
                self._tally.superseded += 1
            full = self._bytes and self._bytes + len(data) > self._max_bytes
            if self._is_closed or full:
                self._drop(data)
                return
            self._number += 1
            self._bytes += len(data)
            if is_beat:
                self._beat = self._number, data
            else:
                self._waiting.append((self._number, data))
            self._condition.notify()

    def taken(self) -> Iterator[bytes]:
        """Each message when its turn has come; ends when the outbox is closed."""
        while (data := self._take()) is not None:
            yield data

    def close(self) -> None:
        """Drops what still waits, and whatever comes."""
        with self._condition:
            self._is_closed = True
            for _, data in self._waiting:
                self._drop(data)
            self._waiting.clear()
            if self._beat is not None:
                self._drop(self._beat[1])
                self._beat = None
            self._condition.notify()

    def _take(self) -> bytes | None:
        with self._condition:
            while not self._is_closed:
                beat, waiting = self._beat, self._waiting
                if waiting and (beat is None or waiting[0][0] < beat[0]):
                    return self._sent(waiting.popleft()[1])
                # What came after a beat waits with it: nothing overtakes it.
                now_s = time.monotonic()
                if beat is not None and now_s >= self._next_beat_s:
                    self._beat = None
                    self._next_beat_s = now_s + self._beat_gap_s
                    return self._sent(beat[1])
                self._condition.wait(None if beat is None else self._next_beat_s - now_s)
            return None

    def _sent(self, data: bytes) -> bytes:
        self._bytes -= len(data)
        self._tally.sent += 1
        self._tally.sent_bytes += len(data)
        return data

    def _drop(self, data: bytes) -> None:
        self._tally.dropped += 1
        self._tally.dropped_bytes += len(data)
