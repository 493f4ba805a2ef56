"""A leader's reader in tests of due messages, and its committed progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.due.rows import Dropped, DueMessage
from delaywheel_replica.cleaner.due.steps import Step
from delaywheel_replica.core.protocol.frames import NO_FRAMES
from delaywheel_replica.core.protocol.progress import Progress
from support.core.violations import violations
from support.due.wheels import Sent, Wheels

SECOND = 1_700_000_000
START_MS = SECOND * 1000
EMPTY = Progress(START_MS, None, {}, SECOND - 120)


class Leader:
    """One leader's reader, and its committed progress."""

    def __init__(
        self, wheels: Wheels, progress: Progress = EMPTY, *, preload_thread: bool = False
    ) -> None:
        self.wheels = wheels
        self.reader = DueReader(wheels.disk, wheels.data, preload_thread=preload_thread)
        self.progress = progress
        self.messages: list[DueMessage] = []
        self.dropped: list[Dropped] = []
        self.lost = NO_FRAMES
        self.reader.start(progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()

    def look(self, now_ms: int, cap_messages: int = 1000, cap_bytes: int = 1 << 20) -> Step:
        self.reader.update(self.wheels.last_seqs(), self.lost)
        return self.reader.next_step(now_ms, cap_messages, cap_bytes)

    def lose(self) -> None:
        """Commits that all members are missing the awaited frames."""
        self.lost |= self.reader.unreadable

    def commit(self, step: Step) -> None:
        assert violations(self.progress, step.after) == []
        self.messages += step.messages
        self.dropped += step.dropped
        self.progress = step.after
        self.reader.done(step)

    def forward(self, now_ms: int, cap_messages: int = 1000, cap_bytes: int = 1 << 20) -> int:
        """Commits steps until nothing more can be done; returns how many."""
        for number in range(1, 100_000):
            step = self.look(now_ms, cap_messages, cap_bytes)
            self.commit(step)
            waits = bool(self.reader.unreadable) and not step and step.before == step.after
            if waits or not step.behind:
                return number
        raise AssertionError("there is no end to it")


def message(due_ms: int, number: int = 0, **fields: object) -> Sent:
    return replace(Sent(due_ms, number.to_bytes(16, "big")), **fields)  # type: ignore[arg-type]


def numbers(messages: Sequence[DueMessage | Dropped]) -> list[int]:
    return [int.from_bytes(message.id, "big") for message in messages]


def until(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
