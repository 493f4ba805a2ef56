"""The service in memory: a gRPC server in this process whose clock the test moves."""

from __future__ import annotations

import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import wraps
from itertools import groupby
from threading import RLock
from typing import Any, Final, Self, TypeVar, Unpack, overload

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from delaywheel.client.aio import AsyncClient
from delaywheel.client.sync import Client
from delaywheel.client.transport.real_time import RealTime
from delaywheel.consumer.aio import AsyncRetryConsumer
from delaywheel.consumer.checking.checker import AsyncHalfChecker, HalfChecker
from delaywheel.consumer.records import Incoming, Partition
from delaywheel.consumer.settings import Options, read_settings
from delaywheel.consumer.sync import RetryConsumer
from delaywheel.deadletters.handling.aio import AsyncLetterHandler
from delaywheel.deadletters.handling.consumer import LetterHandler
from delaywheel.ingress import HEADERS_MOST, IngressLimits
from delaywheel.levels import DEFAULT_LEVELS, Duration, length_ms
from delaywheel.message import set_clock, unix_ms
from delaywheel.reasons import DOMAIN, Reason
from delaywheel.testing.checking import MemoryHalfChecker
from delaywheel.testing.consuming import AsyncMemoryConsumer, MemoryConsumer
from delaywheel.testing.engine import MemoryEngine
from delaywheel.testing.halves import CLUSTER, is_half
from delaywheel.testing.kafka import MemoryGroup
from delaywheel.testing.letters import MemoryDeadLetterConsumer
from delaywheel.testing.refusing import (
    SECONDS,
    MemoryRefusal,
    check_id,
    each_named,
    place_of,
)
from delaywheel.testing.rows import (
    SentMessage,
    answer_in,
    check_columns,
    delayed,
    rows_of_columns,
    written,
)
from delaywheel.testing.store import (
    WHEEL,
    DeliveredRecord,
    Kept,
    MemoryLimits,
    MemoryStore,
    Standing,
)
from delaywheel.testing.tracing import MemoryTrace
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reports import EventReports
from delaywheel.transactional import Outgoing
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as pb_grpc

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_START: Final = datetime(2030, 1, 1, tzinfo=UTC)
_PAGE: Final = 100
_MOST: Final = 1_000
_MOST_SENT: Final = 10_000
_HEADERS_SENT: Final = 200_000


class MemoryService:
    """A delaywheel for unit tests, with a clock of its own. A context manager.

    Within the `with` block the clock also is that of its clients: `delay` and `level` count from
    it. It stands still until the test moves it. The rest of the program still has the real time:
    give `deliver_at` as `service.now + …`, or let the program take its clock.

    Args:
        topics: The topics that Kafka would have; another one is refused, TOPIC_UNKNOWN. With the
            number of partitions of each, others are refused, too, PARTITION_INVALID. None: any.
        start: The time at first.
        span: The greatest delay.
        levels: The delays by name; None: the service's own.

    Attributes:
        address: Where it listens, on loopback: for code that makes its own client.
        traced: The events of its traces, each with its kind and its columns.

    Example:
        ::

            with MemoryService(topics=["reminders"]) as service, service.client() as client:
                handle = client.produce("reminders", b"call back", key=b"42", delay="2h")
                service.advance("1h")
                assert client.cancel(handle).outcome is CancelOutcome.CANCELLED
                service.advance("1h")
                assert service.delivered() == []
    """

    def __init__(
        self,
        *,
        topics: Iterable[str] | Mapping[str, int] | None = None,
        start: datetime = _START,
        span: Duration = timedelta(days=7),
        levels: Mapping[str, Duration] | None = None,
        max_message_bytes: int = 1_000_000,
    ) -> None:
        limits = MemoryLimits(
            span_ms=length_ms(span),
            late_window_ms=120_000,
            max_message_bytes=max_message_bytes,
            topics=None if topics is None else frozenset(topics),
            partitions=topics if isinstance(topics, Mapping) else None,
        )
        self._store: Final = MemoryStore(limits, unix_ms(start))
        self._levels: Final = (
            dict(DEFAULT_LEVELS)
            if levels is None
            else {name: length_ms(length) for name, length in levels.items()}
        )
        self._lock: Final = RLock()
        self.traced: Final[list[dict[str, Any]]] = []
        self.groups: Final = defaultdict[str, MemoryGroup](MemoryGroup)
        self.engines: Final[list[MemoryEngine]] = []
        self._server: Final = grpc.server(ThreadPoolExecutor(8))
        pb_grpc.add_DelayWheelServicer_to_server(_Servicer(self), self._server)
        self.address: Final = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        RealTime().now_s()
        self._server.start()
        set_clock(self.address, self.clock_ns)
        return self

    def __exit__(self, *_: object) -> None:
        set_clock(self.address, None)
        self._server.stop(None).wait()

    def clock_ns(self) -> int:
        """The time by the service's clock in Unix nanoseconds."""
        return self._store.now_ms * 1_000_000

    @property
    def now(self) -> datetime:
        """The time by the service's clock."""
        return _EPOCH + timedelta(milliseconds=self._store.now_ms)

    def client(self, **options: Any) -> Client:
        """Returns a client of this service; the options are those of `Client`."""
        return Client(self.address, **options)

    def async_client(self, **options: Any) -> AsyncClient:
        """Returns a client for asyncio; the options are those of `AsyncClient`."""
        return AsyncClient(self.address, **options)

    def trace(self, **options: Any) -> EventReports:
        """Returns a trace for clients and consumers, whose events are in `traced` at once.

        The options are those of `delaywheel.trace.Trace`, without Kafka and cluster.
        """
        chosen = TraceOptions(**options)
        return EventReports(MemoryTrace(self.traced, chosen), chosen)

    def consumer(
        self, topics: str | Iterable[str], *, group: str, **options: Unpack[Options]
    ) -> MemoryConsumer:
        """Returns a `RetryConsumer` that needs no Kafka; the options are the same.

        Example:
            ::

                consumer = service.consumer("orders", group="billing", retry=("1s", "2s"))
                client.produce("orders", b"unlucky", delay="5s")
                service.advance("5s")
                for message in consumer:
                    with message:
                        charge(message.value)
                service.advance("1s")  # and the retry appears
        """
        return MemoryConsumer(self, read_settings(topics, group, CLUSTER, options))

    def async_consumer(
        self, topics: str | Iterable[str], *, group: str, **options: Unpack[Options]
    ) -> AsyncMemoryConsumer:
        """Returns an `AsyncRetryConsumer` that needs no Kafka; the options are the same."""
        return AsyncMemoryConsumer(self, read_settings(topics, group, CLUSTER, options))

    @overload
    def in_memory(self, consumer: RetryConsumer) -> MemoryConsumer: ...

    @overload
    def in_memory(self, consumer: AsyncRetryConsumer) -> AsyncMemoryConsumer: ...

    def in_memory(
        self, consumer: RetryConsumer | AsyncRetryConsumer
    ) -> MemoryConsumer | AsyncMemoryConsumer:
        """Returns a consumer in memory with the topics, group and options of a program's own.

        Put in its place, it gets the handlers that the program has for that.
        """
        settings = replace(consumer.settings, topics=copy(consumer.settings.topics))
        if isinstance(consumer, AsyncRetryConsumer):
            return AsyncMemoryConsumer(self, settings)
        return MemoryConsumer(self, settings)

    def dead_letter_consumer(
        self,
        consumer: MemoryConsumer,
        handlers: Mapping[str, LetterHandler | AsyncLetterHandler],
        *,
        otherwise: LetterHandler | AsyncLetterHandler | None = None,
        attempts: int = 4,
        trace: EventReports | None = None,
    ) -> MemoryDeadLetterConsumer:
        """Returns what gives a consumer's dead letters to handlers, as `DeadLetterConsumer` does.

        Example:
            ::

                letters = service.dead_letter_consumer(consumer, {"ATTEMPTS_EXHAUSTED": ask})
                letters.run()  # and what was decided is in letters.decided
        """
        return MemoryDeadLetterConsumer(
            self, consumer, handlers, otherwise=otherwise, attempts=attempts, trace=trace
        )

    def half_checker(self, checker: HalfChecker | AsyncHalfChecker) -> MemoryHalfChecker:
        """Returns what has a program's own checker answer for half messages, as Kafka would.

        The checker is made as the program makes it, with any address and cluster: neither is used.
        """
        return MemoryHalfChecker(self, checker)

    def write(self, record: Outgoing) -> None:
        """Has a record appear in its topic now, as if a program had written it to Kafka."""
        with self._lock:
            self._store.append(written(record, self.now_ms))

    def take_record(self, record: Outgoing) -> None:
        """Takes a record of the ingress topic."""
        with self._lock:
            answered = answer_in(record)
            if answered is None:
                self._store.take_in(delayed(record))
            else:
                self._store.answered(*answered)

    @property
    def topics(self) -> AbstractSet[str]:
        """The topics that are known to be there."""
        with self._lock:
            found = {at.topic for at in self._store.logs}
            return found | self._store.made_topics | (self._store.limits.topics or frozenset())

    def has_topic(self, topic: str) -> bool:
        """Whether Kafka would have such a topic."""
        return self._store.has_topic(topic)

    def add_topics(self, topics: Iterable[str]) -> None:
        """Notes that a consumer has made topics."""
        with self._lock:
            self._store.made_topics.update(topics)

    def partitions_of(self, topic: str) -> int:
        """Returns how many partitions a topic has, as far as anything is in them."""
        with self._lock:
            return 1 + max((at.number for at in self._store.logs if at.topic == topic), default=0)

    def records_from(self, at: Partition, offset: int, most: int) -> list[tuple[int, Incoming]]:
        """Returns so many records of a partition from an offset on, each with its number of all."""
        with self._lock:
            return self._store.records_from(at, offset, most)

    def end_of(self, at: Partition) -> int:
        """Returns the next offset of a partition."""
        with self._lock:
            return len(self._store.logs[at])

    @property
    def ingress_limits(self) -> IngressLimits:
        """What it takes from consumers."""
        limits = self._store.limits
        return IngressLimits(limits.span_ms, limits.max_message_bytes, takes_answers=True)

    @property
    def now_ms(self) -> int:
        """The time by the service's clock in Unix milliseconds."""
        return self._store.now_ms

    def advance(self, length: Duration) -> list[DeliveredRecord]:
        """Moves the clock on, and returns what appeared meanwhile, in the order of dues."""
        return self.advance_to(self.now + timedelta(milliseconds=length_ms(length)))

    def advance_to(self, moment: datetime) -> list[DeliveredRecord]:
        """Moves the clock to a moment, unless that has passed; see `advance`."""
        self._let_engines_run()
        with self._lock:
            before = len(self._store.delivered)
            self._store.advance_to(unix_ms(moment))
            appeared = self._store.delivered[before:]
        self._let_engines_run()
        return appeared

    def delivered(self, topic: str | None = None) -> list[DeliveredRecord]:
        """Returns what appeared in a topic, or in all of them, in that order."""
        self._let_engines_run()
        with self._lock:
            if topic is None:
                return self._store.delivered[:]
            return [each for each in self._store.delivered if each.topic == topic]

    def _let_engines_run(self) -> None:
        """Has consumers commit what is settled, and see what is there."""
        for engine in self.engines:
            if engine.has_begun:
                engine.run_on()


def _answering(
    answer: Callable[[_Servicer, RequestT], ResponseT],
) -> Callable[[_Servicer, RequestT, Any], ResponseT]:
    """Returns a call that is answered under the lock, and that a refusal ends as a node's."""

    @wraps(answer)
    def call(servicer: _Servicer, request: RequestT, context: Any) -> ResponseT:
        try:
            with servicer.lock:
                return answer(servicer, request)
        except MemoryRefusal as refusal:
            error, info = refusal.error, AnyMessage()
            info.Pack(ErrorInfo(reason=error.reason, domain=DOMAIN))
            status = Status(code=error.code, message=error.message, details=[info])
            told = (("grpc-status-details-bin", status.SerializeToString()),)
            context.set_trailing_metadata(told)
            context.abort(refusal.reason.code, error.message)
            raise

    return call


class _Servicer(pb_grpc.DelayWheelServicer):
    """Answers calls as a node does."""

    def __init__(self, service: MemoryService) -> None:
        self._service = service
        self._store = service._store  # noqa: SLF001 - they are two halves of one thing
        self.lock = service._lock  # noqa: SLF001

    @_answering
    def DelayProduce(self, request: pb.DelayProduceRequest) -> pb.DelayProduceResponse:
        return self._produced(request)

    def DelayProduceStream(
        self, request_iterator: Iterator[pb.DelayProduceRequest], _context: Any
    ) -> Iterator[pb.DelayProduceResponse]:
        for request in request_iterator:
            try:
                with self.lock:
                    yield self._produced(request)
            except MemoryRefusal as refusal:
                yield pb.DelayProduceResponse(error=refusal.error)

    def _produced(self, request: pb.DelayProduceRequest) -> pb.DelayProduceResponse:
        if request.HasField("columns") == bool(request.messages):
            raise MemoryRefusal(Reason.REQUEST_MALFORMED, "Give either messages or columns")
        if max(len(request.messages), request.columns.messages) > _MOST_SENT:
            raise MemoryRefusal(Reason.TOO_MANY_MESSAGES, f"More than {_MOST_SENT:,} messages")
        if request.messages:
            _check_headers_of(len(one.headers) for one in request.messages)
            return pb.DelayProduceResponse(results=map(self._result, request.messages))
        columns, answer = request.columns, pb.ColumnResults(wheel=WHEEL)
        check_columns(columns)
        rows = list(rows_of_columns(columns))
        _check_headers_of(len(one.headers) for one in rows)
        for row, sent in enumerate(rows):
            is_checked = columns.check_ids[row : row + 1] == b"\1"
            try:
                self._store.accept(sent, check_id=is_checked)
            except MemoryRefusal as refusal:
                answer.errors.add(row=row, error=refusal.error)
            else:
                answer.id_checked.extend([row] * is_checked)
        return pb.DelayProduceResponse(columns=answer)

    @_answering
    def ListSlots(self, request: pb.ListSlotsRequest) -> pb.ListSlotsResponse:
        last = request.to_slot if request.HasField("to_slot") else 2**62
        listed = [slot for slot in self._store.slots() if request.from_slot <= slot < last]
        bucket_s = max(1, request.bucket_seconds)
        buckets = {
            first: [*of] for first, of in groupby(listed, lambda s: s // bucket_s * bucket_s)
        }
        slots = [*buckets]
        limit = min(request.limit or 10_000, 10_000)
        answer = pb.ListSlotsResponse(
            node="memory",
            counted_by=["memory"],
            progress=pb.Progress(due_ms=self._store.now_ms),
            next_slot=slots[limit] if len(slots) > limit else None,
            bucket_seconds=request.bucket_seconds,
        )
        for slot in slots[:limit]:
            kept = [each for second in buckets[slot] for each in self._store.in_slot(second)]
            answer.slots.add(
                slot=slot,
                messages=len(kept),
                length_bytes=sum(each.sent.length_bytes for each in kept),
                cancels=sum(each.standing is Standing.CANCELLED for each in kept),
                wheels=1,
                copies=1,
            )
        return answer

    @_answering
    def GetSlot(self, request: pb.GetSlotRequest) -> pb.GetSlotResponse:
        if not 0 < request.slot < SECONDS:
            raise MemoryRefusal(Reason.SLOT_INVALID)
        found = iter(self._store.in_slot(request.slot))
        page, token = _page(found, request.page_token, request.page_size)
        messages = [_stored(kept, with_content=request.with_content) for kept in page]
        return pb.GetSlotResponse(messages=messages, next_page_token=token)

    @_answering
    def WhoAmI(self, _request: pb.WhoAmIRequest) -> pb.WhoAmIResponse:
        return pb.WhoAmIResponse(unlimited=True)

    @_answering
    def Commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        def commit(half: pb.HalfRef) -> pb.HalfCommitted:
            return pb.HalfCommitted(outcome=self._store.commit(half))

        results = each_named(request.halves, commit, lambda error: pb.HalfCommitted(error=error))
        return pb.CommitResponse(results=results)

    @_answering
    def Cancel(self, request: pb.CancelRequest) -> pb.CancelResponse:
        named, cancel = request.messages, self._store.cancel
        results = each_named(named, cancel, lambda error: pb.MessageCancelled(error=error))
        return pb.CancelResponse(results=results)

    @_answering
    def Reschedule(self, request: pb.RescheduleRequest) -> pb.RescheduleResponse:
        named, move = request.messages, self._store.reschedule
        results = each_named(named, move, lambda error: pb.MessageRescheduled(error=error))
        return pb.RescheduleResponse(results=results)

    @_answering
    def GetMessage(self, request: pb.GetMessageRequest) -> pb.GetMessageResponse:
        kept = self._store.find(request.message)
        if kept is None:
            raise MemoryRefusal(Reason.MESSAGE_NOT_FOUND)
        stored = _stored(kept, with_content=True)
        if request.find_place and kept.offset is not None:
            stored.place.topic, stored.place.offset = kept.sent.topic, kept.offset
            stored.place.partition = kept.sent.partition or 0
        if request.find_place and kept.answer is not None:
            stored.state = pb.MessageState.Value(f"MESSAGE_STATE_{kept.answer.name}")
        return pb.GetMessageResponse(message=stored)

    @_answering
    def Search(self, request: pb.SearchRequest) -> pb.SearchResponse:
        found = self._store.matching(request.filter, with_cancelled=False)
        page, token = _page(found, request.page_token, request.page_size)
        messages = [_stored(kept, with_content=request.with_content) for kept in page]
        return pb.SearchResponse(
            messages=messages, next_page_token=token, looked=pb.Looked(node="memory")
        )

    @_answering
    def CancelMany(self, request: pb.CancelManyRequest) -> pb.CancelManyResponse:
        wanted = request.filter
        if not any(wanted.HasField(name) for name in ("topic", "key", "id", "header")):
            raise MemoryRefusal(Reason.FILTER_MISSING)
        found = self._store.matching(wanted, with_cancelled=True)
        found = (kept for kept in found if _is_within(kept.sent.topic, request.within))
        page, token = _page(found, request.page_token, request.limit)
        answer = pb.CancelManyResponse(next_page_token=token, looked=pb.Looked(node="memory"))
        for kept in page:
            if is_half(kept.sent):
                answer.halves += kept.standing is Standing.PENDING
                continue
            was_pending = kept.standing is Standing.PENDING
            outcome = pb.CANCEL_OUTCOME_UNSPECIFIED
            if not (request.dry_run and was_pending):
                outcome = self._store.cancel_kept(kept)
            answer.results.add(
                handle=kept.handle,
                due_ms=kept.sent.due_ms,
                topic=kept.sent.topic,
                outcome=outcome,
                cancelled_before=outcome == pb.CANCEL_OUTCOME_CANCELLED and not was_pending,
            )
        return answer

    @_answering
    def DescribeCluster(self, _request: pb.DescribeClusterRequest) -> pb.DescribeClusterResponse:
        limits, address = self._store.limits, self._service.address
        member = pb.Member(node="memory", address=address, reachable=True, accepting=True)
        return pb.DescribeClusterResponse(
            cluster_id=CLUSTER,
            node="memory",
            version="memory",
            leader=pb.Leader(node="memory", epoch=1),
            members=[member],
            min_insync=1,
            levels=[
                pb.Level(name=name, delay_ms=ms)
                for name, ms in self._service._levels.items()  # noqa: SLF001
            ],
            limits=pb.Limits(
                span_seconds=limits.span_ms // 1000,
                late_window_seconds=limits.late_window_ms // 1000,
                max_message_bytes=limits.max_message_bytes,
                max_request_messages=_MOST_SENT,
                max_request_bytes=16_777_216,
            ),
            now_ms=self._store.now_ms,
        )

    def _result(self, message: pb.DelayedMessage) -> pb.ProduceResult:
        """Takes a message of another language's client."""
        try:
            sent = self._sent(message)
            is_checked = message.check_id and message.HasField("id")
            self._store.accept(sent, check_id=is_checked)
        except MemoryRefusal as refusal:
            return pb.ProduceResult(error=refusal.error)
        handle = f"{WHEEL}:{sent.due_ms // 1000}:{sent.id.hex()}:{sent.topic}"
        return pb.ProduceResult(handle=handle, due_ms=sent.due_ms, id_checked=is_checked)

    def _sent(self, message: pb.DelayedMessage) -> SentMessage:
        if message.HasField("id"):
            check_id(message.id)
        return SentMessage(
            message.id if message.HasField("id") else uuid.uuid4().bytes,
            self._due_of(message),
            message.topic,
            message.key if message.HasField("key") else None,
            message.value if message.HasField("value") else None,
            tuple((h.name, h.value if h.HasField("value") else None) for h in message.headers),
            message.partition if message.HasField("partition") else None,
            message.timestamp_ms if message.HasField("timestamp_ms") else None,
        )

    def _due_of(self, message: pb.DelayedMessage) -> int:
        given = [message.HasField(way) for way in ("deliver_at_ms", "delay_ms", "level")]
        if sum(given) != 1:
            raise MemoryRefusal(Reason.DUE_AMBIGUOUS if sum(given) else Reason.DUE_MISSING)
        if given[0]:
            return message.deliver_at_ms
        if message.HasField("id") and not message.HasField("sent_at_ms"):
            raise MemoryRefusal(Reason.SENT_AT_MISSING)
        delay_ms = message.delay_ms
        if given[2]:
            levels = self._service._levels  # noqa: SLF001
            if message.level not in levels:
                raise MemoryRefusal(Reason.LEVEL_UNKNOWN, f"No level {message.level[:60]}")
            delay_ms = levels[message.level]
        if delay_ms < 0:
            raise MemoryRefusal(Reason.DELAY_INVALID, f"A delay of {delay_ms} ms")
        sent_at_ms = message.sent_at_ms if message.HasField("sent_at_ms") else self._store.now_ms
        return sent_at_ms + delay_ms


def _check_headers_of(counts: Iterable[int]) -> None:
    if sum(min(count, HEADERS_MOST) for count in counts) > _HEADERS_SENT:
        raise MemoryRefusal(Reason.REQUEST_TOO_LARGE, f"More than {_HEADERS_SENT:,} headers")


def _stored(kept: Kept, *, with_content: bool) -> pb.StoredMessage:
    sent = kept.sent
    stored = pb.StoredMessage(
        handle=kept.handle,
        id=sent.id,
        due_ms=sent.due_ms,
        topic=sent.topic,
        partition=sent.partition,
        timestamp_ms=sent.timestamp_ms,
        accepted_at_ms=kept.accepted_ms,
        wheel=WHEEL,
        seq=kept.seq,
        state=kept.state,
        key_length_bytes=-1 if sent.key is None else len(sent.key),
        value_length_bytes=-1 if sent.value is None else len(sent.value),
        headers_length_bytes=sent.headers_length_bytes,
        dead_reason=kept.dead_reason,
        rescheduled_to_ms=kept.moved_to_ms,
    )
    if with_content:
        if sent.key is not None:
            stored.key = sent.key
        if sent.value is not None:
            stored.value = sent.value
        stored.headers.extend(pb.Header(name=name, value=value) for name, value in sent.headers)
    return stored


def _is_within(topic: str, within: Iterable[pb.TopicPatterns]) -> bool:
    return all(
        any(re.fullmatch(".*".join(map(re.escape, one.split("*"))), topic) for one in each.any_of)
        for each in within
    )


def _page(found: Iterator[Kept], token: str, most: int) -> tuple[list[Kept], str]:
    """Returns what follows a token, and the token of the next page."""
    due_ms, seq = place_of(token)
    ordered = sorted(found, key=lambda kept: (kept.sent.due_ms, kept.seq))
    rest = [kept for kept in ordered if (kept.sent.due_ms, kept.seq) > (due_ms, seq)]
    page = rest[: min(most or _PAGE, _MOST)]
    return page, f"{page[-1].sent.due_ms}:{page[-1].seq}" if len(page) < len(rest) else ""
