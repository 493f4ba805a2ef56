"""A real gRPC server in this process whose answers a test scripts, call by call."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Lock
from typing import Any, NoReturn, Self

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from delaywheel.reasons import DOMAIN, Reason
from delaywheel.testing.rows import SentMessage, rows_of_columns
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as pb_grpc

WHEEL = "fake.1"
Behaviour = Callable[["FakeService", Any, grpc.ServicerContext], Any]


def rows_of(request: pb.DelayProduceRequest) -> list[SentMessage]:
    return list(rows_of_columns(request.columns))


def accept(
    service: FakeService, request: pb.DelayProduceRequest, _context: grpc.ServicerContext
) -> pb.DelayProduceResponse:
    service.accept(rows_of(request))
    return pb.DelayProduceResponse(columns=pb.ColumnResults(wheel=WHEEL))


def refuse_rows(reasons: Mapping[int, Reason | str]) -> Behaviour:
    """Accepts all but the rows given."""

    def behave(
        service: FakeService, request: pb.DelayProduceRequest, _context: grpc.ServicerContext
    ) -> pb.DelayProduceResponse:
        rows = rows_of(request)
        service.accept([row for number, row in enumerate(rows) if number not in reasons])
        errors = [
            pb.RowError(row=row, error=pb.Error(code=3, reason=reason, message="Scripted."))
            for row, reason in reasons.items()
        ]
        return pb.DelayProduceResponse(columns=pb.ColumnResults(wheel=WHEEL, errors=errors))

    return behave


def cancelled(
    outcome: pb.CancelOutcome.ValueType = pb.CANCEL_OUTCOME_CANCELLED, due_ms: int | None = None
) -> Behaviour:
    """Answers what became of the one message that is to be cancelled."""
    result = pb.MessageCancelled(outcome=outcome, due_ms=due_ms)
    return answer(pb.CancelResponse(results=[result]))


def rescheduled(outcome: pb.RescheduleOutcome.ValueType) -> Behaviour:
    """Answers what became of the one message that is to be rescheduled."""
    result = pb.MessageRescheduled(outcome=outcome)
    return answer(pb.RescheduleResponse(results=[result]))


def abort(
    reason: Reason | str, *, code: grpc.StatusCode | None = None, delay_s: float | None = None
) -> Behaviour:
    """Refuses the call with ErrorInfo, as the service does."""

    def behave(_service: FakeService, _request: object, context: grpc.ServicerContext) -> NoReturn:
        status_code = code or Reason[reason].code
        details: list[Any] = [ErrorInfo(reason=reason, domain=DOMAIN)]
        if delay_s is not None:
            info = RetryInfo()
            info.retry_delay.FromNanoseconds(int(delay_s * 1e9))
            details.append(info)
        packed = []
        for detail in details:
            packed.append(AnyMessage())
            packed[-1].Pack(detail)
        status = Status(code=status_code.value[0], message="scripted", details=packed)
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(status_code, "scripted")

    return behave


def abort_bare(code: grpc.StatusCode, text: str = "scripted") -> Behaviour:
    """Ends the call as something other than the service would: no ErrorInfo."""

    def behave(_service: FakeService, _request: object, context: grpc.ServicerContext) -> NoReturn:
        context.abort(code, text)

    return behave


def accept_but_lose_reply(
    service: FakeService, request: pb.DelayProduceRequest, context: grpc.ServicerContext
) -> NoReturn:
    accept(service, request, context)
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def hang(
    service: FakeService, _request: object, context: grpc.ServicerContext
) -> pb.DelayProduceResponse:
    """Answers nothing as long as the caller waits."""
    gone = Event()
    if context.add_callback(gone.set):
        while not gone.wait(0.02) and not service.stopping.is_set():
            pass
    return pb.DelayProduceResponse()


def accept_once(go_on: Event) -> Behaviour:
    """Answers nothing until it may continue, and accepts then."""

    def behave(
        service: FakeService, request: pb.DelayProduceRequest, context: grpc.ServicerContext
    ) -> pb.DelayProduceResponse:
        while not go_on.wait(0.02) and not service.stopping.is_set():
            pass
        return accept(service, request, context)

    return behave


def accept_together(requests: int) -> Behaviour:
    """Answers nothing until this many requests are there; breaks if they do not come."""
    meeting = Barrier(requests, timeout=20)

    def behave(
        service: FakeService, request: pb.DelayProduceRequest, context: grpc.ServicerContext
    ) -> pb.DelayProduceResponse:
        meeting.wait()
        return accept(service, request, context)

    return behave


def answer(response: object) -> Behaviour:
    return lambda _service, _request, _context: response


class FakeService(pb_grpc.DelayWheelServicer):
    """Takes one behaviour of `script` per call, then `otherwise`; remembers every request."""

    def __init__(
        self, *script: Behaviour, otherwise: Behaviour = accept, address: str = "127.0.0.1:0"
    ) -> None:
        self.script = deque(script)
        self.otherwise = otherwise
        self.produced: list[pb.DelayProduceRequest] = []
        self.cancels: list[pb.CancelRequest] = []
        self.commits: list[pb.CommitRequest] = []
        self.gets: list[pb.GetMessageRequest] = []
        self.searches: list[pb.SearchRequest] = []
        self.reschedules: list[pb.RescheduleRequest] = []
        self.many: list[pb.CancelManyRequest] = []
        self.otherwise_many: Behaviour = answer(pb.CancelManyResponse())
        self.described: list[pb.DescribeClusterRequest] = []
        self.describe: Behaviour | None = None
        self.ahead_ms = 0  # of the clock here
        self.levels = {"30s": 30_000, "1m": 60_000}
        self.limits = pb.Limits(max_request_messages=10_000, max_request_bytes=16 << 20)
        self.accepted: Counter[tuple[bytes, int]] = Counter()
        self.stopping = Event()
        self.reached = Event()  # by the first DelayProduce
        self._lock = Lock()
        self._credentials: grpc.ServerCredentials | None = None
        self._pool = ThreadPoolExecutor(16)
        self._server = self._new_server()
        self._bind = address
        self.address = ""

    def with_tls(self, credentials: grpc.ServerCredentials) -> Self:
        self._credentials = credentials
        return self

    def accept(self, rows: Sequence[SentMessage]) -> None:
        with self._lock:
            self.accepted.update((row.id, row.due_ms) for row in rows)

    @property
    def describes(self) -> int:
        """How often it was asked to describe itself."""
        return len(self.described)

    @property
    def sent(self) -> list[list[SentMessage]]:
        """The rows of every DelayProduce, attempt by attempt."""
        return [rows_of(request) for request in self.produced]

    def __enter__(self) -> Self:
        host = self._bind.rpartition(":")[0]
        if self._credentials is None:
            port = self._server.add_insecure_port(self._bind)
        else:
            port = self._server.add_secure_port(self._bind, self._credentials)
        self.address = f"{host}:{port}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.stop(None).wait()
        self._pool.shutdown()

    def DelayProduce(
        self, request: pb.DelayProduceRequest, context: grpc.ServicerContext
    ) -> pb.DelayProduceResponse:
        with self._lock:
            self.produced.append(request)
        return self._behave(request, context, self.otherwise)  # type: ignore[no-any-return]

    def DelayProduceStream(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitResponse:
        self.commits.append(request)
        committed = pb.HalfCommitted(outcome=pb.COMMIT_OUTCOME_COMMITTED)
        response = pb.CommitResponse(results=[committed] * len(request.halves))
        return self._behave(request, context, answer(response))  # type: ignore[no-any-return]

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:
        self.cancels.append(request)
        cancelled = pb.MessageCancelled(outcome=pb.CANCEL_OUTCOME_CANCELLED)
        response = pb.CancelResponse(results=[cancelled] * len(request.messages))
        return self._behave(request, context, answer(response))  # type: ignore[no-any-return]

    def GetMessage(
        self, request: pb.GetMessageRequest, context: grpc.ServicerContext
    ) -> pb.GetMessageResponse:
        self.gets.append(request)
        return self._behave(  # type: ignore[no-any-return]
            request, context, abort(Reason.MESSAGE_NOT_FOUND)
        )

    def CancelMany(
        self, request: pb.CancelManyRequest, context: grpc.ServicerContext
    ) -> pb.CancelManyResponse:
        self.many.append(pb.CancelManyRequest.FromString(request.SerializeToString()))
        return self._behave(  # type: ignore[no-any-return]
            request, context, self.otherwise_many
        )

    def Reschedule(
        self, request: pb.RescheduleRequest, context: grpc.ServicerContext
    ) -> pb.RescheduleResponse:
        self.reschedules.append(request)
        results = [
            pb.MessageRescheduled(
                outcome=pb.RESCHEDULE_OUTCOME_RESCHEDULED,
                due_ms=each.deliver_at_ms,
                handle=f"a.1:{each.deliver_at_ms // 1000}:{bytes(16).hex()}:orders",
            )
            for each in request.messages
        ]
        response = pb.RescheduleResponse(results=results)
        return self._behave(request, context, answer(response))  # type: ignore[no-any-return]

    def Search(self, request: pb.SearchRequest, context: grpc.ServicerContext) -> pb.SearchResponse:
        # A client changes its request for the next page.
        self.searches.append(pb.SearchRequest.FromString(request.SerializeToString()))
        return self._behave(request, context, answer(pb.SearchResponse()))  # type: ignore[no-any-return]

    def ListSlots(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def GetSlot(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def WhoAmI(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    def DescribeCluster(
        self, request: pb.DescribeClusterRequest, context: grpc.ServicerContext
    ) -> pb.DescribeClusterResponse:
        self.described.append(request)
        if self.describe is not None:
            return self.describe(self, request, context)  # type: ignore[no-any-return]
        levels = [pb.Level(name=name, delay_ms=ms) for name, ms in self.levels.items()]
        now_ms = time.time_ns() // 1_000_000 + self.ahead_ms
        return pb.DescribeClusterResponse(levels=levels, limits=self.limits, now_ms=now_ms)

    def _behave(self, request: object, context: grpc.ServicerContext, otherwise: Behaviour) -> Any:
        with self._lock:
            behaviour = self.script.popleft() if self.script else otherwise
        if isinstance(request, pb.DelayProduceRequest):
            self.reached.set()  # the next one, which may come now, behaves as the next
        return behaviour(self, request, context)

    def _new_server(self) -> grpc.Server:
        server = grpc.server(
            self._pool,
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ),
        )
        pb_grpc.add_DelayWheelServicer_to_server(self, server)
        return server
