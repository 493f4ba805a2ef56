"""Callers' possible attacks on a node: every call; malformed, huge, tiny, repeated requests.

All goes over the wire as bytes, so that nothing is right that gRPC's own client would see to.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.server.server_process import CHANNEL_OPTIONS

METHODS = sorted(
    f"/{service.full_name}/{method.name}"
    for file in (pb, health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
_LONGEST_BYTES = 5 << 20
_PRODUCING = [f"/delaywheel.v1.DelayWheel/DelayProduce{end}" for end in ("", "Stream")]


class Way(Enum):
    """How a caller treats the answers."""

    READ = "reads them"
    LEAVE = "leaves before they come"
    HOLD = "does not read them"


@dataclass(frozen=True, slots=True)
class Attack:
    """Some callers that do the same, each with its own connection."""

    method: str
    requests: tuple[bytes, ...]
    way: Way
    callers: int = 1

    def __repr__(self) -> str:
        """Short: requests are long."""
        contents = ", ".join(
            f"{content[:24]!r}… {len(content)} bytes" for content in self.requests[:1]
        )
        callers = "a caller" if self.callers == 1 else f"{self.callers} callers"
        return f"{self.method} {len(self.requests)} x [{contents}], {callers}, {self.way.value}"

    def begin(self, address: str) -> Callable[[], None]:
        """Sends the requests; the returned function ends that."""
        ends = [self._begin_one(address) for _ in range(self.callers)]

        def end() -> None:
            for each in ends:
                each()

        return end

    def _begin_one(self, address: str) -> Callable[[], None]:
        channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        of_bytes: Any = channel.stream_stream(self.method)
        call = of_bytes(iter(self.requests), timeout=30)
        if self.way is Way.LEAVE:
            time.sleep(len(self.requests) * 0.002)
            call.cancel()

        def end() -> None:
            with contextlib.suppress(grpc.RpcError):
                if self.way is Way.READ:
                    for _ in call:
                        pass
            call.cancel()
            channel.close()

        return end


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, on the wire."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    """A number, on the wire."""
    encoded = b""
    while number >= 0x80:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def columns(
    messages: int, topics: list[str], ahead_ms: int, header: bytes, headers: int, value: int
) -> bytes:
    """A request of consistent columns, though not all may be accepted.

    Args:
        messages: how many.
        topics: of the messages in turn.
        ahead_ms: how far from now they fall due.
        header: one, encoded.
        headers: how many of it each has, if that is not too long.
        value: its length, if that is not too long.
    """
    headers = min(headers, _LONGEST_BYTES // (messages * max(1, len(header))))
    value = min(value, (_LONGEST_BYTES - messages * headers * len(header)) // messages)
    content = bytes(max(0, value)) + header * headers
    return pb.DelayProduceRequest(
        columns=pb.ColumnBatch(
            messages=messages,
            ids=np.random.default_rng(messages).bytes(16 * messages),
            due_ms=np.full(messages, _now_ms() + ahead_ms, "<i8").tobytes(),
            topics=topics[:messages],
            topic_numbers=(np.arange(messages) % len(topics[:messages])).astype("<u4").tobytes(),
            key_lengths=np.full(messages, -1, "<i4").tobytes(),
            value_lengths=np.full(messages, max(0, value), "<i4").tobytes(),
            headers_lengths=np.full(messages, headers * len(header), "<i4").tobytes(),
            blob=content * messages,
        )
    ).SerializeToString()


def _repeated(unit: bytes, length_bytes: int, wrap: Callable[[bytes], bytes]) -> bytes:
    return wrap(unit * max(1, length_bytes // max(1, len(unit))))


_TEXTS = st.text(max_size=20) | st.sampled_from(["orders", "x" * 70_000, "", "\0"])
_INT64 = st.integers(-(2**63), 2**63 - 1)
_ROWS = st.builds(
    pb.DelayedMessage,
    id=st.none() | st.binary(max_size=16) | st.binary(min_size=16, max_size=16),
    topic=_TEXTS,
    key=st.none() | st.binary(max_size=20),
    value=st.none() | st.binary(max_size=20) | st.just(bytes(200_000)),
    headers=st.lists(st.builds(pb.Header, name=_TEXTS, value=st.binary(max_size=9)), max_size=3),
    partition=st.none() | st.integers(-(2**31), 2**31 - 1),
    timestamp_ms=st.none() | _INT64,
    deliver_at_ms=st.none() | _INT64 | st.integers(0, 500_000).map(lambda ms: _now_ms() + ms),
    delay_ms=st.none() | _INT64 | st.integers(0, 500_000),
    level=st.none() | _TEXTS,
    check_id=st.booleans(),
)
_REFERENCES = st.builds(pb.MessageRef, handle=_TEXTS) | st.builds(
    pb.MessageRef,
    id_and_due=st.builds(pb.IdAndDue, id=st.binary(max_size=17), due_ms=_INT64, topic=_TEXTS),
)
_FILTERS = st.builds(
    pb.Filter,
    topic=st.none() | _TEXTS,
    key=st.none() | st.binary(max_size=9),
    id=st.none() | st.binary(max_size=17),
    header=st.none() | st.builds(pb.Header, name=_TEXTS, value=st.none() | st.binary(max_size=9)),
    from_ms=st.none() | _INT64,
    to_ms=st.none() | _INT64,
)
_QUESTIONS = (
    st.builds(pb.CancelRequest, messages=st.lists(_REFERENCES, max_size=3))
    | st.builds(pb.GetMessageRequest, message=_REFERENCES)
    | st.builds(
        pb.ListSlotsRequest,
        from_slot=st.none() | _INT64,
        to_slot=st.none() | _INT64,
        limit=st.integers(0, 2**32 - 1),
        all_members=st.booleans(),
    )
    | st.builds(
        pb.GetSlotRequest,
        slot=_INT64 | st.integers(0, 500).map(lambda s: _now_ms() // 1000 + s),
        page_size=st.integers(0, 2**32 - 1),
        page_token=_TEXTS | st.just("n1.1/1/0"),
        with_content=st.booleans(),
    )
    | st.builds(
        pb.RescheduleRequest,
        messages=st.lists(
            st.builds(
                pb.NewDue,
                message=_REFERENCES,
                deliver_at_ms=_INT64 | st.integers(0, 500_000).map(lambda ms: _now_ms() + ms),
            ),
            max_size=3,
        ),
        partly=st.booleans(),
    )
    | st.builds(
        pb.CancelManyRequest,
        filter=_FILTERS,
        limit=st.integers(0, 2**32 - 1),
        page_token=_TEXTS | st.just("5"),
        dry_run=st.booleans(),
    )
    | st.builds(
        pb.SearchRequest,
        filter=_FILTERS,
        page_size=st.integers(0, 2**32 - 1),
        page_token=_TEXTS | st.just("5") | st.just("5/n1.1/1/0"),
        with_content=st.booleans(),
    )
    | st.builds(pb.DescribeClusterRequest, details=st.booleans(), all_members=st.booleans())
    | st.builds(pb.SetBackRequest, set_backs=st.integers(0, 2**64 - 1), dry_run=st.booleans())
    | st.builds(pb.RemoveNodeRequest, node=_TEXTS, dry_run=st.booleans())
    | st.builds(pb.ReplaceNodeRequest, node=_TEXTS, storage=_TEXTS, dry_run=st.booleans())
)
_TINY = st.builds(
    _repeated,
    st.sampled_from([b"\x0a\x00", b"\x12\x00", b"\x22\x00", b"\x2a\x00", b"\x18\x01", b"\x30\x01"])
    | st.binary(min_size=1, max_size=6),
    st.sampled_from([100, 20_000, 70_000, 1_000_000, 4_000_000, _LONGEST_BYTES]),
    st.sampled_from(
        [
            bytes,
            lambda b: field(1, b),
            lambda b: field(2, b"\x08\x0a" + b),
            lambda b: field(1, b) * 4,
        ]
    ),
)
_PRODUCE = (
    st.lists(_ROWS, max_size=6).map(
        lambda rows: pb.DelayProduceRequest(messages=rows).SerializeToString()
    )
    | st.tuples(_ROWS, st.sampled_from([300, 10_000])).map(
        lambda pair: field(1, pair[0].SerializeToString()[:400]) * pair[1]
    )
    | st.builds(
        columns,
        st.sampled_from([1, 2, 33, 300, 10_000]),
        st.lists(_TEXTS, min_size=1, max_size=3)
        | st.just([f"t{number}" for number in range(10_000)]),
        st.integers(-30_000, 700_000),
        st.sampled_from([b"", b"\1\0\0\0\xff\xff\xff\xffa", b"\1\0\0\0\0\0\0\0\xff", bytes(9)]),
        st.sampled_from([0, 1, 20, 10_001, 500_000]),
        st.sampled_from([0, 100, 99_000, 3_000_000]),
    )
)
_REQUESTS = (
    st.tuples(st.sampled_from(_PRODUCING), _PRODUCE)
    | st.tuples(st.sampled_from(_PRODUCING), _TINY)
    | st.tuples(st.sampled_from(METHODS), _QUESTIONS.map(lambda each: each.SerializeToString()))
    | st.tuples(st.sampled_from(METHODS), st.binary(max_size=300) | _TINY)
)
ATTACKS = st.builds(
    lambda request, times, way, callers: Attack(request[0], (request[1],) * times, way, callers),
    _REQUESTS,
    st.sampled_from([0, 1, 1, 2, 20, 300]),
    st.sampled_from([Way.READ, Way.READ, Way.LEAVE, Way.HOLD]),
    st.sampled_from([1, 1, 1, 12]),
)
