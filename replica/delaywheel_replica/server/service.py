"""The gRPC service: calls in, answers and statuses out. Decisions are made elsewhere.

A message's refusal is an error in its result; a request's refusal is the status of the call, or,
on a stream, an error in its response, so that the stream goes on.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from delaywheel.identity import WheelId
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from delaywheel_replica.server.admission import Admission
from delaywheel_replica.server.answering import Context, answered, defect
from delaywheel_replica.server.asking import Asking
from delaywheel_replica.server.cancels import Cancels
from delaywheel_replica.server.counts import Counts
from delaywheel_replica.server.passing import was_passed
from delaywheel_replica.server.queries import Queries
from delaywheel_replica.server.references import reference_of
from delaywheel_replica.server.refusals import Refusal, RefusedError
from delaywheel_replica.server.requests import Batch, Rules, decode
from delaywheel_replica.server.status import wall_ms
from delaywheel_replica.server.topics import KnownTopics
from delaywheel_replica.server.writing import Writing

# Requests of one stream that may wait for their answers at the same time.
_STREAM_WINDOW: Final = 256

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class Accepting:
    """What a produce request passes through."""

    # Why the node takes no messages now; None: it does.
    refusal: Callable[[], Refusal | None]
    rules: Rules
    admission: Admission
    topics: KnownTopics
    writing: Writing
    counts: Counts


class DelayWheelService(rpc.DelayWheelServicer):
    """The calls of ``delaywheel.v1.DelayWheel``."""

    def __init__(
        self,
        accepting: Accepting,
        queries: Queries,
        cancels: Cancels,
        asking: Asking,
    ) -> None:
        self._accepting = accepting
        self._queries = queries
        self._cancels = cancels
        self._asking = asking

    async def DelayProduce(  # noqa: N802 - gRPC's names
        self, request: pb.DelayProduceRequest, context: Context
    ) -> pb.DelayProduceResponse:
        """See the protocol."""
        return await self._answered(context, "DelayProduce", self._produce(request, context.peer()))

    async def DelayProduceStream(  # noqa: N802 - gRPC's names
        self, request_iterator: AsyncIterator[pb.DelayProduceRequest], context: Context
    ) -> AsyncIterator[pb.DelayProduceResponse]:
        """See the protocol."""
        stream = _Stream()
        reading = asyncio.create_task(self._read(request_iterator, context.peer(), stream))
        try:
            while (answer := await stream.answers.get()) is not None:
                yield await answer
                stream.window.release()
            await reading
        finally:
            # What is being written is written; nobody is left to be told.
            reading.cancel()

    async def Cancel(  # noqa: N802 - gRPC's names
        self, request: pb.CancelRequest, context: Context
    ) -> pb.CancelResponse:
        """See the protocol."""
        passed = was_passed(context.invocation_metadata())
        work = self._cancels.cancel(request, passed=passed)
        return await self._answered(context, "Cancel", work)

    async def GetMessage(  # noqa: N802 - gRPC's names
        self, request: pb.GetMessageRequest, context: Context
    ) -> pb.GetMessageResponse:
        """See the protocol."""
        return await self._answered(context, "GetMessage", self._get_message(request))

    async def ListSlots(  # noqa: N802 - gRPC's names
        self, request: pb.ListSlotsRequest, context: Context
    ) -> pb.ListSlotsResponse:
        """See the protocol."""
        work = self._asking.list_slots(request, context.time_remaining())
        return await self._answered(context, "ListSlots", work)

    async def GetSlot(  # noqa: N802 - gRPC's names
        self, request: pb.GetSlotRequest, context: Context
    ) -> pb.GetSlotResponse:
        """See the protocol."""
        return await self._answered(context, "GetSlot", self._queries.get_slot(request))

    async def DescribeCluster(  # noqa: N802 - gRPC's names
        self, request: pb.DescribeClusterRequest, context: Context
    ) -> pb.DescribeClusterResponse:
        """See the protocol."""
        work = self._asking.describe(request, context.time_remaining())
        return await self._answered(context, "DescribeCluster", work)

    async def _get_message(self, request: pb.GetMessageRequest) -> pb.GetMessageResponse:
        message = await self._queries.get_message(reference_of(request.message))
        return pb.GetMessageResponse(message=message)

    # --- producing

    async def _produce(
        self, request: pb.DelayProduceRequest, caller: str
    ) -> pb.DelayProduceResponse:
        """Takes a request, and counts what became of its messages."""
        counts = self._accepting.counts
        in_columns = request.HasField("columns")
        try:
            batch, wheel = await self._take(request, caller)
        except RefusedError as error:
            messages = request.columns.messages if in_columns else len(request.messages)
            counts.refused_request(messages, error.refusal.reason)
            raise
        counts.answered(len(batch), batch.refusals)
        return _column_results(batch, wheel) if in_columns else _row_results(batch, wheel)

    async def _take(
        self, request: pb.DelayProduceRequest, caller: str
    ) -> tuple[Batch, WheelId | None]:
        parts = self._accepting
        refusal = parts.refusal()
        if refusal is not None:
            raise RefusedError(refusal.reason, refusal.detail)
        with parts.admission.admit(caller, request.ByteSize()) as ticket:
            batch = decode(request, parts.rules, now_ms=wall_ms())
            await parts.topics.check(batch)
            columns, rows = batch.accepted()
            wheel: WheelId | None = None
            if len(columns):
                answer = parts.writing.submit(columns)
                ticket.hand_on(answer)
                committed = await asyncio.shield(answer)
                wheel = committed.wheel
                for row, failed in committed.failed.items():
                    batch.refuse([row if rows is None else int(rows[row])], failed)
        return batch, wheel

    async def _read(
        self, requests: AsyncIterator[pb.DelayProduceRequest], caller: str, stream: "_Stream"
    ) -> None:
        """Reads a stream, but not while its window or the caller's bound is full.

        So its caller feels it when the node is slow, and is not refused for it.
        """
        in_flight: deque[asyncio.Task[pb.DelayProduceResponse]] = deque()
        try:
            async for request in requests:
                await stream.window.acquire()
                length_bytes = request.ByteSize()
                while in_flight and not self._accepting.admission.caller_has_room(
                    caller, length_bytes
                ):
                    await asyncio.wait([in_flight.popleft()])
                task = asyncio.create_task(self._produce_on_stream(request, caller))
                in_flight.append(task)
                while in_flight and in_flight[0].done():
                    in_flight.popleft()
                stream.answers.put_nowait(task)
        finally:
            stream.answers.put_nowait(None)

    async def _produce_on_stream(
        self, request: pb.DelayProduceRequest, caller: str
    ) -> pb.DelayProduceResponse:
        try:
            return await self._produce(request, caller)
        except RefusedError as error:
            refusal = error.refusal
        except Exception as error:  # noqa: BLE001 - as in `answered`
            refusal = defect(error)
        self._accepting.counts.refused_calls["DelayProduceStream", refusal.reason] += 1
        return pb.DelayProduceResponse(error=refusal.as_error())

    async def _answered(self, context: Context, call: str, work: Awaitable[_Answer]) -> _Answer:
        return await answered(self._accepting.counts, context, call, work)


class _Stream:
    """One stream's requests on their way: answers in order, at most a window of them."""

    def __init__(self) -> None:
        self.window = asyncio.Semaphore(_STREAM_WINDOW)
        # None: the caller has sent its last request.
        self.answers: asyncio.Queue[asyncio.Task[pb.DelayProduceResponse] | None] = asyncio.Queue()


def _row_results(batch: Batch, wheel: WheelId | None) -> pb.DelayProduceResponse:
    columns = batch.columns
    ids = columns.ids.tobytes().hex()
    results = []
    for row, due_ms in enumerate(columns.due_ms.tolist()):
        refusal = batch.refusals.get(row)
        if refusal is not None:
            results.append(pb.ProduceResult(error=refusal.as_error()))
        else:
            handle = f"{wheel}:{due_ms // 1000}:{ids[row * 32 : row * 32 + 32]}"
            results.append(pb.ProduceResult(handle=handle, due_ms=due_ms))
    return pb.DelayProduceResponse(results=results)


def _column_results(batch: Batch, wheel: WheelId | None) -> pb.DelayProduceResponse:
    results = pb.ColumnResults(
        wheel=str(wheel) if wheel is not None else "",
        errors=[
            pb.RowError(row=row, error=refusal.as_error())
            for row, refusal in sorted(batch.refusals.items())
        ],
    )
    return pb.DelayProduceResponse(columns=results)
