"""What callers do with the SDK at a rate: in the background, with cancels, or as a crowd."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Final

import numpy as np

from delaywheel import AsyncClient, Client
from delaywheel.client.exchange.answers import Cancelled
from delaywheel.client.exchange.pending import PendingResult
from local.bench.jobs import TIMEOUT_S, Paced, Sent, Targets, paced, value_of

CANCELLED_AFTER_S: Final = 1.0
"""How long after a message was sent it is cancelled, if it is one of those."""
CANCELLED_BEFORE_S: Final = 2.0
"""How long before its due that is, at least."""


class Cancelling:
    """Cancels some of the messages that are sent, each by a call."""

    def __init__(self, client: Client, share: float) -> None:
        self._client = client
        self._chance = random.Random(4)  # noqa: S311 - no secret
        self._share = share
        self._waiting: deque[tuple[float, PendingResult]] = deque()
        self._calls = ThreadPoolExecutor(8)
        self._answers: list[Future[Cancelled]] = []

    def take(self, one: PendingResult, due_ms: int, now_ms: int) -> None:
        """Takes a message that was sent; some are cancelled after a while."""
        least_ms = (CANCELLED_AFTER_S + CANCELLED_BEFORE_S) * 1000
        if self._share and due_ms - now_ms > least_ms and self._chance.random() < self._share:
            self._waiting.append((time.monotonic() + CANCELLED_AFTER_S, one))

    def go_on(self) -> None:
        """Begins the cancels whose time has come."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            one = self._waiting.popleft()[1]
            self._answers.append(self._calls.submit(self._cancel, one))

    def _cancel(self, one: PendingResult) -> Cancelled:
        return self._client.cancel(one.result())

    def end(self) -> int:
        """Waits for all of them; returns how many were cancelled."""
        while self._waiting:
            self.go_on()
            time.sleep(0.01)
        with self._calls:
            return sum(answer.result().outcome.name == "CANCELLED" for answer in self._answers)


def send_in_background(client: Client, job: Paced, family: str) -> Sent:
    """Sends messages at a rate by one client's queue."""
    chance, targets = np.random.default_rng(2), Targets(family, job.topics)
    cancelling = Cancelling(client, job.senders.cancelled)
    pending: deque[PendingResult] = deque()
    started, messages = time.monotonic(), 0
    for count in paced(job.program_per_s, job.seconds):
        now_ms = time.time_ns() // 1_000_000
        for ahead_ms in chance.integers(*job.ahead_ms, count).tolist():
            due_ms = now_ms + ahead_ms
            at = datetime.fromtimestamp(due_ms / 1000, UTC)
            topic, key = targets.next()
            one = client.produce_async(topic, value_of(due_ms * 1000), key=key, deliver_at=at)
            pending.append(one)
            cancelling.take(one, due_ms, now_ms)
        messages += count
        cancelling.go_on()
        while pending and pending[0].done():
            pending.popleft().result()
    seconds = time.monotonic() - started
    for one in pending:
        one.result()
    return Sent(messages, seconds, cancelled=cancelling.end())


async def send_as_crowd(address: str, job: Paced, family: str) -> Sent:
    """Sends messages by many clients, each with its own connection, one after another."""
    every_s, started = job.senders.clients / job.program_per_s, time.monotonic()

    async def client_sends(number: int) -> int:
        chance, targets = random.Random(number), Targets(family, job.topics)  # noqa: S311
        sent = 0
        async with AsyncClient(address, timeout=TIMEOUT_S) as client:
            at_s = started + chance.random() * every_s
            while at_s < started + job.seconds:
                await asyncio.sleep(at_s - time.monotonic())
                due_ms = time.time_ns() // 1_000_000 + chance.randrange(*job.ahead_ms)
                due = datetime.fromtimestamp(due_ms / 1000, UTC)
                topic, key = targets.next()
                await client.produce(topic, value_of(due_ms * 1000), key=key, deliver_at=due)
                sent += 1
                at_s += every_s
        return sent

    counts = await asyncio.gather(*(client_sends(number) for number in range(job.senders.clients)))
    return Sent(sum(counts), time.monotonic() - started)
