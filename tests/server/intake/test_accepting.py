"""Calls of one method that gRPC's server has accepted and not begun."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from delaywheel.client.transport.wakeups import reading_all_wakeups
from delaywheel_replica.server.accepting import accepting_several_calls

CALLS = 60
GRACE_S = 10
"""Above what the calls that were begun take; gRPC's core may lose another one and wait for it."""


class _Served:
    """A server with one method, whose answers wait for `goes_on`."""

    def __init__(self) -> None:
        self.begun = 0
        self.goes_on = asyncio.Event()
        with reading_all_wakeups(), accepting_several_calls() as self.accepting:
            self.server: Any = grpc.aio.server()
        echo: Any = grpc.unary_unary_rpc_method_handler(self._echo)
        self.server.add_registered_method_handlers("test", {"Echo": echo})
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def _echo(self, request: bytes, _: object) -> bytes:
        self.begun += 1
        await self.goes_on.wait()
        return request


def test_a_server_that_stops_begins_what_has_come(caplog: pytest.LogCaptureFixture) -> None:
    async def calls_and_stops() -> tuple[list[object], int]:
        served = _Served()
        await served.server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            call: Any = channel.unary_unary("/test/Echo")
            answers = [asyncio.ensure_future(call(b"x")) for _ in range(CALLS)]
            async with asyncio.timeout(60):
                while not (come := sum(len(line.come) for line in served.accepting.lines)):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                came = served.begun + come
                served.goes_on.set()
                await served.server.stop(GRACE_S)
            assert served.begun >= came
            return await asyncio.gather(*answers, return_exceptions=True), served.begun

    answers, begun = asyncio.run(calls_and_stops())
    assert answers.count(b"x") == begun
    others = {error.code() for error in answers if isinstance(error, grpc.RpcError)}
    # As if they had never come: clients try again. UNAVAILABLE once the grace period is over.
    assert others <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
    assert not caplog.records


@pytest.mark.parametrize("path", ["/test/Unknown", b"/test/\xff"])
def test_calls_of_unknown_methods_are_answered_whatever_their_path(path: Any) -> None:
    """One that is not UTF-8 would end gRPC's main loop."""

    async def calls() -> None:
        served = _Served()
        served.goes_on.set()
        await served.server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            unknown: Any = channel.unary_unary(path)
            answers = [unknown(b"x", timeout=60) for _ in range(CALLS)]
            assert {await answer.code() for answer in answers} == {grpc.StatusCode.UNIMPLEMENTED}
            echo: Any = channel.unary_unary("/test/Echo")
            assert await echo(b"x", timeout=60) == b"x"
        assert not served.accepting.has_ended.is_set()
        await served.server.stop(GRACE_S)

    asyncio.run(calls())


def test_a_server_whose_main_loop_has_crashed_says_so_and_stops() -> None:
    async def crashes() -> None:
        served = _Served()
        await served.server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            echo: Any = channel.unary_unary("/test/Echo")
            calls = [asyncio.ensure_future(echo(b"x")) for _ in range(CALLS)]
            async with asyncio.timeout(60):
                try:
                    while not served.begun:  # noqa: ASYNC110
                        await asyncio.sleep(0)
                    failed = asyncio.get_running_loop().create_future()
                    failed.set_exception(RuntimeError("as if gRPC's core had failed"))
                    served.accepting.lines[0].pass_on(failed)
                    await served.accepting.has_ended.wait()
                finally:
                    await served.server.stop(None)
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(crashes())
