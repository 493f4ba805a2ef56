"""Makes and sends messages on schedule: planned ones, and a steady stream."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from typing import NamedTuple

from delaywheel import AsyncClient, Client, DelaywheelError, Handle, Message, Result
from local.stage.tally import NOT_CANCELLED, UNKNOWN, Content, Header, Tally

LEAD_S = (0.3, 6.0)
_ASKED_AGAIN = 5
_AGAIN_S = 2.0
IN_DOUBT = {UNKNOWN, NOT_CANCELLED, "TOO_LATE", "NOT_FOUND"}
"""What says nothing of an earlier call that may have had an effect."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Planned(NamedTuple):
    """A message to be made and sent at a given time of the run, with its due."""

    send_after_s: float
    due_after_s: float
    content: Content


def plan(messages: int, seconds: float, chance: random.Random) -> list[Planned]:
    """Returns messages with random dues, each sent a random time ahead."""
    planned = []
    for number in range(messages):
        due_after_s = chance.uniform(1.0, max(seconds, 1.0))
        send_after_s = max(0.0, due_after_s - chance.uniform(*LEAD_S))
        planned.append(Planned(send_after_s, due_after_s, content_of(number, chance)))
    return sorted(planned, key=_send_after_s)


def steady(rate_per_s: float, chance: random.Random) -> Iterator[Planned]:
    """Yields messages with evenly spaced dues, each sent a random time ahead."""
    ahead: list[Planned] = []  # a heap
    for number in itertools.count():
        # Whatever comes later is sent later than this.
        until_s = number / rate_per_s
        due_after_s = LEAD_S[1] + until_s
        lead_s = chance.uniform(*LEAD_S)
        heappush(ahead, Planned(due_after_s - lead_s, due_after_s, content_of(number, chance)))
        while ahead and ahead[0].send_after_s <= until_s:
            yield heappop(ahead)


def burst(messages: int, ahead_s: float, chance: random.Random) -> list[Planned]:
    """Returns messages that are sent at once and are due in the same millisecond."""
    return [Planned(0.0, ahead_s, content_of(number, chance)) for number in range(messages)]


def _send_after_s(planned: Planned) -> float:
    return planned.send_after_s


def content_of(number: int, chance: random.Random) -> Content:
    """Returns the content of a message.

    It includes contents that are easily confused: null and empty keys, values and header values,
    headers of the same name, and bytes that are not text.
    """
    key = chance.choice((None, b"", f"order-{number % 997}".encode()))
    value = chance.choice((None, b"", b"\x00\xff" + chance.randbytes(chance.randint(1, 300))))
    if number % 8:
        value = f'{{"order": {number}, "state": "unpaid"}}'.encode()
    headers: list[Header] = [("trace", chance.randbytes(16)), ("attempt", b"1"), ("attempt", b"2")]
    headers += chance.choice(([], [("empty", b"")], [("null", None)]))
    return Content(key, value, tuple(headers))


class Traffic(ABC):
    """Sends messages from a thread of its own, until all are made or it is stopped."""

    def __init__(self, topic: str, tally: Tally) -> None:
        """Prepares; nothing is sent before `start`.

        Args:
            topic: Where to.
            tally: Notes what is sent, and what became of it.
        """
        self._topic = topic
        self._tally = tally
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self.started_at = 0.0

    def start(self) -> None:
        """Starts; what is planned counts from now."""
        self.started_at = time.time()
        self._thread.start()

    @property
    def is_made(self) -> bool:
        """Whether the thread has ended.

        Raises:
            Exception: What went wrong in the thread.
        """
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stops making messages; what is sent is still retried, or cancelled."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._make()
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            self._failure = error

    @abstractmethod
    def _make(self) -> None:
        """Makes messages until all are made, or `stop` was called."""


class Sending(Traffic):
    """Makes each message on schedule, and sends it in the background."""

    def __init__(
        self, client: Client, topic: str, planned: Iterable[Planned], tally: Tally
    ) -> None:
        """Prepares.

        Args:
            client: Sends; retries while a node is away.
            topic: Where to.
            planned: In the order of sending; may be without end.
            tally: Notes what is sent, and what became of it.
        """
        super().__init__(topic, tally)
        self._client = client
        self._planned = planned

    def _make(self) -> None:
        for planned in self._planned:
            wait_s = self.started_at + planned.send_after_s - time.time()
            if self._stopped.wait(wait_s) if wait_s > 0 else self._stopped.is_set():
                return
            self._send(planned)

    def _send(self, planned: Planned) -> None:
        due_ms = round((self.started_at + planned.due_after_s) * 1000)
        key, value, headers = planned.content
        pending = self._client.produce_async(
            self._topic,
            value,
            key=key,
            headers=headers,
            deliver_at=EPOCH + timedelta(milliseconds=due_ms),
        )
        self._tally.sent(pending.message.id, due_ms, planned.content)
        pending.add_done_callback(self._settled)

    def _settled(self, result: Result) -> None:
        if result.handle is not None and result.message.due_ms is not None:
            self._tally.acknowledged(result.message.id, result.message.due_ms)
        else:
            self._tally.not_acknowledged()


class CancelledTraffic(Traffic):
    """Sends messages at a rate, and cancels each at some time before its due, or just after it.

    Its thread has an event loop, and ends once the last cancel is answered: each is awaited,
    whatever becomes of those before. What is unknown is asked again until it is not.
    """

    def __init__(
        self, addresses: Sequence[str], topic: str, rate_per_s: float, tally: Tally
    ) -> None:
        super().__init__(topic, tally)
        self._addresses = addresses
        self._rate_per_s = rate_per_s
        self._chance = random.Random()  # noqa: S311 - no secret

    def _make(self) -> None:
        asyncio.run(self._send_all())

    async def _send_all(self) -> None:
        began_s, made = time.monotonic(), 0
        async with AsyncClient(self._addresses, timeout=60) as client, asyncio.TaskGroup() as tasks:
            while not self._stopped.is_set():
                wanted = int((time.monotonic() - began_s) * self._rate_per_s)
                messages = [self._message(made + number) for number in range(wanted - made)]
                made = wanted
                if messages:
                    tasks.create_task(self._send(client, messages, tasks))
                await asyncio.sleep(0.05)

    def _message(self, number: int) -> Message:
        key, value, headers = content = content_of(number, self._chance)
        due_ms = round((time.time() + self._chance.uniform(*LEAD_S)) * 1000)
        due = EPOCH + timedelta(milliseconds=due_ms)
        message = Message(self._topic, value, key=key, headers=headers, deliver_at=due)
        self._tally.sent(message.id, due_ms, content)
        return message

    async def _send(
        self, client: AsyncClient, messages: list[Message], tasks: asyncio.TaskGroup
    ) -> None:
        for result in await client.produce_many(messages):
            due_ms = result.message.due_ms
            if result.handle is None or due_ms is None:
                self._tally.not_acknowledged()
                continue
            self._tally.acknowledged(result.message.id, due_ms)
            after_s = self._chance.uniform(0, due_ms / 1000 - time.time() + 0.1)
            tasks.create_task(self._cancel(client, result.handle, max(0.0, after_s)))

    async def _cancel(self, client: AsyncClient, handle: Handle, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if await self._ask(client, handle) != UNKNOWN:
            return
        for _ in range(_ASKED_AGAIN):
            await asyncio.sleep(_AGAIN_S)
            if await self._ask(client, handle, in_doubt=True) not in IN_DOUBT:
                return

    async def _ask(self, client: AsyncClient, handle: Handle, *, in_doubt: bool = False) -> str:
        """Asks for a cancel, and notes its outcome; returns it."""
        try:
            outcome = str((await client.cancel(handle, timeout=30)).outcome)
        except DelaywheelError as error:
            outcome = NOT_CANCELLED if error.outcome_known else UNKNOWN
            if not in_doubt:
                self._tally.answered(handle.id, outcome, str(error))
        else:
            if not in_doubt or outcome not in IN_DOUBT:
                self._tally.answered(handle.id, outcome)
        return outcome
