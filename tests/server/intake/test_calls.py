"""Calls over a real port: data that the other side does not read, send or end is bounded."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.access.audit import AUDIT_LOGGER, Audit
from delaywheel_replica.server.access.callers import Access
from delaywheel_replica.server.connections import close_connections
from delaywheel_replica.server.intake import admission as admission_module
from delaywheel_replica.server.intake.admission import Admission
from delaywheel_replica.server.intake.calls import AnswerBounds, GrpcHandlers
from delaywheel_replica.server.intake.reception import CALLS, Reception
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.refusals import Context
from support.server.server_process import config_for
from support.services.waiting import until

_LONG = 8 << 20
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass
class Site:
    """A server whose GetMessage answers a lot, and whose Cancel waits until it may continue."""

    address: str = ""
    counts: NodeCounts = field(default_factory=NodeCounts)
    reception: Reception = field(default_factory=lambda: Reception(CALLS._replace(calls=3)))
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[str] = field(default_factory=list)
    admission: Admission = field(
        default_factory=lambda: Admission(
            max_bytes=2 * _LONG, max_caller_bytes=_LONG, close=close_connections
        )
    )

    async def DescribeCluster(
        self, _request: object, _context: Context
    ) -> pb.DescribeClusterResponse:
        self.begun.append("DescribeCluster")
        return pb.DescribeClusterResponse()

    async def WhoAmI(self, _request: object, _context: Context) -> pb.WhoAmIResponse:
        return pb.WhoAmIResponse()

    async def GetMessage(self, _request: object, _context: Context) -> pb.GetMessageResponse:
        return pb.GetMessageResponse(message=pb.StoredMessage(value=bytes(_LONG)))

    async def Cancel(self, _request: object, _context: Context) -> pb.CancelResponse:
        self.begun.append("Cancel")
        await self.go_on.wait()
        return pb.CancelResponse()

    def __getattr__(self, name: str) -> object:
        """The other calls, which no test makes."""
        if name[0].isupper():
            return None
        raise AttributeError(name)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with _served(Site()) as made:
        yield made


@asynccontextmanager
async def _served(made: Site, *admitting: Any) -> AsyncIterator[Site]:
    bounds = AnswerBounds(made.admission, lambda _: 1)
    calls = GrpcHandlers(made.reception, made.counts, bounds, *admitting)
    server = grpc.aio.server(options=_OPTIONS)
    described = pb.DESCRIPTOR.services_by_name["DelayWheel"]
    server.add_registered_method_handlers(
        described.full_name, calls.of_service(described, made, {})
    )
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield made
    await server.stop(0)


def _call(kind: Callable[[str], Any], name: str) -> Any:
    """A call of bytes, however it starts and ends."""
    return kind(f"/delaywheel.v1.DelayWheel/{name}")


async def test_calls_of_one_method_do_not_queue_behind_those_of_another() -> None:
    """gRPC takes several passes of the event loop to accept a call; here each has work to do."""
    async with _served(Site(reception=Reception())) as site:
        site.go_on.set()
        with grpc.insecure_channel(site.address) as channel:  # its own threads send
            grpc.channel_ready_future(channel).result(timeout=30)

            async def accepted_before(seconds: float) -> int:
                """How many of 60 others, that are sent before it, are accepted before it."""
                site.begun.clear()
                cancels = [_call(channel.unary_unary, "Cancel").future(b"") for _ in range(60)]
                described = _call(channel.unary_unary, "DescribeCluster").future(b"")
                _work(seconds)
                while not described.done():
                    _work(0.001)
                    await asyncio.sleep(0)
                await until(lambda: all(each.done() for each in cancels))
                return site.begun.index("DescribeCluster")

            # All have to be there before the first is accepted, which takes a busy machine longer.
            for seconds in (0.3, 1, 3, 9):
                if (before := await accepted_before(seconds)) < 30:
                    break
            assert before < 30


def _work(seconds: float) -> None:
    """Keeps the event loop from doing anything else."""
    time.sleep(seconds)


async def test_an_answer_that_is_not_read_is_counted_until_it_is(site: Site) -> None:
    async with grpc.aio.insecure_channel(site.address, options=_OPTIONS) as channel:
        # As a stream, of which nothing is read before it is asked for.
        reading: Any = _call(channel.unary_stream, "GetMessage")(b"")
        await until(lambda: site.admission.in_flight_bytes > _LONG)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _call(channel.unary_unary, "GetMessage")(b"")
        assert "BACKPRESSURE" in str(caught.value.trailing_metadata())
        assert len(await reading.read()) > _LONG
        await until(lambda: site.admission.in_flight_bytes == 0 and site.reception.calls == 0)


async def test_callers_that_do_not_read_lose_their_connections(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or two of them, with an unread answer each, would shut out all others for good."""
    monkeypatch.setattr(admission_module, "_LOOK_S", 0.05)
    async with AsyncExitStack() as held:

        async def connected() -> grpc.aio.Channel:
            return await held.enter_async_context(
                grpc.aio.insecure_channel(site.address, options=_OPTIONS)
            )

        silent: list[Any] = [
            _call((await connected()).unary_stream, "GetMessage")(b"") for _ in range(2)
        ]
        await until(lambda: site.admission.in_flight_bytes > 2 * _LONG)
        call = _call((await connected()).unary_unary, "GetMessage")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert "BACKPRESSURE" in str(caught.value.trailing_metadata())
        await until(lambda: site.admission.in_flight_bytes == 0)
        assert len(await call(b"")) > _LONG
        for each in silent:
            with pytest.raises(grpc.aio.AioRpcError):
                await each.read()


async def test_a_caller_that_goes_away_gives_back_what_it_held(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is no fault of ours: logging it with a traceback takes half a second."""
    for name in ("GetMessage", "Cancel"):
        async with grpc.aio.insecure_channel(site.address, options=_OPTIONS) as channel:
            calls: list[Any] = [
                channel.stream_stream(f"/delaywheel.v1.DelayWheel/{name}")() for _ in range(2)
            ]
            await calls[0].write(b"")  # the other one never says what it wants
            await until(lambda: site.reception.calls > 0 and site.admission.in_flight_bytes > 0)
        await until(lambda: site.admission.in_flight_bytes == 0 and site.reception.calls == 0)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [(bytes(200_000), "REQUEST_TOO_LARGE"), (b"\xff", "REQUEST_MALFORMED")],
)
async def test_what_is_no_question_is_refused_by_name(
    site: Site, content: bytes, reason: str
) -> None:
    async with grpc.aio.insecure_channel(site.address, options=_OPTIONS) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _call(channel.unary_unary, "GetMessage")(content)
        assert reason in str(caught.value.trailing_metadata())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _call(channel.stream_unary, "GetMessage")(iter([]))
        assert "REQUEST_MALFORMED" in str(caught.value.trailing_metadata())
    assert site.counts.refused_calls.total() == 2


@pytest.mark.parametrize("may", [True, False])
async def test_only_who_may_do_something_is_known_by_a_call(tmp_path: Path, *, may: bool) -> None:
    """A stranger who asks who it is would keep its connection for ever."""
    grants, known = tmp_path / "grants.toml", list[str]()
    grants.touch(0o600)
    who = "anonymous" if may else "token:shop"
    grants.write_text(f'[[grant]]\nwho = ["{who}"]\nmay = ["inspect"]\n')
    access = Access(config_for(tmp_path, grants=str(grants)))

    def note(address: str, _expires_s: float) -> None:
        known.append(address)

    async with (
        _served(Site(), access, Audit("n1"), note) as site,
        grpc.aio.insecure_channel(site.address, options=_OPTIONS) as channel,
    ):
        await _call(channel.unary_unary, "WhoAmI")(b"")
    assert len(known) == int(may)


async def test_who_leaves_before_the_answer_is_in_the_audit_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it names is cancelled all the same: nobody could see who had done it."""
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    access, audit = Access(config_for(tmp_path)), Audit("n1", has_grants=True)
    async with (
        _served(Site(), access, audit) as site,
        grpc.aio.insecure_channel(site.address, options=_OPTIONS) as channel,
    ):
        call = _call(channel.unary_unary, "Cancel")(pb.CancelRequest().SerializeToString())
        await until(lambda: bool(site.begun))
        call.cancel()
        await until(lambda: bool(caplog.records))
    (line,) = [json.loads(record.getMessage()) for record in caplog.records]
    assert (line["call"], line["outcome"]) == ("Cancel", "UNKNOWN")
