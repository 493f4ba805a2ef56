"""What the service in memory knows: each message by topic, id and due, and what became of it.

| state | a cancel answers | a reschedule answers | next |
|---|---|---|---|
| pending | CANCELLED; TOO_LATE within 100 ms | RESCHEDULED; TOO_LATE as well | any other |
| cancelled | CANCELLED | CANCELLED | |
| moved | RESCHEDULED, and the new due | RESCHEDULED, and the new due | |
| delivered | ALREADY_DELIVERED | ALREADY_DELIVERED | |
| a half, until its due | as pending | refused, HALF_KEEPS_DUE | delivered by its commit; asked |
| deleted, `late_window_ms` after its due | TOO_LATE | TOO_LATE | |
| never accepted | NOT_FOUND | NOT_FOUND | |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from typing import Final, NamedTuple

from delaywheel.consumer.records import Incoming, Partition, Place
from delaywheel.headers import is_cut_off
from delaywheel.identity import is_topic_name
from delaywheel.ingress import (
    HEADERS_MOST,
    PLACE_ID_PREFIX,
    HalfAnswer,
    halves_topic,
    ingress_topic,
    is_reserved_topic,
)
from delaywheel.reasons import Reason
from delaywheel.record_headers import COMMITTED, LONGEST_HOLD_MS, is_reserved, ttl_s_of
from delaywheel.testing.halves import (
    CLUSTER,
    COMMIT_BEFORE_MS,
    committed_message,
    dead_letter_of,
    delivery_headers,
    is_half,
    letter_of,
)
from delaywheel.testing.refusing import (
    MemoryRefusal,
    check_filter,
    check_named,
    check_reference,
)
from delaywheel.testing.rows import OwnHeaders, SentMessage
from delaywheel.transactions.half_rules import half_fault, make_a_half
from delaywheel_proto.v1 import delaywheel_pb2 as pb

WHEEL: Final = "memory.1"
TOO_LATE_MS: Final = 100
NEAREST_MS: Final = 500


class Standing(IntEnum):
    """What became of a message, with the protocol's numbers."""

    PENDING = pb.MESSAGE_STATE_PENDING
    CANCELLED = pb.MESSAGE_STATE_CANCELLED
    DELIVERED = pb.MESSAGE_STATE_DELIVERED
    DEAD_LETTERED = pb.MESSAGE_STATE_DEAD_LETTERED


class DeliveredRecord(NamedTuple):
    """A record that appeared in its topic: a message, or what a consumer has written there.

    Attributes:
        headers: The sender's own.
        delivered_ms: When it appeared: the due, or when it was sent, if that was later.
        partition: As the sender asked for; None: its key would decide.
        added: The service's own headers, which follow in Kafka: `DELIVERED_HEADERS`.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: OwnHeaders
    id: bytes
    due_ms: int
    delivered_ms: int
    timestamp_ms: int
    partition: int | None
    offset: int
    added: OwnHeaders = ()


@dataclass(slots=True)
class Kept:
    """One accepted message."""

    sent: SentMessage
    seq: int
    accepted_ms: int
    standing: Standing = Standing.PENDING
    moved_to_ms: int | None = None
    offset: int | None = None
    dead_reason: str = ""
    is_asked: bool = False
    answer: HalfAnswer | None = None

    @property
    def handle(self) -> str:
        """The text of its handle."""
        return f"{WHEEL}:{self.sent.due_ms // 1000}:{self.sent.id.hex()}:{self.sent.topic}"

    @property
    def is_done(self) -> bool:
        """Whether it is in a topic."""
        return self.standing in (Standing.DELIVERED, Standing.DEAD_LETTERED)

    @property
    def state(self) -> pb.MessageState.ValueType:
        """Its state, as a node says it."""
        if not is_half(self.sent):
            return pb.MessageState.ValueType(self.standing)
        if self.standing is Standing.PENDING:
            return pb.MESSAGE_STATE_HELD
        if self.standing is Standing.CANCELLED:
            return pb.MESSAGE_STATE_ROLLED_BACK
        if self.is_asked:
            return pb.MESSAGE_STATE_ASKED
        has_own_due = self.offset is None
        return pb.MESSAGE_STATE_COMMITTED if has_own_due else pb.MESSAGE_STATE_DELIVERED


class MemoryLimits(NamedTuple):
    """What the service takes, in its own units."""

    span_ms: int
    late_window_ms: int
    max_message_bytes: int
    topics: frozenset[str] | None
    partitions: Mapping[str, int] | None = None


class MemoryStore:
    """The messages, and the records that appeared. Not thread-safe.

    What a node would refuse is raised as MemoryRefusal.
    """

    def __init__(self, limits: MemoryLimits, now_ms: int) -> None:
        self.limits: Final = limits
        self.now_ms = now_ms
        self.delivered: Final[list[DeliveredRecord]] = []
        # Which of them lie in each partition.
        self.logs: Final[defaultdict[Partition, list[int]]] = defaultdict(list)
        self.made_topics: Final = {ingress_topic(CLUSTER), halves_topic(CLUSTER)}
        self._kept: Final[dict[tuple[str, bytes, int], Kept]] = {}
        self._by_id: Final[defaultdict[tuple[str, bytes], list[Kept]]] = defaultdict(list)
        self._seqs: Final = count(1)
        # By due and seq, some of which may be done; tests may hold as many as a service does.
        self._pending: Final[list[tuple[int, int, Kept]]] = []

    def accept(self, sent: SentMessage, *, check_id: bool = False) -> None:
        """Takes a message, once by topic, id and due."""
        self._check(sent)
        kept = self._kept.get((sent.topic, sent.id, sent.due_ms))
        if kept is None:
            self._keep(sent)
        elif check_id and kept.standing is Standing.CANCELLED and kept.moved_to_ms is None:
            raise MemoryRefusal(Reason.ID_CANCELLED)
        elif check_id and kept.sent != sent:
            raise MemoryRefusal(Reason.ID_TAKEN)

    def take_in(self, sent: SentMessage) -> None:
        """Takes what is in the ingress topic, once by topic, id and due, however late.

        Who writes there knows the limits, and has made the topics that it names.
        """
        if (sent.topic, sent.id, sent.due_ms) not in self._kept:
            self._keep(sent)

    def advance_to(self, now_ms: int) -> None:
        """Moves the clock, and delivers what is due, each at its due and in that order."""
        while (due := self._next_due()) is not None and due.sent.due_ms <= now_ms:
            self.now_ms = max(self.now_ms, due.sent.due_ms)
            self._deliver(due)
        self.now_ms = max(self.now_ms, now_ms)

    def find(self, ref: pb.MessageRef) -> Kept | None:
        """Returns the message that is meant, unless its second is deleted."""
        check_reference(ref)
        if ref.HasField("id_and_due"):
            named = ref.id_and_due
            found = self._kept.get((named.topic, named.id, named.due_ms))
            return None if found is None or self.is_deleted(found.sent.due_ms) else found
        _, slot, id_, topic = ref.handle.split(":")
        of_id = self._by_id.get((topic, bytes.fromhex(id_)), [])
        same = [kept for kept in of_id if kept.sent.due_ms // 1000 == int(slot)]
        if not same or self.is_deleted(int(slot) * 1000):
            return None
        return max(same, key=lambda kept: (kept.moved_to_ms is None, kept.seq))

    def has_topic(self, topic: str) -> bool:
        """Whether there is such a topic."""
        return self.limits.topics is None or topic in self.limits.topics | self.made_topics

    def is_deleted(self, due_ms: int) -> bool:
        """Whether the second of this due is finished and deleted."""
        return due_ms // 1000 < (self.now_ms - self.limits.late_window_ms) // 1000

    def cancel(self, ref: pb.MessageRef) -> pb.MessageCancelled:
        """Cancels a message."""
        kept = self.find(ref)
        if kept is None:
            late = self.is_deleted(_due_ms(ref))
            outcome = pb.CANCEL_OUTCOME_TOO_LATE if late else pb.CANCEL_OUTCOME_NOT_FOUND
            return pb.MessageCancelled(outcome=outcome)
        return pb.MessageCancelled(outcome=self.cancel_kept(kept), due_ms=kept.moved_to_ms)

    def cancel_kept(self, kept: Kept) -> pb.CancelOutcome.ValueType:
        """Cancels a message that was found."""
        if kept.moved_to_ms is not None:
            return pb.CANCEL_OUTCOME_RESCHEDULED
        if kept.is_done:
            return pb.CANCEL_OUTCOME_ALREADY_DELIVERED
        if kept.standing is Standing.PENDING and self._is_too_late(kept):
            return pb.CANCEL_OUTCOME_TOO_LATE
        kept.standing = Standing.CANCELLED
        return pb.CANCEL_OUTCOME_CANCELLED

    def commit(self, half: pb.HalfRef) -> pb.CommitOutcome.ValueType:
        """Commits a half: its message is delivered now, or at its own due."""
        check_named(half)
        left_ms = half.due_ms - self.now_ms
        if left_ms <= COMMIT_BEFORE_MS:
            return pb.COMMIT_OUTCOME_LEFT_TO_CHECK
        if left_ms > LONGEST_HOLD_MS:  # the message's own due, perhaps
            raise MemoryRefusal(Reason.HALF_INVALID, f"No half is held for {left_ms:,} ms more")
        kept = self._kept.get((half.topic, half.id, half.due_ms))
        if kept is None or not is_half(kept.sent):
            return pb.COMMIT_OUTCOME_COMMITTED
        if kept.standing is Standing.CANCELLED:
            return pb.COMMIT_OUTCOME_ROLLED_BACK
        if kept.standing is Standing.PENDING:
            kept.standing = Standing.DELIVERED
            message = committed_message(kept.sent, self.now_ms)
            if message.due_ms > self.now_ms:
                self.take_in(message)
            else:
                committed = (COMMITTED, b"%d" % self.now_ms)
                kept.offset = self.append(message, (committed, *self._added(kept)))
        return pb.COMMIT_OUTCOME_COMMITTED

    def reschedule(self, wanted: pb.NewDue) -> pb.MessageRescheduled:
        """Gives a message another due."""
        ref, to_ms = wanted.message, wanted.deliver_at_ms
        if to_ms < 1:
            raise MemoryRefusal(Reason.DUE_INVALID, f"Due {to_ms}")
        self._check_span(to_ms)
        kept = self.find(ref)
        if kept is None:
            late = self.is_deleted(_due_ms(ref))
            outcome = pb.RESCHEDULE_OUTCOME_TOO_LATE if late else pb.RESCHEDULE_OUTCOME_NOT_FOUND
            return pb.MessageRescheduled(outcome=outcome)
        if is_half(kept.sent):
            raise MemoryRefusal(Reason.HALF_KEEPS_DUE)
        if kept.moved_to_ms is None:
            if kept.standing is Standing.CANCELLED:
                return pb.MessageRescheduled(outcome=pb.RESCHEDULE_OUTCOME_CANCELLED)
            if kept.is_done:
                return pb.MessageRescheduled(outcome=pb.RESCHEDULE_OUTCOME_ALREADY_DELIVERED)
            if self._is_too_late(kept):
                return pb.MessageRescheduled(outcome=pb.RESCHEDULE_OUTCOME_TOO_LATE)
            kept = self._moved(kept, max(to_ms, self.now_ms + NEAREST_MS))
        else:
            kept = self._kept[kept.sent.topic, kept.sent.id, kept.moved_to_ms]
        return pb.MessageRescheduled(
            outcome=pb.RESCHEDULE_OUTCOME_RESCHEDULED, due_ms=kept.sent.due_ms, handle=kept.handle
        )

    def in_slot(self, slot: int) -> list[Kept]:
        """Returns the messages of a second, in the order in which they were accepted."""
        return [
            kept
            for kept in self._kept.values()
            if kept.sent.due_ms // 1000 == slot and not self.is_deleted(kept.sent.due_ms)
        ]

    def slots(self) -> list[int]:
        """Returns the seconds that hold messages, ascending."""
        dues_ms = (kept.sent.due_ms for kept in self._kept.values())
        return sorted({due_ms // 1000 for due_ms in dues_ms if not self.is_deleted(due_ms)})

    def matching(self, wanted: pb.Filter, *, with_cancelled: bool) -> Iterator[Kept]:
        """Yields messages that are not done and meet all conditions, by due."""
        check_filter(wanted)
        for kept in sorted(self._kept.values(), key=lambda each: (each.sent.due_ms, each.seq)):
            is_wanted = kept.standing is Standing.PENDING or (
                with_cancelled and kept.standing is Standing.CANCELLED
            )
            if is_wanted and kept.sent.due_ms > self.now_ms and _meets(kept.sent, wanted):
                yield kept

    def _check(self, sent: SentMessage) -> None:
        """Checks a message in the order in which a node does."""
        limits, length_bytes = self.limits, sent.length_bytes
        self._check_due(sent.due_ms)
        if not is_topic_name(sent.topic):
            raise MemoryRefusal(Reason.TOPIC_INVALID)
        if is_reserved_topic(sent.topic) or sent.topic == ingress_topic(CLUSTER):
            text = f"{sent.topic} belongs to the service or to Kafka"
            raise MemoryRefusal(Reason.TOPIC_INVALID, text)
        if sent.id.startswith(PLACE_ID_PREFIX):
            text = f"Ids that begin with {PLACE_ID_PREFIX.hex()} are the service's"
            raise MemoryRefusal(Reason.ID_INVALID, text)
        if length_bytes > limits.max_message_bytes:
            sizes = f"{length_bytes:,} bytes, at most {limits.max_message_bytes:,}"
            raise MemoryRefusal(Reason.MESSAGE_TOO_LARGE, f"{sizes} (max_message_bytes)")
        self._check_headers(sent)
        partitions = (limits.partitions or {}).get(sent.topic, 1 << 31)
        if sent.partition is not None and not 0 <= sent.partition < partitions:
            raise MemoryRefusal(Reason.PARTITION_INVALID)
        if sent.timestamp_ms is not None and sent.timestamp_ms < 1:
            raise MemoryRefusal(Reason.TIMESTAMP_INVALID)
        if not self.has_topic(sent.topic):
            raise MemoryRefusal(Reason.TOPIC_UNKNOWN, sent.topic)

    def _check_headers(self, sent: SentMessage) -> None:
        if len(sent.headers) > HEADERS_MOST:
            raise MemoryRefusal(Reason.MESSAGE_TOO_LARGE, f"More than {HEADERS_MOST:,} headers")
        if any(not name or is_cut_off(name) for name, _ in sent.headers):
            raise MemoryRefusal(Reason.HEADER_INVALID)
        ours = [pair for pair in sent.headers if is_reserved(pair[0])]
        if not ours:
            return
        if not make_a_half([name for name, _ in ours]):
            raise MemoryRefusal(Reason.HEADER_RESERVED)
        limits = self.limits
        fault = half_fault(
            ours,
            sent.due_ms,
            sent.length_bytes,
            self.now_ms,
            span_ms=limits.span_ms,
            most_bytes=limits.max_message_bytes,
        )
        if fault is not None:
            raise MemoryRefusal(*fault)

    def _check_due(self, due_ms: int) -> None:
        if due_ms < 1:
            raise MemoryRefusal(Reason.DUE_INVALID, f"Due {due_ms}")
        if due_ms < self.now_ms - self.limits.late_window_ms:
            late_s = self.limits.late_window_ms // 1000
            raise MemoryRefusal(Reason.DUE_TOO_OLD, f"Older than {late_s} s")
        self._check_span(due_ms)

    def _check_span(self, due_ms: int) -> None:
        if due_ms > self.now_ms + self.limits.span_ms:
            span_s = self.limits.span_ms // 1000
            raise MemoryRefusal(Reason.DUE_BEYOND_SPAN, f"More than {span_s} s ahead")

    def _keep(self, sent: SentMessage) -> Kept:
        kept = Kept(sent, next(self._seqs), self.now_ms)
        self._kept[sent.topic, sent.id, sent.due_ms] = kept
        self._by_id[sent.topic, sent.id].append(kept)
        if sent.due_ms <= self.now_ms:
            self._deliver(kept)
        else:
            heappush(self._pending, (sent.due_ms, kept.seq, kept))
        return kept

    def _moved(self, kept: Kept, to_ms: int) -> Kept:
        if to_ms == kept.sent.due_ms:
            return kept
        if (kept.sent.topic, kept.sent.id, to_ms) in self._kept:
            raise MemoryRefusal(Reason.DUE_TAKEN, f"Due {to_ms}")
        kept.standing, kept.moved_to_ms = Standing.CANCELLED, to_ms
        return self._keep(kept.sent._replace(due_ms=to_ms))

    def _is_too_late(self, kept: Kept) -> bool:
        return kept.sent.due_ms < self.now_ms + TOO_LATE_MS

    def _next_due(self) -> Kept | None:
        pending = self._pending
        while pending and pending[0][2].standing is not Standing.PENDING:
            heappop(pending)
        return pending[0][2] if pending else None

    def _deliver(self, kept: Kept) -> None:
        sent = kept.sent
        kept.standing = Standing.DELIVERED
        if is_half(sent):
            kept.is_asked = True
            self.append(letter_of(sent, kept.accepted_ms, WHEEL))
        elif (why := self._dead_for(sent)) is None:
            kept.offset = self.append(sent, self._added(kept))
        else:
            kept.standing, kept.dead_reason = Standing.DEAD_LETTERED, why[0]
            kept.offset = self.append(dead_letter_of(sent, kept.accepted_ms, WHEEL, *why))

    def _dead_for(self, sent: SentMessage) -> tuple[str, str] | None:
        """Returns why a message cannot be delivered, and how; None: it can."""
        ttl_s = ttl_s_of(sent.headers)
        since_ms = sent.due_ms if sent.timestamp_ms is None else sent.timestamp_ms
        if ttl_s is not None and self.now_ms >= since_ms + ttl_s * 1000:
            return "EXPIRED", f"its ttl of {ttl_s} s ended at {since_ms + ttl_s * 1000}"
        return None if self.has_topic(sent.topic) else ("TOPIC_MISSING", sent.topic)

    def answered(self, topic: str, id_: bytes, due_ms: int, answer: HalfAnswer) -> None:
        """Notes what a group has answered about a half."""
        kept = self._kept.get((topic, id_, due_ms))
        if kept is not None:
            kept.answer = answer

    def _added(self, kept: Kept) -> OwnHeaders:
        added = delivery_headers(kept.sent, kept.accepted_ms, WHEEL)
        if kept.sent.timestamp_ms is None:
            return added
        return (*added, ("dw-forwarded", b"%d" % self.now_ms))

    def append(self, sent: SentMessage, added: OwnHeaders = ()) -> int:
        """Has a record appear in its topic now; returns its offset there."""
        log = self.logs[Partition(sent.topic, sent.partition or 0)]
        log.append(len(self.delivered))
        record = DeliveredRecord(
            sent.topic,
            sent.key,
            sent.value,
            sent.headers,
            sent.id,
            sent.due_ms,
            self.now_ms,
            self.now_ms if sent.timestamp_ms is None else sent.timestamp_ms,
            sent.partition,
            len(log) - 1,
            added,
        )
        self.delivered.append(record)
        return record.offset

    def records_from(self, at: Partition, offset: int, most: int) -> list[tuple[int, Incoming]]:
        """Returns so many records of a partition from an offset on, each with its number of all."""
        found: list[tuple[int, Incoming]] = []
        for number in self.logs[at][offset : offset + most]:
            record = self.delivered[number]
            place = Place(*at, record.offset, record.timestamp_ms)
            headers = [*record.headers, *record.added]
            found.append((number, Incoming(place, record.key, record.value, headers)))
        return found


def _due_ms(ref: pb.MessageRef) -> int:
    """Returns the due of a reference; of a handle, its second."""
    if ref.HasField("id_and_due"):
        return ref.id_and_due.due_ms
    return int(ref.handle.split(":")[1]) * 1000


def _meets(sent: SentMessage, wanted: pb.Filter) -> bool:
    header = (wanted.header.name, wanted.header.value)
    return (
        (not wanted.HasField("topic") or sent.topic == wanted.topic)
        and (not wanted.HasField("key") or sent.key == wanted.key)
        and (not wanted.HasField("id") or sent.id == wanted.id)
        and (not wanted.HasField("from_ms") or sent.due_ms >= wanted.from_ms)
        and (not wanted.HasField("to_ms") or sent.due_ms < wanted.to_ms)
        and (
            not wanted.HasField("header")
            or (header in sent.headers)
            or (
                not wanted.header.HasField("value")
                and any(name == wanted.header.name for name, _ in sent.headers)
            )
        )
    )
