"""The service in memory: a gRPC server in this process whose clock the test moves."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import RLock
from typing import Any, Final, NoReturn, Self, Unpack

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from delaywheel.client.aio import AsyncClient
from delaywheel.client.sync import Client
from delaywheel.client.transport.real_time import RealTime
from delaywheel.consumer.checking.checker import AsyncHalfChecker, HalfChecker
from delaywheel.consumer.records import Incoming, Partition
from delaywheel.consumer.settings import Options
from delaywheel.deadletters.handling.aio import AsyncLetterHandler
from delaywheel.deadletters.handling.consumer import LetterHandler
from delaywheel.ingress import IngressLimits
from delaywheel.levels import DEFAULT_LEVELS, Duration, length_ms
from delaywheel.message import set_clock, unix_ms
from delaywheel.reasons import DOMAIN, Reason
from delaywheel.testing.checking import MemoryHalfChecker
from delaywheel.testing.consuming import AsyncMemoryConsumer, MemoryConsumer
from delaywheel.testing.engine import MemoryEngine
from delaywheel.testing.halves import CLUSTER, is_half
from delaywheel.testing.kafka import MemoryGroup
from delaywheel.testing.letters import MemoryDeadLetterConsumer
from delaywheel.testing.rows import SentMessage, answer_in, delayed, rows_of_columns, written
from delaywheel.testing.store import (
    WHEEL,
    DeliveredRecord,
    Kept,
    MemoryLimits,
    MemoryStore,
    Standing,
)
from delaywheel.transactional import Outgoing
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as pb_grpc

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_START: Final = datetime(2030, 1, 1, tzinfo=UTC)
_PAGE: Final = 100
_MOST: Final = 1_000


class MemoryService:
    """A delaywheel for unit tests, with a clock of its own. A context manager.

    Within the `with` block the clock also is that of its clients: `delay` and `level` count from
    it. It stands still until the test moves it. The rest of the program still has the real time:
    give `deliver_at` as `service.now + …`, or let the program take its clock.

    Args:
        topics: The topics that Kafka would have; another one is refused, TOPIC_UNKNOWN. None: any.
        start: The time at first.
        span: The greatest delay.
        levels: The delays by name; None: the default ones.
        max_message_bytes: The largest message.

    Attributes:
        address: Where it listens, on loopback: for code that makes its own client.

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
        topics: Iterable[str] | None = None,
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
        )
        self._store: Final = MemoryStore(limits, unix_ms(start))
        self._levels: Final = (
            dict(DEFAULT_LEVELS)
            if levels is None
            else {name: length_ms(length) for name, length in levels.items()}
        )
        self._lock: Final = RLock()
        self.groups: Final = defaultdict[str, MemoryGroup](MemoryGroup)
        self.engines: Final[list[MemoryEngine]] = []
        self._server: Final = grpc.server(ThreadPoolExecutor(8))
        pb_grpc.add_DelayWheelServicer_to_server(_Servicer(self), self._server)
        self.address: Final = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        RealTime().check()
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
        return MemoryConsumer(self, topics, group, options)

    def async_consumer(
        self, topics: str | Iterable[str], *, group: str, **options: Unpack[Options]
    ) -> AsyncMemoryConsumer:
        """Returns an `AsyncRetryConsumer` that needs no Kafka; the options are the same."""
        return AsyncMemoryConsumer(self, topics, group, options)

    def dead_letter_consumer(
        self,
        consumer: MemoryConsumer,
        handlers: Mapping[str, LetterHandler | AsyncLetterHandler],
        *,
        otherwise: LetterHandler | AsyncLetterHandler | None = None,
        attempts: int = 4,
    ) -> MemoryDeadLetterConsumer:
        """Returns what gives a consumer's dead letters to handlers, as `DeadLetterConsumer` does.

        Example:
            ::

                letters = service.dead_letter_consumer(consumer, {"ATTEMPTS_EXHAUSTED": ask})
                letters.run()  # and what was decided is in letters.decided
        """
        return MemoryDeadLetterConsumer(
            self, consumer, handlers, otherwise=otherwise, attempts=attempts
        )

    def half_checker(self, checker: HalfChecker | AsyncHalfChecker) -> MemoryHalfChecker:
        """Returns what has a program's own checker answer for half messages, as Kafka would.

        The checker is made as the program makes it, with any address and cluster: neither is used.

        Example:
            ::

                checks = service.half_checker(Shop(group="shop", bootstrap="-", cluster="-"))
                client.begin("orders", b"never committed", group="shop", hold="3s")
                service.advance("3s")
                checks.run()
                assert checks.counts.done == 1
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


class _Servicer(pb_grpc.DelayWheelServicer):
    """Answers calls as a node does."""

    def __init__(self, service: MemoryService) -> None:
        self._service = service
        self._store = service._store  # noqa: SLF001 - they are two halves of one thing
        self._lock = service._lock  # noqa: SLF001

    def DelayProduce(
        self, request: pb.DelayProduceRequest, _context: Any
    ) -> pb.DelayProduceResponse:
        with self._lock:
            if request.HasField("columns"):
                columns = pb.ColumnResults(wheel=WHEEL)
                marks = request.columns.check_ids
                for row, sent in enumerate(rows_of_columns(request.columns)):
                    check_id = bool(marks) and marks[row] == 1
                    refusal = self._store.accept(sent, check_id=check_id)
                    if refusal is not None:
                        columns.errors.add(row=row, error=_error(*refusal))
                    elif check_id:
                        columns.id_checked.append(row)
                return pb.DelayProduceResponse(columns=columns)
            return pb.DelayProduceResponse(
                results=[self._result(message) for message in request.messages]
            )

    def DelayProduceStream(
        self, request_iterator: Iterator[pb.DelayProduceRequest], context: Any
    ) -> Iterator[pb.DelayProduceResponse]:
        for request in request_iterator:
            yield self.DelayProduce(request, context)

    def ListSlots(self, request: pb.ListSlotsRequest, _context: Any) -> pb.ListSlotsResponse:
        with self._lock:
            last = request.to_slot if request.HasField("to_slot") else 2**62
            slots = [slot for slot in self._store.slots() if request.from_slot <= slot < last]
            limit = min(request.limit or 10_000, 10_000)
            answer = pb.ListSlotsResponse(
                node="memory",
                counted_by=["memory"],
                progress=pb.Progress(due_ms=self._store.now_ms),
                next_slot=slots[limit] if len(slots) > limit else None,
            )
            for slot in slots[:limit]:
                kept = self._store.in_slot(slot)
                answer.slots.add(
                    slot=slot,
                    messages=len(kept),
                    length_bytes=sum(each.sent.length_bytes for each in kept),
                    cancels=sum(each.standing is Standing.CANCELLED for each in kept),
                    wheels=1,
                    copies=1,
                )
            return answer

    def GetSlot(self, request: pb.GetSlotRequest, _context: Any) -> pb.GetSlotResponse:
        with self._lock:
            found = iter(self._store.in_slot(request.slot))
            page, token = _page(found, request.page_token, request.page_size)
            messages = [_stored(kept, with_content=request.with_content) for kept in page]
            return pb.GetSlotResponse(messages=messages, next_page_token=token)

    def WhoAmI(self, _request: pb.WhoAmIRequest, _context: Any) -> pb.WhoAmIResponse:
        return pb.WhoAmIResponse(unlimited=True)

    def Commit(self, request: pb.CommitRequest, _context: Any) -> pb.CommitResponse:
        with self._lock:
            return pb.CommitResponse(
                results=[
                    _committed(self._store.commit(half.id, half.due_ms)) for half in request.halves
                ]
            )

    def Cancel(self, request: pb.CancelRequest, _context: Any) -> pb.CancelResponse:
        with self._lock:
            found = map(self._store.cancel, request.messages)
            return pb.CancelResponse(
                results=[
                    pb.MessageCancelled(outcome=outcome, due_ms=due_ms) for outcome, due_ms in found
                ]
            )

    def Reschedule(self, request: pb.RescheduleRequest, context: Any) -> pb.RescheduleResponse:
        with self._lock:
            if len(request.messages) == 1:
                refusal = self._new_due_refusal(request.messages[0])
                if refusal is not None:
                    _abort(context, *refusal)
            return pb.RescheduleResponse(results=map(self._rescheduled, request.messages))

    def GetMessage(self, request: pb.GetMessageRequest, context: Any) -> pb.GetMessageResponse:
        with self._lock:
            kept = self._store.find(request.message)
            if kept is None:
                _abort(context, Reason.MESSAGE_NOT_FOUND, "")
            stored = _stored(kept, with_content=True)
            if request.find_place and kept.offset is not None:
                stored.place.topic, stored.place.offset = kept.sent.topic, kept.offset
                stored.place.partition = kept.sent.partition or 0
            if request.find_place and kept.answer is not None:
                stored.state = pb.MessageState.Value(f"MESSAGE_STATE_{kept.answer.name}")
            return pb.GetMessageResponse(message=stored)

    def Search(self, request: pb.SearchRequest, _context: Any) -> pb.SearchResponse:
        with self._lock:
            found = self._store.matching(request.filter, with_cancelled=False)
            page, token = _page(found, request.page_token, request.page_size)
            messages = [_stored(kept, with_content=request.with_content) for kept in page]
            return pb.SearchResponse(
                messages=messages, next_page_token=token, looked=pb.Looked(node="memory")
            )

    def CancelMany(self, request: pb.CancelManyRequest, context: Any) -> pb.CancelManyResponse:
        wanted = request.filter
        if not any(wanted.HasField(name) for name in ("topic", "key", "id", "header")):
            _abort(context, Reason.FILTER_MISSING, "")
        with self._lock:
            found = self._store.matching(wanted, with_cancelled=True)
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

    def DescribeCluster(
        self, _request: pb.DescribeClusterRequest, _context: Any
    ) -> pb.DescribeClusterResponse:
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
                max_request_messages=_MOST,
                max_request_bytes=16_777_216,
            ),
            now_ms=self._store.now_ms,
        )

    def _new_due_refusal(self, message: pb.NewDue) -> tuple[Reason, str] | None:
        kept = self._store.find(message.message)
        if kept is not None and is_half(kept.sent):
            return Reason.HALF_KEEPS_DUE, ""
        return self._store.due_refusal(max(message.deliver_at_ms, self._store.now_ms))

    def _rescheduled(self, message: pb.NewDue) -> pb.MessageRescheduled:
        refusal = self._new_due_refusal(message)
        if refusal is not None:
            return pb.MessageRescheduled(error=_error(*refusal))
        return self._store.reschedule(message.message, message.deliver_at_ms)

    def _result(self, message: pb.DelayedMessage) -> pb.ProduceResult:
        """Takes a message of another language's client."""
        due_ms = message.deliver_at_ms
        if message.HasField("level"):
            delay_ms = self._service._levels.get(message.level)  # noqa: SLF001
            if delay_ms is None:
                return pb.ProduceResult(error=_error(Reason.LEVEL_UNKNOWN, message.level))
            due_ms = (message.sent_at_ms or self._store.now_ms) + delay_ms
        elif message.HasField("delay_ms"):
            due_ms = (message.sent_at_ms or self._store.now_ms) + message.delay_ms
        sent = SentMessage(
            message.id if message.HasField("id") else uuid.uuid4().bytes,
            due_ms,
            message.topic,
            message.key if message.HasField("key") else None,
            message.value if message.HasField("value") else None,
            tuple((h.name, h.value if h.HasField("value") else None) for h in message.headers),
            message.partition if message.HasField("partition") else None,
            message.timestamp_ms if message.HasField("timestamp_ms") else None,
        )
        check_id = message.check_id and message.HasField("id")
        refusal = self._store.accept(sent, check_id=check_id)
        if refusal is not None:
            return pb.ProduceResult(error=_error(*refusal))
        handle = f"{WHEEL}:{due_ms // 1000}:{sent.id.hex()}"
        return pb.ProduceResult(handle=handle, due_ms=due_ms, id_checked=check_id)


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
        rescheduled_to_ms=kept.moved_to_ms,
    )
    if with_content:
        if sent.key is not None:
            stored.key = sent.key
        if sent.value is not None:
            stored.value = sent.value
        stored.headers.extend(pb.Header(name=name, value=value) for name, value in sent.headers)
    return stored


def _page(found: Iterator[Kept], token: str, most: int) -> tuple[list[Kept], str]:
    """Returns what follows a token, and the token of the next page."""
    due_ms, seq = map(int, token.split(":")) if token else (0, 0)
    ordered = sorted(found, key=lambda kept: (kept.sent.due_ms, kept.seq))
    rest = [kept for kept in ordered if (kept.sent.due_ms, kept.seq) > (due_ms, seq)]
    page = rest[: min(most or _PAGE, _MOST)]
    return page, f"{page[-1].sent.due_ms}:{page[-1].seq}" if len(page) < len(rest) else ""


def _committed(
    committed: pb.CommitOutcome.ValueType | tuple[Reason, str],
) -> pb.HalfCommitted:
    if isinstance(committed, tuple):
        return pb.HalfCommitted(error=_error(*committed))
    return pb.HalfCommitted(outcome=committed)


def _error(reason: Reason, detail: str) -> pb.Error:
    text = f"{detail}. {reason.advice}" if detail else reason.advice
    return pb.Error(code=reason.code.value[0], reason=reason, message=text)


def _abort(context: Any, reason: Reason, detail: str) -> NoReturn:
    """Ends a call as a node does: with a status that names the reason."""
    error = _error(reason, detail)
    info = AnyMessage()
    info.Pack(ErrorInfo(reason=reason, domain=DOMAIN))
    status = Status(code=error.code, message=error.message, details=[info])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(reason.code, error.message)
    raise AssertionError("abort always raises")
