"""The memory that callers of large requests can make a server hold: as in docs/SIZING.md.

    python -m pytest -s tests/server/serving/test_caller_memory.py

Each connection does all that it may at once: two streams, and more calls than are received
together, all with the longest requests that are taken. What is measured is the greatest anonymous
memory of the server, above what it had before.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.process.night import at_night
from support.server.server_process import CHANNEL_OPTIONS, ServerProcess

_DOCUMENT = Path(__file__).parents[3] / "docs" / "SIZING.md"
DOC = " ".join(_DOCUMENT.read_text(encoding="utf-8").split())
STATED = re.compile(r"grow by ([\d,]+) MiB at most, those of eight by ([\d,]+)\.")
STREAMS, CALLS = 2, 8
REQUESTS = 4
VALUES, VALUE_BYTES = 16, 999_000
_SERVICE = "/delaywheel.v1.DelayWheel/"


def request_of_columns() -> bytes:
    return pb.DelayProduceRequest(
        columns=pb.ColumnBatch(
            messages=VALUES,
            ids=os.urandom(16 * VALUES),
            due_ms=np.full(VALUES, time.time_ns() // 1_000_000 + 600_000, "<i8").tobytes(),
            topics=["orders"],
            topic_numbers=np.zeros(VALUES, "<u4").tobytes(),
            key_lengths=np.full(VALUES, -1, "<i4").tobytes(),
            value_lengths=np.full(VALUES, VALUE_BYTES, "<i4").tobytes(),
            headers_lengths=np.zeros(VALUES, "<i4").tobytes(),
            blob=bytes(VALUES * VALUE_BYTES),
        )
    ).SerializeToString()


def request_of_rows() -> bytes:
    value = bytes(VALUE_BYTES)
    rows = [pb.DelayedMessage(topic="orders", value=value, delay_ms=600_000) for _ in range(VALUES)]
    return pb.DelayProduceRequest(messages=rows).SerializeToString()


def burden(address: str, connections: int, request: bytes) -> int:
    """Lets callers do all that they may; returns how many of their requests were accepted."""
    channels = [grpc.insecure_channel(address, options=CHANNEL_OPTIONS) for _ in range(connections)]
    begun: list[Callable[[], list[bytes]]] = []
    for channel in channels:
        of_stream: Any = channel.stream_stream(_SERVICE + "DelayProduceStream")
        of_call: Any = channel.unary_unary(_SERVICE + "DelayProduce")
        streams = [of_stream(iter([request] * REQUESTS), timeout=300) for _ in range(STREAMS)]
        calls = [of_call.future(request, timeout=300) for _ in range(CALLS)]
        begun += [partial(list, stream) for stream in streams]
        begun += [partial(_answer, call) for call in calls]
    taken = sum(map(_taken, begun))
    for channel in channels:
        channel.close()
    return taken


def _answer(call: Any) -> list[bytes]:
    return [call.result()]


def _taken(answers: Callable[[], list[bytes]]) -> int:
    try:
        reported = [pb.DelayProduceResponse.FromString(each) for each in answers()]
    except grpc.RpcError:
        return 0
    return sum(not each.HasField("error") for each in reported)


@contextmanager
def watched(server: ServerProcess) -> Iterator[list[int]]:
    """The greatest increase of anonymous memory, in bytes."""
    before = _anonymous_bytes(server)
    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], _anonymous_bytes(server) - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def _anonymous_bytes(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize(
    ("connections", "make"),
    # Eight of them send two gigabytes.
    [(1, request_of_columns), pytest.param(8, request_of_rows, marks=at_night)],
)
def test_a_server_holds_no_more_than_is_stated(
    tmp_path: Path, connections: int, make: Callable[[], bytes]
) -> None:
    with ServerProcess(tmp_path / "n1") as server:
        server.wait_accepting()
        server.produce(pb.DelayedMessage(topic="orders", value=b"v", delay_ms=600_000))
        with watched(server) as most:
            taken = burden(str(server.address), connections, make())
    print(f"{connections} connections, {taken} requests taken: +{most[0] >> 20} MiB")  # noqa: T201
    assert taken > 0
    stated = STATED.search(DOC)
    assert stated is not None
    assert most[0] >> 20 < int(stated[1 if connections == 1 else 2].replace(",", ""))
