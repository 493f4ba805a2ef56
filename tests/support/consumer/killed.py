"""Consumers that are killed, and what their group's topics must hold all the same."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Self

from confluent_kafka import Message
from confluent_kafka.admin import AdminClient

from delaywheel.consumer import Partition
from delaywheel.consumer.kafka.order_topic import OrderTopics
from delaywheel.consumer.kafka.topics import ends_of
from delaywheel.consumer.order import Away
from support.consumer.plan import LEVELS_MS, Plan
from support.kafka.read_committed import headers_of
from support.server.forked import Forked, fork_program


def check_histories(plan: Plan, sent: int, back: list[Message], dead: list[Message]) -> int:
    """Checks attempts, delays and ends against the plan; returns the greatest lateness in ms."""
    histories: dict[int, list[tuple[int, int, Message]]] = defaultdict(list)
    latest_ms = 0
    for message in sorted(back, key=_due_ms):
        reported = {name: value or b"" for name, value in headers_of(message)}
        attempt, due_ms = int(reported["dw-retry-attempt"]), _due_ms(message)
        histories[int(message.value() or b"")].append((attempt, due_ms, message))
        late_ms = message.timestamp()[1] - due_ms
        assert late_ms >= 0
        latest_ms = max(latest_ms, late_ms)
        assert reported["dw-retry-last-error"] == b"PlannedError: %d" % (attempt - 1)
        assert reported["dw-retry-first-error"] == b"PlannedError: 1"
        before_ms = int(reported["dw-retry-origin-timestamp"])
        if attempt > 2:
            earlier = [due for known, due, _ in histories[int(message.value() or b"")]]
            before_ms = max((due for due in earlier if due != due_ms), default=before_ms)
        assert due_ms - before_ms >= LEVELS_MS[attempt - 2]
    for number in range(sent):
        attempts = sorted(attempt for attempt, _, _ in histories[number])
        assert attempts == list(range(2, plan.retries(number) + 2)), number
    died = sorted(int(message.value() or b"") for message in dead)
    assert died == [number for number in range(sent) if plan.dies(number)]
    return latest_ms


def still_away(address: str, order_topic: str, *, partitions: int) -> list[Away]:
    """Returns what an order topic says is to come back."""
    client = {"bootstrap.servers": address}
    admin = AdminClient({**client})
    topics = OrderTopics(client, "reader", lambda wanted: ends_of(admin, wanted))
    read = topics.read([Partition(order_topic, number) for number in range(partitions)])
    return [one for away in read.values() for one in away]


def _due_ms(message: Message) -> int:
    return int(dict(headers_of(message))["dw-due"] or b"")


class Consumers:
    """Three consumers of one group in separate processes."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._processes: list[Forked] = []
        self._said_before: dict[int, int] = {}  # how long a log was when its last process started

    def __enter__(self) -> Self:
        self._processes = [self._start(number) for number in range(3)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def kill(self, number: int) -> None:
        """Ends one as a power cut would, and starts it again."""
        self._processes[number].kill()
        self._processes[number].wait()
        self._processes[number] = self._start(number)

    def restart_stopped(self, reason: str = "") -> int:
        """Starts those again that have stopped by themselves; returns how many had.

        Args:
            reason: What each must have said.
        """
        for number in (stopped := self._stopped()):
            assert reason in (said := self._last_words(number)), said
            self._processes[number] = self._start(number)
        return len(stopped)

    def check_alive(self) -> None:
        """Fails with the last words of those that have stopped."""
        said = [self._last_words(number) for number in self._stopped()]
        assert not said, "\n".join(said)

    def _stopped(self) -> list[int]:
        return [n for n, process in enumerate(self._processes) if process.poll() is not None]

    def _last_words(self, number: int) -> str:
        said = self._log(number).read_bytes()[self._said_before[number] :]
        return said.decode(errors="replace")[-2_000:]

    def _log(self, number: int) -> Path:
        return self._folder / f"consumer-{number}.log"

    def _start(self, number: int) -> Forked:
        arguments, log = (json.dumps(asdict(self._plan)), f"c{number}"), self._log(number)
        self._said_before[number] = log.stat().st_size if log.exists() else 0
        return fork_program("consumer", arguments, log=log)
