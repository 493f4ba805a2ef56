"""How many calls of one method gRPC's server begins while its loop is busy."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import grpc
import pytest

from delaywheel_replica.server.accepting import CALLS_AT_ONCE, accepting_several_calls

CALLS = 60
PASS_S = 0.002


class _Served:
    """A server with one method, whose answers wait for `goes_on`."""

    def __init__(self, way: AbstractContextManager[None]) -> None:
        self.begun = 0
        self.goes_on = asyncio.Event()
        with way:
            self.server = grpc.aio.server()
        echo: Any = grpc.unary_unary_rpc_method_handler(self._echo)
        self.server.add_registered_method_handlers("test", {"Echo": echo})
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def _echo(self, request: bytes, _: object) -> bytes:
        self.begun += 1
        await self.goes_on.wait()
        return request


async def passes_until_all_have_begun(way: AbstractContextManager[None]) -> int:
    """Has another loop's client make calls, and counts passes of this one, which are long."""
    served, passes, loop = _Served(way), 0, asyncio.get_running_loop()
    await served.server.start()

    def client() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            call: Any = channel.unary_unary("/test/Echo")
            answers = [call.future(b"x") for _ in range(CALLS)]
            assert [answer.result(60) for answer in answers] == [b"x"] * CALLS

    calling = loop.run_in_executor(None, client)
    async with asyncio.timeout(60):
        while not served.begun:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
        while served.begun < CALLS:
            passes += 1
            until_s = perf_counter() + PASS_S
            while perf_counter() < until_s:
                pass
            await asyncio.sleep(0)
    served.goes_on.set()
    await calling
    await served.server.stop(None)
    return passes


def test_a_busy_loop_begins_calls_of_a_method_in_half_of_the_passes() -> None:
    ours = asyncio.run(passes_until_all_have_begun(accepting_several_calls()))
    plain = asyncio.run(passes_until_all_have_begun(nullcontext()))
    assert plain > 2 * ours, "gRPC accepts several calls by itself: the module can go"


def test_a_server_that_stops_begins_what_has_come(caplog: pytest.LogCaptureFixture) -> None:
    async def calls_and_stops() -> tuple[list[object], int]:
        served = _Served(accepting_several_calls())
        await served.server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            call: Any = channel.unary_unary("/test/Echo")
            answers = [asyncio.ensure_future(call(b"x")) for _ in range(CALLS)]
            async with asyncio.timeout(60):
                while not served.begun:  # noqa: ASYNC110 - nothing announces it
                    await asyncio.sleep(0)
                served.goes_on.set()
                await served.server.stop(60)
            return await asyncio.gather(*answers, return_exceptions=True), served.begun

    answers, begun = asyncio.run(calls_and_stops())
    assert begun >= CALLS_AT_ONCE
    assert answers.count(b"x") == begun
    others = {error.code() for error in answers if isinstance(error, grpc.RpcError)}
    assert others <= {grpc.StatusCode.CANCELLED}  # as if it had never come: clients try again
    assert not caplog.records
