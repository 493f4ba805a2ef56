"""Where a row of the table asks: a node with Kafka, or the service in memory."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import grpc
from google.protobuf.message import Message as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from delaywheel import Client, DelaywheelError
from delaywheel.ingress import ingress_topic
from delaywheel.testing import MemoryService
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub
from support.kafka.read_committed import headers_of, read_all, wait_decided

Answers: TypeAlias = Generator[float, None, Any]
"""A row that lets so many seconds pass at each `yield`."""


class Record(NamedTuple):
    """A record of Kafka; of what the service adds the names alone, as the values are its own."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    added: list[str]


class Kafka(Protocol):
    """What a place has beside its node."""

    patience_s: float

    def topic(self, name: str) -> str:
        """Returns the name of a topic there."""
        ...

    def records(self, topic: str) -> list[Record]:
        """Returns what is in a topic."""
        ...

    def now_ms(self) -> int:
        """Returns the time that dues count from."""
        ...

    def pass_until(self, ms: int) -> None:
        """Lets time pass."""
        ...


def record(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> Record:
    own = [pair for pair in headers if not pair[0].startswith("dw-") or "retry" in pair[0]]
    return Record(key, value, own, [name for name, _ in headers if name.startswith("dw-")])


class RealKafka:
    """Time passes by itself."""

    patience_s = 20.0

    def __init__(self, bootstrap: str, names: Mapping[str, str]) -> None:
        self._bootstrap = bootstrap
        self._names = names

    def topic(self, name: str) -> str:
        return self._names.get(name, name)

    def records(self, topic: str) -> list[Record]:
        wait_decided(self._bootstrap, self.topic(topic))
        found = read_all(self._bootstrap, self.topic(topic))
        return [record(one.key(), one.value(), headers_of(one)) for one in found]

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def pass_until(self, ms: int) -> None:
        time.sleep(max(0, ms - self.now_ms()) / 1000)


class MemoryKafka:
    """The service in memory; time passes at once."""

    patience_s = 0.0

    def __init__(self, service: MemoryService) -> None:
        self._service = service

    def topic(self, name: str) -> str:
        return ingress_topic("memory") if name == "ingress" else name

    def records(self, topic: str) -> list[Record]:
        found = self._service.delivered(topic)
        return [record(one.key, one.value, [*one.headers, *one.added]) for one in found]

    def now_ms(self) -> int:
        return self._service.now_ms

    def pass_until(self, ms: int) -> None:
        self._service.advance(f"{max(0, ms - self.now_ms())}ms")


class Place:
    """A node, and what has been seen of the protocol there.

    Attributes:
        seen: The fields of requests that were given, and the enumerated values of answers.
    """

    def __init__(self, address: str, client: Client, kafka: Kafka) -> None:
        self.address = address
        self.client = client
        self.kafka = kafka
        self.seen: set[str] = set()
        self._row = ""
        self._answers: list[object] = []
        self._stub = DelayWheelStub(grpc.insecure_channel(address))

    def answers(self, row: Callable[[Place], Answers | None]) -> Answers:
        """Runs a row; returns its answers when it is over."""
        given: list[object] = []
        self._row, self._answers = row.__name__, given
        running = row(self)
        while running is not None:
            try:
                seconds = next(running)
            except StopIteration:
                break
            yield seconds
            self._row, self._answers = row.__name__, given
        return given

    def id(self, number: int) -> bytes:
        """Returns an id of a row's own."""
        return uuid.uuid5(uuid.NAMESPACE_OID, f"{self._row}/{number}").bytes

    def say(self, answer: object) -> None:
        """Notes an answer of the row."""
        self._answers.append(self._plain(answer))

    def ask(self, what: Callable[[], object]) -> None:
        """Notes what a call of the client comes to."""
        self.say(self._tried(what))

    def _tried(self, what: Callable[[], object]) -> object:
        try:
            return self._plain(what())
        except DelaywheelError as error:
            return self._plain(error)

    def call(self, name: str, request: AnyMessage) -> Any:
        """Calls the node; returns the answer, or else the refusal, with its code."""
        self.seen.add(f"DelayWheel.{name}")
        self._note(request)
        given: Any = iter([request]) if name == "DelayProduceStream" else request
        try:
            answer = getattr(self._stub, name)(given, timeout=30)
            answer = next(answer) if name == "DelayProduceStream" else answer
        except grpc.RpcError as error:
            return self._refusal(error)
        self._note(answer)
        return answer

    def send(self, topic: str = "t", **fields: Any) -> Any:
        """Sends one message in rows; notes what it comes to, and returns its result."""
        message = pb.DelayedMessage(topic=self.kafka.topic(topic), **fields)
        answer = self.call("DelayProduce", pb.DelayProduceRequest(messages=[message]))
        result = answer.results[0] if isinstance(answer, pb.DelayProduceResponse) else answer
        self.say(self.outcome(result))
        return result

    def outcome(self, result: Any) -> object:
        """Returns a result without what is the node's own."""
        if isinstance(result, tuple):
            return result
        if result.HasField("error"):
            self.seen.add(f"Reason.{result.error.reason}")
            return (result.error.reason, result.error.code)
        return [
            (one.name, value)
            for one, value in result.ListFields()
            if one.name not in {"handle", "due_ms", "error"}
        ]

    def eventually(self, wanted: object, ask: Callable[[], object]) -> None:
        """Notes an answer, which a node gives a moment later than the service in memory."""
        plain, deadline = self._plain(wanted), time.monotonic() + self.kafka.patience_s
        while (answer := self._tried(ask)) != plain and time.monotonic() < deadline:
            time.sleep(0.05)
        self.say(answer)

    def _refusal(self, error: Any) -> tuple[str, str]:
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                for detail in Status.FromString(value).details:
                    info = ErrorInfo()
                    if detail.Unpack(info):
                        self.seen.add(f"Reason.{info.reason}")
                        return (error.code().name, info.reason)
        return (error.code().name, "")

    def _note(self, message: AnyMessage) -> None:
        """Notes the fields and the enumerated values that are there."""
        for one, value in message.ListFields():
            self.seen.add(f"{message.DESCRIPTOR.name}.{one.name}")
            values = value if one.is_repeated else [value]
            if one.message_type is not None:
                for each in values:
                    self._note(each)
            elif one.enum_type is not None:
                names = [one.enum_type.values_by_number[each].name for each in values]
                self.seen.update(f"{one.enum_type.name}.{name.split('_', 2)[2]}" for name in names)

    def _plain(self, answer: object) -> object:
        """Returns an answer as values that may be compared; notes its outcomes."""
        if isinstance(answer, Enum):
            self.seen.add(f"{type(answer).__name__}.{answer.name}")
            return f"{type(answer).__name__}.{answer.name}"
        if isinstance(answer, DelaywheelError):
            reason = getattr(answer, "reason", None)
            self.seen.add(f"Reason.{reason}")
            return [type(answer).__name__, str(reason), answer.outcome_known]
        if isinstance(answer, Record):
            return answer
        if isinstance(answer, list | tuple):
            return [self._plain(each) for each in answer]
        return answer
