"""Callers that open calls and send nothing shut nobody out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.process.night import at_night
from support.server.server_process import CHANNEL_OPTIONS, ServerProcess

PRODUCE = "/delaywheel.v1.DelayWheel/DelayProduce"
PRODUCE_STREAM = "/delaywheel.v1.DelayWheel/DelayProduceStream"
CHECK = "/grpc.health.v1.Health/Check"
PATIENCE_S = 180.0
"""A busy machine takes seconds to accept thousands of calls."""
USUALLY_S = 4.0
"""Below the 5 s for which those who sent nothing kept everybody waiting, again and again."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "n1") as server:
        server.wait_accepting()
        yield server


@asynccontextmanager
async def idle_calls(
    server: ServerProcess, method: str, *, connections: int, calls: int
) -> AsyncIterator[grpc.aio.Channel]:
    """Calls whose messages never come; the channel of a caller beside them."""
    async with AsyncExitStack() as held:

        async def connected() -> grpc.aio.Channel:
            channel = grpc.aio.insecure_channel(str(server.address), options=CHANNEL_OPTIONS)
            await held.enter_async_context(channel)
            await channel.channel_ready()
            return channel

        begun: list[Any] = []
        for _ in range(connections):
            idle: Any = (await connected()).stream_stream(method)
            begun += [idle() for _ in range(calls)]
        # Each call's headers are on their way before those of calls that begin now.
        yield await connected()


def request() -> bytes:
    message = pb.DelayedMessage(topic="orders", value=b"v", delay_ms=600_000)
    return pb.DelayProduceRequest(messages=[message]).SerializeToString()


async def produce(beside: grpc.aio.Channel) -> None:
    call: Any = beside.unary_unary(PRODUCE)
    answer = pb.DelayProduceResponse.FromString(await call(request(), timeout=PATIENCE_S))
    assert answer.results[0].handle


async def produce_on_stream(beside: grpc.aio.Channel) -> None:
    """As callers do whom BACKPRESSURE tells to try again."""
    streams: Any = beside.stream_stream(PRODUCE_STREAM)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            stream = streams(iter([request()]))
            try:
                answer = pb.DelayProduceResponse.FromString(await stream.read())
            except grpc.aio.AioRpcError as error:
                # A refusal may come before the request has left: then grpc.aio puts an error of its
                # own in the place of what the server said. Callers try again after either.
                is_unsent = error.code() is grpc.StatusCode.INTERNAL
                if not is_unsent and "BACKPRESSURE" not in str(error.trailing_metadata()):
                    raise
                await asyncio.sleep(0.1)
                continue
            assert not answer.results[0].HasField("error")
            return


async def check(beside: grpc.aio.Channel) -> None:
    call: Any = beside.unary_unary(CHECK)
    answer = health_pb2.HealthCheckResponse.FromString(await call(b"", timeout=PATIENCE_S))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def assert_served(beside: grpc.aio.Channel) -> None:
    """A caller is answered again and again, and usually soon."""
    waited_s = []
    for _ in range(10):
        began_s = time.monotonic()
        await produce(beside)
        await check(beside)
        waited_s.append(time.monotonic() - began_s)
    assert median(waited_s) < USUALLY_S, waited_s


@pytest.mark.parametrize(
    ("method", "connections", "calls"),
    [
        (PRODUCE, 4, 250),
        pytest.param(PRODUCE, 40, 4, marks=at_night),
        pytest.param(CHECK, 4, 250, marks=at_night),
    ],
)
async def test_callers_that_send_nothing_keep_nobody_waiting(
    server: ServerProcess, method: str, connections: int, calls: int
) -> None:
    async with idle_calls(server, method, connections=connections, calls=calls) as beside:
        await assert_served(beside)


@at_night  # 4,352 calls; a push has streams that give way
async def test_open_calls_give_way_to_those_of_callers_with_fewer(server: ServerProcess) -> None:
    """17 connections with all that one may open are more calls than a node takes."""
    async with idle_calls(server, PRODUCE, connections=17, calls=256) as beside:
        await assert_served(beside)


async def test_streams_on_which_nothing_is_sent_give_way(server: ServerProcess) -> None:
    """16 connections with all that one may open are as many as a node has."""
    method = PRODUCE_STREAM
    async with idle_calls(server, method, connections=16, calls=2) as beside:
        for _ in range(3):
            await produce_on_stream(beside)


async def test_of_many_calls_at_once_each_is_answered_or_refused_by_name(
    server: ServerProcess,
) -> None:
    """More than gRPC by itself keeps until they are begun: it would end some as CANCELLED."""
    async with AsyncExitStack() as held:
        calls: list[Any] = []
        for _ in range(12):
            channel = grpc.aio.insecure_channel(str(server.address), options=CHANNEL_OPTIONS)
            await held.enter_async_context(channel)
            await channel.channel_ready()
            unary: Any = channel.unary_unary(PRODUCE)
            calls += [unary(request(), timeout=PATIENCE_S) for _ in range(250)]
        ended = await asyncio.gather(*(code_of(call) for call in calls))
    assert set(ended) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}


async def code_of(call: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = await call.code()
    return code
