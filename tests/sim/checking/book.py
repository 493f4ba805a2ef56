"""Records what callers know of their messages: the book that all checks compare with."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from delaywheel.headers import encode_headers
from delaywheel.record_headers import HALF_DELIVER_AT, HALF_GROUP, TTL_HEADER
from delaywheel.storage.frames.columns import Columns, content_starts
from delaywheel_replica.core.protocol.reschedules import MessageKey
from sim.checking.truth import Key
from sim.machine.clocks import EPOCH_MS
from sim.machine.scheduler import US_PER_MS
from sim.plans.plan import Draft

if TYPE_CHECKING:
    from sim.kafka.log import Partition

TOPICS = ("orders", "mails")
GROUP = b"shop"
"""The group that is asked about half messages."""
MORE_TOPICS = tuple(f"topic-{number}" for number in range(12))
"""Only drills send to these topics."""


class Fate(StrEnum):
    """What the producer knows of a message."""

    UNSENT = "not sent yet"
    UNKNOWN = "perhaps accepted"
    REFUSED = "never accepted"
    ACKNOWLEDGED = "acknowledged"


@dataclass(slots=True)
class Entry:
    """One message.

    Attributes:
        number: of the message in the plan.
        key: topic, id and due.
        record_key: its Kafka key.
        value: its Kafka value.
        ttl_s: its time to live, in seconds.
        ttl_header: the header that states one.
        fate: what the producer knows.
        in_doubt: an attempt, of any producer, has an unknown outcome.
        sent_us: when it was first sent.
        acknowledged_us: when the producer received the acknowledgement.
        cancelled: a caller was answered that it is cancelled.
        cancel_tried: a caller asked to cancel it: a cancel may have been written.
        reschedule_tried: a caller asked for another due: it may have one.
        visible_us: when a copy of it became visible.
        original: the same message at its first due.
        is_half: it is a half message, due at the end of its hold.
        committed: whether the local transaction of a half was committed; None: it is under way.
        committed_us: when a caller was answered that its commit is recorded.
        recorded_at: where a half is in the ingress topic, if it was sent there; then its commit.
        deliver_at_ms: when the message of a half is due that has a delay.
        unknowns: how many checks of a half do not reach the database.
    """

    number: int
    key: Key
    record_key: bytes | None
    value: bytes | None
    ttl_s: int | None = None
    ttl_header: str = TTL_HEADER
    fate: Fate = Fate.UNSENT
    in_doubt: bool = False
    sent_us: int = -1
    acknowledged_us: int = -1
    cancelled: bool = False
    cancel_tried: bool = False
    reschedule_tried: bool = False
    visible_us: int = -1
    original: Entry | None = None
    is_half: bool = False
    committed: bool | None = None
    committed_us: int = -1
    recorded_at: list[tuple[Partition, int]] = field(default_factory=list)
    deliver_at_ms: int | None = None
    unknowns: int = 0

    @property
    def topic(self) -> str:
        """Its destination topic."""
        return self.key.topic

    @property
    def due_ms(self) -> int:
        """The due of the message."""
        return self.key.due_ms

    @property
    def slot(self) -> int:
        """The second of its due."""
        return self.key.due_ms // 1000

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        """The Kafka headers of the message."""
        if self.ttl_s is None:
            return []
        # Under the usual name another program's, which means nothing if the setting says so.
        foreign = [] if self.ttl_header == TTL_HEADER else [(TTL_HEADER, b"1")]
        return [*foreign, (self.ttl_header or TTL_HEADER, b"%d" % self.ttl_s)]

    @property
    def expires_us(self) -> int | None:
        """The time from which it must not be forwarded; None: never."""
        if self.ttl_s is None or not self.ttl_header:
            return None
        return (self.due_ms - EPOCH_MS + self.ttl_s * 1000) * US_PER_MS

    @property
    def is_visible(self) -> bool:
        """Whether consumers can read it."""
        return self.visible_us >= 0

    def __str__(self) -> str:
        return f"m{self.number}(due {(self.due_ms - EPOCH_MS) / 1000:.3f}, {self.fate})"


@dataclass(slots=True)
class Book:
    """All messages of a run.

    Attributes:
        ttl_header: the header that states a time to live; empty: none.
        entries: by number in the plan.
        by_key: by topic, id and due.
        by_id: by id and topic.
        families: by id and topic, at all dues; checks ask for these after every transaction.
    """

    ttl_header: str = TTL_HEADER
    entries: dict[int, Entry] = field(default_factory=dict)
    by_key: dict[Key, Entry] = field(default_factory=dict)
    by_id: dict[tuple[bytes, str], Entry] = field(default_factory=dict)
    families: defaultdict[tuple[bytes, str], list[Entry]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def of(self, key: Key) -> Entry | None:
        """The message that this is; perhaps an earlier message that was given this due."""
        entry = self.by_key.get(key)
        if entry is None:
            original = self.by_id.get((key.id, key.topic))
            # A half keeps its due; what its commit sends on has the same id.
            if original is not None and original.reschedule_tried and not original.is_half:
                entry = replace(original, key=key, visible_us=-1, original=original)
                self._add(entry)
        return entry

    def family(self, entry: Entry) -> list[Entry]:
        """The same message at all its dues."""
        return self.families[entry.key.id, entry.key.topic]

    def _add(self, entry: Entry) -> None:
        key = entry.key
        self.by_key[key] = entry
        self.families[key.id, key.topic].append(entry)

    def enter(self, draft: Draft, at_ms: int) -> Entry:
        """Adds a message that is sent for the first time; its due is fixed from now on."""
        key = MessageKey(
            draft.number.to_bytes(16, "big"),
            EPOCH_MS + at_ms + draft.delay_ms,
            draft.topic or TOPICS[draft.number % len(TOPICS)],
        )
        if (first := self.entries.get(draft.twin_of or 0)) is not None:
            twin = first.key._replace(topic=next(each for each in TOPICS if each != first.topic))
            key = key if (twin.id, twin.topic) in self.by_id else twin
        value = None if draft.length_bytes < 0 else _content(draft.number, draft.length_bytes)
        entry = Entry(
            number=draft.number,
            key=key,
            record_key=str(draft.number).encode() if draft.keyed else None,
            value=value,
            ttl_s=draft.ttl_s,
            ttl_header=self.ttl_header,
            is_half=draft.is_half,
            deliver_at_ms=None if draft.later_ms is None else EPOCH_MS + at_ms + draft.later_ms,
        )
        self.entries[draft.number] = entry
        self._add(entry)
        self.by_id[key.id, key.topic] = entry
        return entry


def _content(number: int, length_bytes: int) -> bytes:
    return (number.to_bytes(4, "big") * (length_bytes // 4 + 1))[:length_bytes]


def columns_of(entries: list[Entry]) -> Columns:
    """A request as the server decodes it."""
    headers = [encode_headers([*entry.headers, *half_headers(entry)]) for entry in entries]
    parts = [
        (entry.record_key or b"") + (entry.value or b"") + encoded
        for entry, encoded in zip(entries, headers, strict=True)
    ]
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    topics = tuple(dict.fromkeys([*TOPICS, *(entry.topic for entry in entries)]))
    return Columns(
        due_ms=np.array([entry.due_ms for entry in entries], dtype=np.int64),
        ids=np.frombuffer(b"".join(entry.key.id for entry in entries), dtype=np.uint8).reshape(
            -1, 16
        ),
        topics=topics,
        topic_numbers=np.array([topics.index(entry.topic) for entry in entries], dtype=np.uint32),
        key_lengths=_lengths([entry.record_key for entry in entries]),
        value_lengths=_lengths([entry.value for entry in entries]),
        headers_lengths=np.array([len(encoded) for encoded in headers], dtype=np.int32),
        partitions=np.full(len(entries), -1, dtype=np.int32),
        timestamps_ms=np.full(len(entries), -1, dtype=np.int64),
        blob=b"".join(parts),
        starts=content_starts(lengths),
    )


def half_headers(entry: Entry) -> list[tuple[str, bytes | None]]:
    """What makes a message a half."""
    if not entry.is_half:
        return []
    if entry.deliver_at_ms is None:
        return [(HALF_GROUP, GROUP)]
    return [(HALF_GROUP, GROUP), (HALF_DELIVER_AT, b"%d" % entry.deliver_at_ms)]


def _lengths(values: list[bytes | None]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([-1 if value is None else len(value) for value in values], dtype=np.int32)
