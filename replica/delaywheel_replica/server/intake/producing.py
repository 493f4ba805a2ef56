"""Handles DelayProduce and DelayProduceStream, from a request's bytes to its answer's.

A message's refusal is an error in its result; a request's refusal is the status of the call or, on
a stream, an error in its response, so that the stream continues.

Decoding and encoding that take more than some milliseconds are done on a thread, in turns by
sharer: so large requests wait only for each other, and for one of each other sharer. Small ones are
not worth the hand-over: a pass of the loop does some of them (`LoopTime`).

What is for topics that Kafka is asked about is a part of its own: the rest of the request is
written before, and the answer waits for both.

A request's bytes are released once columns are made of them, before it is written: code that passes
them on must not keep them. Otherwise a waiting request would be in memory twice.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter_ns
from typing import Final, TypeVar

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.access.audit import Audit
from delaywheel_replica.server.access.callers import CallContext, Caller, CallOrigin
from delaywheel_replica.server.access.spending import TopicRooms, no_quotas
from delaywheel_replica.server.commit.committer import Committed
from delaywheel_replica.server.commit.own_halves import OwnHalves
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.intake.admission import Admission, cost_bytes
from delaywheel_replica.server.intake.calls import Answer, StreamContext
from delaywheel_replica.server.intake.columnar import headers_bytes
from delaywheel_replica.server.intake.known_topics import KnownTopics
from delaywheel_replica.server.intake.unpacking import Outline, is_short, outline_of
from delaywheel_replica.server.intake.validate import (
    IntakeRules,
    RequestBatch,
    decode_outlined,
    refuse_forbidden,
    refuse_foreign_halves,
    refuse_without_room,
)
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.naming import handle_of, key_of
from delaywheel_replica.server.node.node_view import wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, refusal_of
from delaywheel_replica.server.node.turns import Turns

# How many requests of one stream may wait for their answers at the same time.
_STREAM_WINDOW: Final = 256
# Beyond these lengths, each some millisecond's work, a request of messages, or one of columns, goes
# to the thread. The cost of columns is their numbers, topics and headers' names; contents stay in
# place.
_FEW_ROWS: Final = 64
_FEW_ROW_BYTES: Final = 1 << 14
_FEW_COLUMN_ROWS: Final = 2_000
_FEW_TOPICS: Final = 128
_FEW_HEADER_BYTES: Final = 1 << 14
PASS_S: Final = 0.02

_Made = TypeVar("_Made")


@dataclass(slots=True)
class IntakeStages:
    """The stages that a produce request passes through."""

    # Why the node accepts no messages now; None: it does.
    refusal: Callable[[], Refusal | None]
    rules: IntakeRules
    admission: Admission
    topics: KnownTopics
    writing: Writing
    counts: NodeCounts
    # Looks for earlier messages with the ids of those that ask for it; refuses, notes the checked.
    check_ids: Callable[[RequestBatch, Hashable], Awaitable[None]]
    audit: Audit = field(default_factory=Audit)
    # Returns what says how much more may be pending in a topic; None: no topic has a quota.
    topic_rooms: TopicRooms = no_quotas
    halves: OwnHalves = field(default_factory=OwnHalves)


class LoopTime:
    """Limits how long the event loop works on requests in one pass. For its thread.

    Hundreds of small ones may arrive in the same pass of the loop, and everything else waits until
    it is over: the cleaner's messages, health checks, other callers. So a pass does some of them,
    and leaves the rest, in order, to the next ones.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Begins with nothing done.

        Args:
            clock: In seconds.
        """
        self._clock = clock
        self._spent_s = 0.0
        self._is_counting = False

    async def do(self, work: Callable[[], _Made]) -> _Made:
        """Does some work, in this pass or a later one."""
        while self._spent_s >= PASS_S:  # noqa: ASYNC110 - so that waiting work keeps its order
            await asyncio.sleep(0)
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._end_pass)
        began_s = self._clock()
        try:
            return work()
        finally:
            self._spent_s += self._clock() - began_s

    def _end_pass(self) -> None:
        """Begins the next pass."""
        self._spent_s = 0.0
        self._is_counting = False


class Producing:
    """Accepts messages. For the event loop's thread."""

    def __init__(self, stages: IntakeStages) -> None:
        self._stages = stages
        self._turns = Turns("decode")
        self._loop_time = LoopTime()

    def close(self) -> None:
        """Ends the thread."""
        self._turns.close()

    async def one(self, request: bytes, call: CallContext) -> Answer:
        """Answers one request.

        Raises:
            RequestRefusedError: All of it is refused.
        """
        outline = await self._outlined(request, call.sharer)
        producing = self._produce(request, outline, call.origin, call.caller)
        del request
        return await producing

    async def stream(self, context: StreamContext) -> None:
        """Answers the requests of a stream, in order."""
        stream = _Stream()
        reading = asyncio.create_task(self._read(context, stream))
        try:
            while (task := await stream.answers.get()) is not None:
                try:
                    await context.write((await task).content)
                finally:
                    task.add_done_callback(_end)
                stream.window.release()
            await reading
        finally:
            # What is being written will be written; there is no caller left to answer.
            reading.cancel()
            stream.abandon()

    async def _outlined(self, request: bytes, sharer: Hashable) -> Outline:
        max_messages = self._stages.rules.max_request_messages
        return await self._done(
            is_short(request), sharer, partial(outline_of, request, max_messages=max_messages)
        )

    async def _produce(
        self, request: bytes, outline: Outline, origin: CallOrigin, caller: Caller
    ) -> Answer:
        """Carries out a request, and counts the outcomes of its messages."""
        stages = self._stages
        began = perf_counter_ns()
        taking = self._take(request, outline, origin, caller)
        del request
        try:
            batch, wheel = await taking
        except RequestRefusedError as error:
            stages.counts.refused[error.refusal.reason] += outline.messages
            raise
        content = await self._done(
            len(batch.refusals if outline.columns is not None else batch) <= _FEW_ROWS,
            origin.sharer,
            partial(_row_results if outline.columns is None else _column_results, batch, wheel),
        )
        took_us = (perf_counter_ns() - began) // 1_000
        stages.counts.answered(len(batch), batch.refusals, took_us)
        return Answer(content, stages.admission.hold_answer(origin, len(content)))

    async def _take(
        self, request: bytes, outline: Outline, origin: CallOrigin, caller: Caller
    ) -> tuple[RequestBatch, WheelId | None]:
        stages = self._stages
        refusal = stages.refusal()
        if refusal is not None:
            raise RequestRefusedError.of(refusal)
        caller.spend(outline.messages, len(request))
        with stages.admission.admit(origin, cost_bytes(request, outline.messages)) as ticket:
            is_small, sharer = _is_small(request, outline), origin.sharer
            decode = partial(self._decode, request, outline, caller, origin.address)
            decoding = self._done(is_small, sharer, decode)
            del decode
            del request
            batch, parts = await decoding
            writes = list[tuple[RequestBatch, asyncio.Future[Committed]]]()
            for part, doubtful in parts:
                if doubtful:
                    unasked = await stages.topics.find_out(doubtful, sharer)
                    await self._done(is_small, sharer, partial(self._judge, part, unasked))
                if len(part.to_check):
                    await stages.check_ids(part, sharer)
                    await self._done(is_small, sharer, partial(self._accept, part))
                if len(part.accepted):
                    answer = stages.writing.submit(part.accepted)
                    if part.halves:  # may be committed before this request is answered
                        answer.add_done_callback(partial(self._note_halves, part))
                    writes.append((part, answer))
                    ticket.hand_on(answer)
            wheel: WheelId | None = None
            for part, answer in writes:
                wheel = await self._written(part, answer, wheel, is_all=part is batch)
        for part, _ in parts:
            if part is not batch:
                batch.join(part)
        return batch, wheel

    async def _written(
        self,
        part: RequestBatch,
        answer: "asyncio.Future[Committed]",
        wheel: WheelId | None,
        *,
        is_all: bool,
    ) -> WheelId | None:
        """Waits until what was accepted is written; returns the wheel of all that is.

        Args:
            wheel: That of an earlier part. An answer has one wheel: what is in another one, since
                this node's has ended meanwhile, is sent again, and is the same message.
            is_all: Whether the part is the request, whose refusal is that of the call.

        Raises:
            RequestRefusedError: All of it is refused.
        """
        try:
            committed = await asyncio.shield(answer)
        except RequestRefusedError as error:
            if is_all:
                raise
            part.refuse(range(len(part)), error.refusal)
            return wheel
        part.refuse_accepted(committed.failed)
        if wheel is not None and wheel != committed.wheel:
            part.refuse(range(len(part)), Refusal(Reason.WHEEL_LOST))
        return wheel or committed.wheel

    def _note_halves(self, part: RequestBatch, answer: "asyncio.Future[Committed]") -> None:
        """Notes which halves are held now, also if the caller has left."""
        if not answer.cancelled() and answer.exception() is None:
            committed = answer.result()
            part.refuse_accepted(committed.failed)
            self._stages.halves.accepted(committed.wheel, part.accepted_halves(), wall_ms())

    def _decode(
        self, request: bytes, outline: Outline, caller: Caller, address: str
    ) -> tuple[RequestBatch, list[tuple[RequestBatch, list[str]]]]:
        """Decodes a request, and judges what it can. For any thread.

        Returns:
            All of it, and its parts, in the order in which they are written, each with the topics
            that must be asked about before it is judged.
        """
        stages = self._stages
        batch = decode_outlined(request, outline, stages.rules, now_ms=wall_ms())
        refused = refuse_forbidden(batch, caller)
        refusal = next(iter(refused.values()), None) or refuse_foreign_halves(batch, caller)
        if refusal is not None:
            stages.audit.refused("DelayProduce", address, refusal)
        doubtful = [name for name in stages.topics.doubtful(batch) if name not in refused]
        whole_or_two = batch.apart(doubtful)
        parts = [(part, doubtful if part is whole_or_two[-1] else []) for part in whole_or_two]
        for part, names in parts:
            if not names:
                self._judge(part, ())
        return batch, parts

    def _judge(self, batch: RequestBatch, unasked: Collection[str]) -> None:
        """Judges decoded messages. For any thread."""
        self._stages.topics.judge(batch, unasked)
        if not len(batch.to_check):  # else once the earlier ones were looked for
            self._accept(batch)

    def _accept(self, batch: RequestBatch) -> None:
        """Accepts what is not refused, as far as its topics have room. For any thread."""
        if (room_in := self._stages.topic_rooms()) is not None:
            refuse_without_room(batch, room_in)
        batch.accept()

    async def _done(self, is_small: bool, sharer: Hashable, work: Callable[[], _Made]) -> _Made:
        """Does some work here or, if it may take long, on the thread, when it is its turn."""
        if is_small:
            return await self._loop_time.do(work)
        return await self._turns.take(sharer, work)

    async def _read(self, context: StreamContext, stream: "_Stream") -> None:
        """Reads a stream, pausing while its window or the caller's bound is full.

        So a caller is slowed down, not refused, when the node is slow or when it does not read its
        answers.
        """
        origin, caller = context.origin, context.caller
        admission = self._stages.admission
        try:
            while isinstance(request := await context.read(), bytes):
                await stream.window.acquire()
                outline = await self._outlined(request, origin.sharer)
                await admission.wait_for_room(origin, cost_bytes(request, outline.messages))
                stream.answers.put_nowait(
                    asyncio.create_task(self._produce_on_stream(request, outline, origin, caller))
                )
                del request
        finally:
            stream.answers.put_nowait(None)

    async def _produce_on_stream(
        self, request: bytes, outline: Outline, origin: CallOrigin, caller: Caller
    ) -> Answer:
        producing = self._produce(request, outline, origin, caller)
        del request
        try:
            return await producing
        except Exception as error:  # noqa: BLE001 - as in calls.py
            refusal = refusal_of(error)
        self._stages.counts.refused_calls["DelayProduceStream", refusal.reason] += 1
        content = pb.DelayProduceResponse(error=refusal.as_error()).SerializeToString()
        return Answer(content, self._stages.admission.hold_answer(origin, len(content)))


def _is_small(request: bytes, outline: Outline) -> bool:
    if outline.columns is None:
        return len(request) <= _FEW_ROW_BYTES and outline.messages <= _FEW_ROWS
    return (
        outline.messages <= _FEW_COLUMN_ROWS
        and len(outline.topics) <= _FEW_TOPICS
        and headers_bytes(request, outline) <= _FEW_HEADER_BYTES
    )


def _row_results(batch: RequestBatch, wheel: WheelId | None) -> bytes:
    """Returns the results of a request of rows as bytes: one for each message, in order.

    Thousands of messages may be refused for the same reason: its error is encoded once.
    """
    columns = batch.columns
    errors: dict[Refusal, bytes] = {}
    checked = set(batch.checked)
    results = []
    for row, due_ms in enumerate(columns.due_ms.tolist()):
        refusal = batch.refusals.get(row)
        if refusal is None:
            handle = handle_of(wheel, key_of(columns, row))
            result = pb.ProduceResult(handle=handle, due_ms=due_ms, id_checked=row in checked)
            results.append(_encoded(result))
        elif (known := errors.get(refusal)) is not None:
            results.append(known)
        else:
            errors[refusal] = _encoded(pb.ProduceResult(error=refusal.as_error()))
            results.append(errors[refusal])
    return b"".join(results)


def _encoded(result: pb.ProduceResult) -> bytes:
    """Encodes one result as a field; a response is the concatenation of its fields."""
    return pb.DelayProduceResponse(results=[result]).SerializeToString()


def _column_results(batch: RequestBatch, wheel: WheelId | None) -> bytes:
    """Returns the results of a request of columns: the wheel, and the refused messages."""
    errors: dict[Refusal, pb.Error] = {}
    results = pb.ColumnResults(wheel=str(wheel) if wheel is not None else "")
    for row, refusal in sorted(batch.refusals.items(), key=lambda item: item[0]):
        error = errors.get(refusal)
        if error is None:
            error = errors[refusal] = refusal.as_error()
        results.errors.add(row=row, error=error)
    results.id_checked.extend(row for row in batch.checked if row not in batch.refusals)
    return pb.DelayProduceResponse(columns=results).SerializeToString()


class _Stream:
    """One stream's requests under way: answers in order, within a window."""

    def __init__(self) -> None:
        self.window = asyncio.Semaphore(_STREAM_WINDOW)
        # None: the caller has sent its last request.
        self.answers: asyncio.Queue[asyncio.Task[Answer] | None] = asyncio.Queue()

    def abandon(self) -> None:
        """Releases the answers once they exist, since the caller is gone."""
        while not self.answers.empty():
            task = self.answers.get_nowait()
            if task is not None:
                task.add_done_callback(_end)


def _end(task: "asyncio.Task[Answer]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().end()
