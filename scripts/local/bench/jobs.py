"""The jobs that senders do, their results, and how callers of the SDK do those at a rate.

Each message of a job has a stamp: its due or, where Kafka sends at once, the time of sending (see
`consuming`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Final

import numpy as np

from delaywheel import AsyncClient, Client, DelaywheelError, Tls
from delaywheel.client.exchange.answers import Cancelled
from delaywheel.client.exchange.pending import PendingResult
from delaywheel.transactions import CommitOutcome
from local.bench.consuming import STAMP, topic_names
from local.bench.workloads import Accept, Senders, Topics
from local.loopback.cluster import ClusterError
from local.stage.traffic import IN_DOUBT

VALUE_BYTES: Final = 200
TICK_S: Final = 0.01
TIMEOUT_S: Final = 60.0
CANCELLED_AFTER_S: Final = 1.0
"""How long after a message was sent it is cancelled, if it is one of those."""
CANCELLED_BEFORE_S: Final = 2.0
"""How long before its due that is, at least."""
HALF_GROUP: Final = "bench"
HOLD: Final = "8s"
_FILLER: Final = random.Random(1).randbytes(VALUE_BYTES - STAMP.size)  # noqa: S311 - no secret


class Waiters(Enum):
    """What the coroutine of a message does, and waits for.

    The last two wait for their moment in the same way: what the program itself is late by counts
    in both.
    """

    SEND = "send it, due later"
    SEND_WHEN_DUE = "wait until it is due, and send it"
    COMMIT_WHEN_DUE = "begin a half, wait until it is due, and commit it"


@dataclass(frozen=True, slots=True)
class Paced:
    """A job: messages at a rate, due `ahead_ms` later.

    Attributes:
        rate_per_s: Of all programs that do it at the same time.
        seconds: How long it lasts.
        ahead_ms: Between which times ahead the dues are.
        topics: Where messages go.
        senders: Who sends them.
        waiters: What a coroutine does for each message; None: they go by a queue.
    """

    rate_per_s: int
    seconds: float
    ahead_ms: tuple[int, int]
    topics: Topics = Topics()  # noqa: RUF009 - frozen
    senders: Senders = Senders()  # noqa: RUF009 - frozen
    waiters: Waiters | None = None

    @property
    def program_per_s(self) -> float:
        """The rate of one program."""
        return self.rate_per_s / self.senders.programs

    @property
    def lead_s(self) -> float:
        """Returns seconds until as many messages are due as are sent; 0 if never."""
        return self.ahead_ms[1] / 1000 if self.seconds > self.ahead_ms[1] / 1000 else 0.0


@dataclass(frozen=True, slots=True)
class At:
    """A job: messages due in the second that begins at `from_ms`."""

    messages: int
    from_ms: int


@dataclass(frozen=True, slots=True)
class Bulk:
    """A job: as many messages as are accepted in a time."""

    how: Accept
    seconds: float


Job = Paced | At | Bulk


class Targets:
    """Chooses where each message of a job goes."""

    def __init__(self, family: str, topics: Topics) -> None:
        """Prepares for a family of topics."""
        self._names = topic_names(family, topics.count)
        self._keyed = topics.keyed
        self._chance = random.Random(4)  # noqa: S311 - no secret

    def next(self) -> tuple[str, bytes | None]:
        """Returns a topic and a key."""
        topic = self._names[0] if len(self._names) == 1 else self._chance.choice(self._names)
        return topic, self._chance.randbytes(8) if self._keyed else None


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a job in which every message was acknowledged.

    Attributes:
        messages: The number of messages.
        seconds: How long sending took; it includes the last acknowledgement only for `Bulk`.
        transactions: The number of committed transactions.
        cancelled: How many of the messages were cancelled, and never arrive.
        times_ms: How long each `produce` took, where each is awaited.
    """

    messages: int
    seconds: float
    transactions: int = 0
    cancelled: int = 0
    times_ms: tuple[float, ...] = ()

    @property
    def per_s(self) -> float:
        """The rate in messages a second."""
        return self.messages / self.seconds

    @classmethod
    def of_all(cls, parts: Sequence[Sent]) -> Sent:
        """Returns what several programs sent at the same time."""
        return cls(
            sum(each.messages for each in parts),
            max(each.seconds for each in parts),
            sum(each.transactions for each in parts),
            sum(each.cancelled for each in parts),
            tuple(time_ms for each in parts for time_ms in each.times_ms),
        )


def paced(rate_per_s: float, seconds: float) -> Iterator[int]:
    """Yields how many messages to send at each tick, to keep the rate."""
    started_at = time.monotonic()
    sent, total = 0, int(rate_per_s * seconds)
    while sent < total:
        due = min(int((time.monotonic() - started_at) * rate_per_s), total)
        if due > sent:
            yield due - sent
            sent = due
        time.sleep(TICK_S)


def value_of(stamp_us: int) -> bytes:
    """Returns a value that contains its stamp."""
    return STAMP.pack(stamp_us) + _FILLER


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
        """Cancels a message; what is unknown is asked again until it is not."""
        handle, in_doubt, until_s = one.result(), False, time.monotonic() + TIMEOUT_S
        while True:
            try:
                cancelled = self._client.cancel(handle)
            except DelaywheelError as error:
                if time.monotonic() > until_s:
                    raise
                in_doubt |= not error.outcome_known
            else:
                is_known = not in_doubt or cancelled.outcome not in IN_DOUBT
                if is_known or time.monotonic() > until_s:
                    return cancelled
            time.sleep(1.0)

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


async def send_awaited(address: str, job: Paced, family: str, tls: Tls | None = None) -> Sent:
    """Sends messages, or half messages, by one client; a coroutine waits for each.

    Those that are sent at the same time go in one call, of either kind: the client gathers them.
    """
    targets, chance = Targets(family, job.topics), random.Random(2)  # noqa: S311 - no secret

    async with AsyncClient(address, tls=tls, timeout=TIMEOUT_S) as client:

        async def send(due_ms: int) -> None:
            topic, key = targets.next()
            value = value_of(due_ms * 1000)
            if job.waiters is not Waiters.COMMIT_WHEN_DUE:
                if job.waiters is Waiters.SEND_WHEN_DUE:
                    await asyncio.sleep(due_ms / 1000 - time.time())
                due = datetime.fromtimestamp(due_ms / 1000, UTC)
                await (await client.produce_async(topic, value, key=key, deliver_at=due))
                return
            half = await client.begin(topic, value, key=key, group=HALF_GROUP, hold=HOLD)
            await asyncio.sleep(due_ms / 1000 - time.time())
            if await half.commit() is not CommitOutcome.COMMITTED:
                raise ClusterError(f"a half was to be committed, and is {half.outcome}")

        started, total, sent = time.monotonic(), int(job.program_per_s * job.seconds), 0
        async with asyncio.TaskGroup() as sending:
            while sent < total:
                wanted = min(int((time.monotonic() - started) * job.program_per_s), total)
                due_ms = time.time_ns() // 1_000_000 + chance.randrange(*job.ahead_ms)
                for _ in range(wanted - sent):
                    sending.create_task(send(due_ms))
                sent = wanted
                await asyncio.sleep(TICK_S)
            seconds = time.monotonic() - started
    return Sent(total, seconds)


async def send_as_crowd(address: str, job: Paced, family: str, tls: Tls | None = None) -> Sent:
    """Sends messages by many clients, each with its own connection, one after another."""
    every_s, started = job.senders.clients / job.program_per_s, time.monotonic()
    times_ms: list[float] = []

    async def client_sends(number: int) -> None:
        chance, targets = random.Random(number), Targets(family, job.topics)  # noqa: S311
        async with AsyncClient(address, tls=tls, timeout=TIMEOUT_S) as client:
            at_s = started + chance.random() * every_s
            while at_s < started + job.seconds:
                await asyncio.sleep(at_s - time.monotonic())
                due_ms = time.time_ns() // 1_000_000 + chance.randrange(*job.ahead_ms)
                due = datetime.fromtimestamp(due_ms / 1000, UTC)
                topic, key = targets.next()
                began_s = time.monotonic()
                await client.produce(topic, value_of(due_ms * 1000), key=key, deliver_at=due)
                times_ms.append((time.monotonic() - began_s) * 1000)
                at_s += every_s

    await asyncio.gather(*(client_sends(number) for number in range(job.senders.clients)))
    return Sent(len(times_ms), time.monotonic() - started, times_ms=tuple(times_ms))
