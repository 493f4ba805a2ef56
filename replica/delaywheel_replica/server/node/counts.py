"""What a server counts since its process started.

Each number is counted by one thread: the writer's for what is accepted, the event loop's for what
is answered. Any thread may read, without a lock: a scrape may fall between two updates.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from delaywheel.reasons import Reason
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.core.protocol.histogram import Histogram, Tally
from delaywheel_replica.process.topic_counts import TopicCounts
from delaywheel_replica.server.node.pending_topics import PendingTopics
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

ANSWER_BOUNDS_US: Final = tuple(
    ms * 1_000 for ms in (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 250, 500, 1_000, 2_500)
)
"""Upper bounds for acknowledgements: a caller that waits for two seconds is refused instead."""

_OF_MESSAGES: Final = tuple(
    chain(
        (Reason.DUE_MISSING, Reason.DUE_AMBIGUOUS, Reason.DUE_INVALID, Reason.DUE_BEYOND_SPAN),
        (Reason.DUE_TOO_OLD, Reason.DELAY_INVALID, Reason.LEVEL_UNKNOWN, Reason.SENT_AT_MISSING),
        (Reason.ID_INVALID, Reason.TOPIC_INVALID, Reason.TOPIC_UNKNOWN, Reason.MESSAGE_TOO_LARGE),
        (Reason.HEADER_RESERVED, Reason.HEADER_INVALID, Reason.PARTITION_INVALID),
        (Reason.TIMESTAMP_INVALID, Reason.SLOT_FULL, Reason.REQUEST_MALFORMED),
        (Reason.ID_TAKEN, Reason.ID_CANCELLED),
        (Reason.TOO_MANY_MESSAGES, Reason.REQUEST_TOO_LARGE, Reason.BACKPRESSURE),
        (Reason.QUOTA_EXCEEDED,),
        (Reason.DRAINING, Reason.NO_WHEEL, Reason.NOT_ENOUGH_REPLICAS, Reason.DISK_FULL),
        (Reason.DISK_STALLED, Reason.CLOCK_AHEAD, Reason.WHEEL_LOST, Reason.INTERNAL),
    )
)
"""Possible refusals of a message: counted from 0, so that the first one shows as a change."""

CALL_BOUNDS_US: Final = tuple(
    ms * 1_000
    for ms in (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 250, 500, 1_000, 2_500, 5_000, 10_000)
)
"""Upper bounds for gets, searches, cancels and reschedules, which wait for at most 10 s."""


class CallTimes:
    """How long calls took, by call and outcome, and since when others are under way."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._since_ms: dict[str, dict[object, int]] = {}

    def add(self, call: str, outcome: str, took_us: int, times: int = 1) -> None:
        """Counts an answered call, or some of the messages that it named."""
        tally = self._tallies.get((call, outcome))
        if tally is None:
            tally = self._tallies[call, outcome] = Tally(CALL_BOUNDS_US)
        tally.add(took_us, times)

    @contextmanager
    def timed(self, call: str) -> Iterator[list[str]]:
        """Counts a call by the outcome that is put into the list, or by the reason of a refusal."""
        began_us, outcome = _monotonic_us(), list[str]()
        under_way, key = self._since_ms.setdefault(call, {}), object()
        under_way[key] = began_us // 1_000
        try:
            yield outcome
        except RequestRefusedError as error:
            outcome.append(error.refusal.reason.value)
            raise
        finally:
            del under_way[key]
            self.add(call, outcome[-1] if outcome else "GIVEN_UP", _monotonic_us() - began_us)

    def read(self) -> dict[tuple[str, str], Histogram]:
        """Returns the times by call and outcome."""
        return {names: tally.read() for names, tally in self._tallies.copy().items()}

    def under_way(self) -> dict[str, tuple[int, int]]:
        """Returns how many calls are under way, and for how many milliseconds the first one is."""
        now_ms = _monotonic_us() // 1_000
        since_ms = {call: [*of_call.values()] for call, of_call in self._since_ms.copy().items()}
        return {call: (len(all_), now_ms - all_[0]) for call, all_ in since_ms.items() if all_}


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1_000


@dataclass(slots=True)
class NodeCounts:
    """The numbers; a message that is sent again counts again.

    Attributes:
        groups: Groups of callers' requests that were written together.
        frames: Frames written into this node's own wheels, for messages and for cancels.
        frame_bytes: Their bytes on the disk.
        topics: The messages in these frames, by topic.
        pending: Those of them that are not done; None: not counted.
        acknowledged: Messages that enough members hold, as reported to their callers.
        answer_times: The times from a complete request with such messages to its answer.
        refused: Messages that were not accepted, or (WHEEL_LOST) not known to be.
        handed: Ingress records that this node's cleaner handed over, by the answer.
        calls: How long gets, pages of searches, and cancels and reschedules of a message took; the
            last two as the leader's node.
        cancel_stages: How many milliseconds all of them together spent in each stage: queued,
            looked up, written, taken (until progress covered the written cancel), confirmed.
        cancel_load: Returns how many messages are being cancelled, for how many milliseconds the
            first of them is, and the first that waits to be looked up.
        lookup_index: Returns the seconds in the index of ids, its bytes, and how many seconds were
            read for it.
        unchecked_ids: Messages whose ids were to be checked, and could not be in time, or not with
            certainty.
        refused_calls: (method, reason) -> calls, or requests of a stream, refused as a whole.
    """

    groups: int = 0
    frames: int = 0
    frame_bytes: int = 0
    messages: int = 0
    cancels: int = 0
    topics: TopicCounts = field(default_factory=TopicCounts)
    pending: PendingTopics | None = None
    acknowledged: int = 0
    answer_times: Tally = field(default_factory=lambda: Tally(ANSWER_BOUNDS_US))
    refused: Counter[Reason] = field(
        default_factory=lambda: Counter(dict.fromkeys(_OF_MESSAGES, 0))
    )
    handed: Counter[RecordAnswer] = field(
        default_factory=lambda: Counter(dict.fromkeys(RecordAnswer, 0))
    )
    calls: CallTimes = field(default_factory=CallTimes)
    cancel_stages: Counter[str] = field(default_factory=Counter)
    cancel_load: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
    lookup_index: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
    unchecked_ids: int = 0
    refused_calls: Counter[tuple[str, Reason]] = field(default_factory=Counter)

    def entered(self, columns: Columns | None, group: WrittenGroup) -> None:
        """Counts a written group; `columns` is None for cancels."""
        rows = len(group.order)
        self.groups += 1
        self.frames += len(group.bundle)
        self.frame_bytes += group.bundle.length_bytes
        if columns is None:
            self.cancels += rows
        else:
            self.messages += rows
            numbers = columns.topic_numbers[group.order]
            self.topics.add(columns.topics, numbers)
            if self.pending is not None:
                self.pending.add(columns, group.order)

    def waiting(self) -> dict[str, tuple[int, int]]:
        """Returns, by call, how many wait for an answer, and the first of them how long (ms)."""
        cancels, cancel_ms, _ = self.cancel_load()
        of_cancels = {"cancel": (cancels, cancel_ms)} if cancels else {}
        return {**of_cancels, **self.calls.under_way()}

    def answered(self, messages: int, refusals: Mapping[int, Refusal], took_us: int) -> None:
        """Counts an answered request of this many messages, some of which may be refused."""
        if len(refusals) < messages:
            self.acknowledged += messages - len(refusals)
            self.answer_times.add(took_us)
        for refusal in refusals.values():
            self.refused[refusal.reason] += 1
