"""Which topics Kafka has, as far as this node knows.

Only a fresh report from Kafka refuses a message: Kafka has no such topic or partition, or accepts
nothing so large. In doubt (Kafka away, no answer in time) the message is accepted: if the doubt
proves right at its due, it becomes a dead letter, and nothing is lost.

=====================  ========================================  ===============================
known of a topic       how                                       a message for it
=====================  ========================================  ===============================
present, and suits it  reported, or found in ``topics.json``     accepted, at once
present, and does not  reported less than 2 s ago                refused, at once
the same               reported earlier, or from the file        the cleaner is asked; refused
                                                                 if it confirms it in time
absent                 reported less than 2 s ago                refused, at once
nothing                no report, or an old one of absence       the cleaner is asked; accepted
                                                                 unless it says "absent" in time
=====================  ========================================  ===============================

In time is within ``ANSWER_WAIT_S``: Kafka is asked twice about a topic that it does not have, and
the cleaner of a leader answers between its transactions. Where it has left a question unanswered,
as it does while Kafka is away, the next ones wait ``DOUBT_WAIT_S`` only, until it answers again.

The cleaner is asked for ``ASKED_AT_MOST`` names at a time, and of a principal (or a connection
without a name) for no more than are left to others. While that many wait for its answer, messages
for further unknown names are refused with BACKPRESSURE: callers that invent names overload neither
the cleaner nor Kafka, nor take the room of others.

A request may have thousands of topics, so it may be judged on any thread; only the loop's thread
asks the cleaner.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import is_topic_name
from delaywheel.reasons import Reason
from delaywheel.storage.folder.disk import Disk
from delaywheel.storage.frames.bounded import BoundedTable
from delaywheel_replica.kafka_settings import FORWARD_ROOM_BYTES
from delaywheel_replica.link import AskTopic, TopicInfo, Topics
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.access.shared_room import SharedRoom
from delaywheel_replica.server.intake.validate import RequestBatch
from delaywheel_replica.server.node.node_view import monotonic_ms
from delaywheel_replica.server.node.refusals import Refusal

ANSWER_WAIT_S: Final = 4.5
DOUBT_WAIT_S: Final = 1.2
FRESH_FOR_MS: Final = 2_000
ASKED_AT_MOST: Final = 1_000
# Callers may invent names without end, and Kafka may have very many topics.
_ABSENT_BYTES: Final = 2 << 20
_PRESENT_BYTES: Final = 16 << 20
_ENTRY_BYTES: Final = 300
_NO_BOUND: Final = 1 << 62
_UNASKED: Final = Refusal(
    Reason.BACKPRESSURE,
    f"Kafka is being asked about {ASKED_AT_MOST} unknown topics, or half as many of this caller",
)

_log = get_logger(__name__)


class KnownTopics:
    """A node's memory of Kafka's topics. For the loop's thread, unless stated otherwise."""

    def __init__(
        self,
        disk: Disk,
        path: Path,
        *,
        ask: Callable[[AskTopic], bool],
        refuses_absent: bool,
    ) -> None:
        """Reads the cache of an earlier process.

        Args:
            refuses_absent: Whether missing topics refuse messages; false if they are created at the
                due.
        """
        self._disk = disk
        self._path = path
        self._ask = ask
        self._refuses_absent = refuses_absent
        self._present = BoundedTable[str, _KnownTopic](_PRESENT_BYTES)
        self._absent_ms = BoundedTable[str, int](_ABSENT_BYTES)
        for name, info in _load(disk, path).items():
            self._keep(name, _KnownTopic(info, None))
        # Topic -> the question that the cleaner has not answered yet.
        self._asked: dict[str, _Question] = {}
        self._room = SharedRoom(ASKED_AT_MOST)
        # Who waits for answers -> the topics that are still unanswered.
        self._waiting: dict[asyncio.Future[None], set[str]] = {}
        self._is_in_doubt = False
        self._unsaved = False

    def doubtful(self, batch: RequestBatch) -> list[str]:
        """Returns topics of which too little is known to judge their messages. For any thread."""
        found = self._known_of(batch)
        old = [known if known and not known.is_fresh else None for known in found]
        numbers = {number for number, _, _ in _mismatches(batch, old)}
        if self._refuses_absent:
            numbers.update(number for number, known in enumerate(found) if known is None)
        names = [batch.columns.topics[number] for number in sorted(numbers)]
        return [name for name in names if is_topic_name(name) and not self._is_absent(name)]

    async def find_out(self, names: Iterable[str], sharer: Hashable) -> Collection[str]:
        """Waits briefly for the cleaner's answers; returns topics that could not be asked about.

        Args:
            sharer: Who wants to know.
        """
        waiting: dict[str, _Question] = {}
        unasked = set()
        for name in names:
            question = self._asked.get(name)
            if question is None and not self._room.left(sharer):
                unasked.add(name)
            elif question is None and self._ask(AskTopic(name)):
                question = self._asked[name] = _Question(sharer)
                self._room.take(sharer)
            if question is not None:
                waiting[name] = question
        if waiting:
            try:
                await self._wait(set(waiting))
            except asyncio.CancelledError:  # the caller has left; the cleaner may never answer
                awaited = set[str]().union(*self._waiting.values())
                self._settle([name for name in waiting if name not in awaited])
                raise
        # Other callers that wait for these get no answer either; the next caller asks again.
        unanswered = [name for name, asked in waiting.items() if self._asked.get(name) is asked]
        self._is_in_doubt |= bool(unanswered)
        self._settle(unanswered)
        return unasked

    async def _wait(self, names: set[str]) -> None:
        """Waits briefly until all of these are settled."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[settled] = names
        try:
            wait_s = DOUBT_WAIT_S if self._is_in_doubt else ANSWER_WAIT_S
            await asyncio.wait([settled], timeout=wait_s)
        finally:
            del self._waiting[settled]

    def end_waits(self) -> None:
        """Has no caller wait any longer, because the node stops."""
        self._settle([*self._asked])

    def judge(self, batch: RequestBatch, unasked: Collection[str]) -> None:
        """Refuses messages that Kafka would not accept, as far as known now. For any thread.

        Args:
            unasked: Those of its topics that `find_out` could not ask about.
        """
        found = self._known_of(batch)
        fresh = [known if known and known.is_fresh else None for known in found]
        for _, rows, refusal in _mismatches(batch, fresh):
            batch.refuse(rows, refusal)
        for number, name in enumerate(batch.columns.topics):
            if found[number] is not None:
                continue
            if self._refuses_absent and self._is_absent(name):
                refusal = Refusal(Reason.TOPIC_UNKNOWN, f"Kafka has no topic {name}")
                batch.refuse(batch.rows_for(number), refusal)
            elif name in unasked:
                batch.refuse(batch.rows_for(number), _UNASKED)

    def learn(self, message: Topics) -> None:
        """Takes what the cleaner reports."""
        self._is_in_doubt = False
        for name, info in message.topics.items():
            known = self._present.get(name)
            self._unsaved |= known is None or known.info != info
            self._keep(name, _KnownTopic(info, message.checked_at_ms))
            self._absent_ms.pop(name)
        for name in message.absent:
            self._unsaved |= self._present.pop(name) is not None
            self._absent_ms.put(name, message.checked_at_ms, len(name) + _ENTRY_BYTES)
        self._settle([*message.topics, *message.absent])

    def save_changes(self) -> None:
        """Writes the cache if something has changed; may be called on another thread."""
        if not self._unsaved:
            return
        self._unsaved = False
        document = {
            name: [known.info.partitions, known.info.max_message_bytes]
            for name, known in self._present.copy().items()
        }
        try:
            self._disk.replace_file(self._path, json.dumps(document).encode())
        except OSError:
            self._unsaved = True
            raise

    def _keep(self, name: str, known: "_KnownTopic") -> None:
        self._present.put(name, known, len(name) + _ENTRY_BYTES)

    def _known_of(self, batch: RequestBatch) -> "list[_KnownTopic | None]":
        """Returns what is known of each topic of a batch, in order."""
        return [self._present.get(name) for name in batch.columns.topics]

    def _is_absent(self, name: str) -> bool:
        return _is_fresh(self._absent_ms.get(name))

    def _settle(self, names: Sequence[str]) -> None:
        """Ends the waiting for these topics.

        Many callers may wait for the same thousand topics: a future for each name, with a callback
        for each caller, would hold up the loop when the answers come.
        """
        for name in names:
            if (question := self._asked.pop(name, None)) is not None:
                self._room.give_back(question.sharer)
        for settled, unanswered in self._waiting.items():
            unanswered.difference_update(names)
            if not unanswered and not settled.done():
                settled.set_result(None)


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """What the cleaner was asked.

    Attributes:
        sharer: Who wanted to know first.
    """

    sharer: Hashable


@dataclass(frozen=True, slots=True)
class _KnownTopic:
    """What is known of an existing topic.

    Attributes:
        info: What the cleaner reported.
        checked_at_ms: When Kafka was asked, on the monotonic clock; None: before this process
            started.
    """

    info: TopicInfo
    checked_at_ms: int | None

    @property
    def room_bytes(self) -> int:
        """The greatest length of a message, in bytes."""
        most = self.info.max_message_bytes
        return _NO_BOUND if most is None else most - FORWARD_ROOM_BYTES

    @property
    def is_fresh(self) -> bool:
        """Whether this is recent enough to refuse a message."""
        return _is_fresh(self.checked_at_ms)


def _is_fresh(checked_at_ms: int | None) -> bool:
    return checked_at_ms is not None and monotonic_ms() - checked_at_ms < FRESH_FOR_MS


def _mismatches(
    batch: RequestBatch, found: "Sequence[_KnownTopic | None]"
) -> Iterator[tuple[int, NDArray[np.intp], Refusal]]:
    """Returns the messages that each topic refuses, and why; compares whole columns.

    Args:
        found: What is known of each of its topics; None: it accepts anything.
    """
    if not any(found):
        return
    columns = batch.columns
    partitions = np.array(
        [known.info.partitions if known else _NO_BOUND for known in found], dtype=np.int64
    )
    rooms = np.array([known.room_bytes if known else _NO_BOUND for known in found], dtype=np.int64)
    numbers = columns.topic_numbers
    outside = np.flatnonzero(columns.partitions >= partitions[numbers])
    for number, rows in _by_topic(numbers, outside):
        detail = f"{columns.topics[number]} has {counted(int(partitions[number]), 'partition')}"
        yield number, rows, Refusal(Reason.PARTITION_INVALID, detail)
    large = np.flatnonzero(batch.lengths_bytes > rooms[numbers])
    for row in large.tolist():
        number = int(numbers[row])
        detail = (
            f"{int(batch.lengths_bytes[row]):,} bytes; {columns.topics[number]} accepts"
            f" {rooms[number]:,} beside our headers (its max.message.bytes)"
        )
        yield number, np.array([row]), Refusal(Reason.MESSAGE_TOO_LARGE, detail)


def _by_topic(
    numbers: NDArray[np.uint32], rows: NDArray[np.intp]
) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Groups messages by topic."""
    if not len(rows):
        return
    order = rows[np.argsort(numbers[rows], kind="stable")]
    found, begins = np.unique(numbers[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, begins[1:]), strict=True)


def _load(disk: Disk, path: Path) -> dict[str, TopicInfo]:
    """Returns the cache; empty if it is absent, or cannot be read for whatever reason."""
    try:
        document: Mapping[str, tuple[int, int | None]] = json.loads(disk.read_file(path))
        return {name: TopicInfo(*info) for name, info in document.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("the cache of topics cannot be read", path=str(path), error=str(error))
        return {}
