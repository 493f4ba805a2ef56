"""Which topics Kafka has, as far as this node knows.

Only a topic that Kafka is *known* not to have is refused: Kafka said so after the question was
asked. In doubt (Kafka away, no answer in time) the message is accepted: should the topic be
missing at its due, it goes to the dead letters, and nothing is lost.

=================  ==========================================  ===============================
known of a topic   how                                         a message for it
=================  ==========================================  ===============================
present            told, or found in ``topics.json``           accepted, at once
absent             told, and the telling is under 2 s old      refused, at once
nothing            neither, or the telling of absence is old   the cleaner is asked; accepted
                                                               unless it says "absent" in time
=================  ==========================================  ===============================
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from delaywheel.disk import Disk
from delaywheel.reasons import Reason
from delaywheel_replica.cleaner.outcomes import FORWARD_ROOM_BYTES
from delaywheel_replica.link import AskTopic, TopicInfo, Topics
from delaywheel_replica.server.refusals import Refusal
from delaywheel_replica.server.requests import Batch, is_topic_name

ANSWER_WAIT_S: Final = 1.2
ABSENT_FOR_MS: Final = 2_000
# A caller may invent names without end; those that wait or were absent are bounded.
_ABSENT_AT_MOST: Final = 10_000
_ASKED_AT_MOST: Final = 1_000


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class KnownTopics:
    """The node's memory of Kafka's topics. For the event loop's thread."""

    def __init__(
        self,
        disk: Disk,
        path: Path,
        *,
        ask: Callable[[AskTopic], bool],
        refuses_absent: bool,
        wait_s: float = ANSWER_WAIT_S,
    ) -> None:
        """Reads what was known before.

        Args:
            disk: where the cache lies.
            path: the cache.
            ask: sends a question to the cleaner.
            refuses_absent: False when missing topics are created at their due.
            wait_s: how long an unknown topic is waited for.
        """
        self._disk = disk
        self._path = path
        self._ask = ask
        self._refuses_absent = refuses_absent
        self._wait_s = wait_s
        self._present = _load(disk, path)
        self._absent_ms: dict[str, int] = {}
        self._asked: dict[str, asyncio.Future[None]] = {}
        self._unsaved = False

    async def check(self, batch: Batch) -> None:
        """Refuses those messages of a batch that Kafka would not take."""
        names = [name for name in batch.columns.topics if is_topic_name(name)]
        if self._refuses_absent:
            unknown = [name for name in names if not self._is_known(name)]
            if unknown:
                await self._find_out(unknown)
        for number, name in enumerate(batch.columns.topics):
            if name in self._present:
                self._check_against(batch, number, self._present[name])
            elif self._refuses_absent and self._is_absent(name):
                rows = np.flatnonzero(batch.columns.topic_numbers == number)
                batch.refuse(rows, Refusal(Reason.TOPIC_UNKNOWN, f"Kafka has no topic {name}"))

    def learn(self, message: Topics) -> None:
        """Takes in what the cleaner says."""
        for name, info in message.topics.items():
            self._unsaved |= self._present.get(name) != info
            self._present[name] = info
            self._absent_ms.pop(name, None)
            self._settle(name)
        for name in message.absent:
            self._unsaved |= self._present.pop(name, None) is not None
            self._absent_ms.pop(name, None)  # so that the order is that of the telling
            self._absent_ms[name] = message.checked_at_ms
            self._settle(name)
        while len(self._absent_ms) > _ABSENT_AT_MOST:
            del self._absent_ms[next(iter(self._absent_ms))]

    def save_changes(self) -> None:
        """Writes the cache if something changed; may be called on another thread."""
        if not self._unsaved:
            return
        self._unsaved = False
        present = self._present.copy()
        document = {
            name: [info.partitions, info.max_message_bytes] for name, info in present.items()
        }
        self._unsaved = False
        try:
            self._disk.replace_file(self._path, json.dumps(document).encode())
        except OSError:
            self._unsaved = True
            raise

    def _is_known(self, name: str) -> bool:
        return name in self._present or self._is_absent(name)

    def _is_absent(self, name: str) -> bool:
        told_ms = self._absent_ms.get(name)
        return told_ms is not None and _monotonic_ms() - told_ms < ABSENT_FOR_MS

    async def _find_out(self, names: Iterable[str]) -> None:
        """Waits for the cleaner's word on each, but not for long."""
        waiting = []
        for name in names:
            asked = self._asked.get(name)
            if asked is None and len(self._asked) < _ASKED_AT_MOST and self._ask(AskTopic(name)):
                asked = self._asked[name] = asyncio.get_running_loop().create_future()
            if asked is not None:
                waiting.append(asked)
        if not waiting:
            return
        await asyncio.wait(waiting, timeout=self._wait_s)
        for name in names:
            self._settle(name)

    def _settle(self, name: str) -> None:
        asked = self._asked.pop(name, None)
        if asked is not None and not asked.done():
            asked.set_result(None)

    @staticmethod
    def _check_against(batch: Batch, number: int, info: TopicInfo) -> None:
        columns = batch.columns
        mine = columns.topic_numbers == number
        name = columns.topics[number]
        outside = np.flatnonzero(mine & (columns.partitions >= info.partitions))
        if len(outside):
            batch.refuse(
                outside,
                Refusal(Reason.PARTITION_INVALID, f"{name} has {info.partitions} partitions"),
            )
        if info.max_message_bytes is None:
            return
        room = info.max_message_bytes - FORWARD_ROOM_BYTES
        large = np.flatnonzero(mine & (columns.lengths_bytes > room))
        if len(large):
            batch.refuse(
                large,
                Refusal(Reason.MESSAGE_TOO_LARGE, f"{name} takes {room} bytes beside our headers"),
            )


def _load(disk: Disk, path: Path) -> dict[str, TopicInfo]:
    """The cache; empty where there is none, or none that can be read: it is only a cache."""
    try:
        document: Mapping[str, tuple[int, int | None]] = json.loads(disk.read_file(path))
        return {name: TopicInfo(*info) for name, info in document.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}
