"""Handlers on several threads: records of one key one after another, others at the same time.

Each thread has a short queue, and the key of a record says which. What has not begun when the
consumer ends, or when a handler raised what means no outcome, is handed back: it is waiting again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count as counting
from queue import Empty, Full, Queue, SimpleQueue
from typing import Final
from zlib import crc32

from delaywheel.consumer.batch import Batch
from delaywheel.consumer.message import ReceivedMessage

DEPTH: Final = 16
"""How many records may wait for one thread: behind a slow one the others are kept busy."""

_LOOK_S: Final = 0.1


class HandlerThreads:
    """Threads that handle what one loop takes."""

    def __init__(self, handle: Callable[[ReceivedMessage], object], concurrency: int) -> None:
        """Starts nothing yet.

        Raises:
            ValueError: `concurrency` is below 1.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency}: at least 1")
        self._handle = handle
        self._queues: list[Queue[ReceivedMessage | None]] = [
            Queue(DEPTH) for _ in range(concurrency)
        ]
        self._numbers = counting()
        self._raised: SimpleQueue[BaseException] = SimpleQueue()

    def run(
        self,
        take: Callable[[int], Batch],
        has_ended: Callable[[], bool],
        hand_back: Callable[[Sequence[ReceivedMessage]], None],
    ) -> None:
        """Handles what can be taken until the end.

        Args:
            take: Returns up to so many messages; waits a moment for the first.
            has_ended: Whether there will be none.
            hand_back: Takes back messages whose handling has not begun.

        Raises:
            BaseException: What a handler raised that means neither retry nor dead.
        """
        threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"handler-{n}", daemon=True)
            for n, queue in enumerate(self._queues)
        ]
        for thread in threads:
            thread.start()
        left: list[ReceivedMessage] = []

        def is_over() -> bool:
            return has_ended() or not self._raised.empty()

        try:
            while not is_over():
                for message in take(self._room()):
                    if left or not self._offer(message, is_over):
                        left.append(message)
        finally:
            for queue in self._queues:
                left = [*_emptied(queue), *left]
                queue.put(None)
            hand_back(left)
            for thread in threads:
                thread.join()
        if not self._raised.empty():
            raise self._raised.get()

    def _room(self) -> int:
        return max(1, sum(DEPTH - queue.qsize() for queue in self._queues))

    def _offer(self, message: ReceivedMessage, is_over: Callable[[], bool]) -> bool:
        """Gives a message to its thread, once that has room; False if the end came first."""
        key = message.key
        number = next(self._numbers) if key is None else crc32(key)
        queue = self._queues[number % len(self._queues)]
        message.handed_s = math.inf  # a handler has it once a thread takes it from its queue
        while not is_over():
            try:
                queue.put(message, timeout=_LOOK_S)
            except Full:
                continue
            return True
        return False

    def _work(self, queue: Queue[ReceivedMessage | None]) -> None:
        while (message := queue.get()) is not None:
            message.handed_s = time.monotonic()
            try:
                with message:
                    self._handle(message)
            except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
                self._raised.put(error)
                return


def _emptied(queue: Queue[ReceivedMessage | None]) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    while True:
        try:
            message = queue.get_nowait()
        except Empty:
            return found
        if message is not None:
            found.append(message)
