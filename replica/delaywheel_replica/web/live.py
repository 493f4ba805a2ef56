"""`GET /api/v1/live`: what all viewers see, once a second while somebody looks.

A snapshot is asked for with the token of one of the viewers, and serves all. Of each viewer their
own right is asked every `_RIGHT_EVERY_S`. One that reads slower than events come has the newest of
each name; one that takes nothing for `_UNREAD_S` is closed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Final

from aiohttp import web

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.judging.verdict import verdict
from delaywheel_replica.rights import Right, withhold_names
from delaywheel_replica.web.calls import METHODS, as_json
from delaywheel_replica.web.guard import viewer_of
from delaywheel_replica.web.nodes import NodeCalls, Viewer
from delaywheel_replica.web.refusals import PageRefusal, forbidden

VIEWERS_AT_MOST: Final = 32
_EVERY_S: Final = 1.0
_UNREAD_S: Final = 15.0
_RIGHT_EVERY_S: Final = 10.0
_SOCKET_BYTES: Final = 64 << 10
_MINUTE_S: Final = 60
_HOUR_S: Final = 3_600
_DAY_S: Final = 86_400
_DESCRIBE: Final = METHODS["DelayWheel/DescribeCluster"]
_LIST: Final = METHODS["DelayWheel/ListSlots"]


class _Watching:
    """One viewer's stream: the newest event of each name that was not sent yet."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer: Final = viewer
        self.ended = False
        self._unsent: Final[dict[str, bytes]] = {}
        self._told: Final = asyncio.Event()

    def tell(self, name: str, event: bytes) -> None:
        if not self.ended:
            self._unsent[name] = event
            self._told.set()

    def end(self, refusal: PageRefusal) -> None:
        """Tells why, and nothing after it."""
        self.tell("end", _event("end", 0, json.dumps(refusal.shape)))
        self.ended = True

    async def next(self, within_s: float) -> bytes:
        """Returns what is unsent; nothing if nothing comes within that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._told.wait()
        self._told.clear()
        events = b"".join(self._unsent.values())
        self._unsent.clear()
        return events


class Live:
    """The snapshots, and who watches them. For the event loop's thread."""

    def __init__(
        self,
        nodes: NodeCalls,
        refuse_signed_out: Callable[[web.Request], None],
        *,
        insecure: bool,
    ) -> None:
        self._nodes: Final = nodes
        self._refuse_signed_out: Final = refuse_signed_out
        self._insecure: Final = insecure
        self._watching: Final[list[_Watching]] = []
        self._making: asyncio.Task[None] | None = None
        self._newest: Final[dict[str, bytes]] = {}
        self._ids: Final = count(1)
        self._answered_ms: int | None = None
        self._clock_ahead_ms = 0
        self._span_s = 7 * _DAY_S

    async def stop(self) -> None:
        """Ends all streams."""
        for each in self._watching:
            each.end(PageRefusal(503, "STOPPING", "the page's process ends"))
        if self._making is not None:
            self._making.cancel()
            with suppress(asyncio.CancelledError):
                await self._making

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Answers with events until the viewer leaves, or is no longer one."""
        each = _Watching(viewer_of(request))
        await self._refuse_without_inspect(each.viewer)  # who may not look takes nobody's room
        if len(self._watching) >= VIEWERS_AT_MOST:
            raise PageRefusal(
                503, "LIVE_FULL", f"{VIEWERS_AT_MOST} viewers look already: close one, or wait"
            )
        self._watching.append(each)
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            assert request.transport is not None
            request.transport.set_write_buffer_limits(high=0)
            if (own := request.transport.get_extra_info("socket")) is not None:
                # So the kernel keeps little for who does not read.
                own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            for name, event in self._newest.items():
                each.tell(name, event)
            if self._making is None:
                self._making = asyncio.create_task(self._make())
            await self._send(each, request, response)
            return response
        finally:
            self._watching.remove(each)

    async def _send(
        self, each: _Watching, request: web.Request, response: web.StreamResponse
    ) -> None:
        loop = asyncio.get_running_loop()
        judged_s = loop.time()
        while not each.ended or each._told.is_set():  # noqa: SLF001 - its own module
            events = await each.next(_RIGHT_EVERY_S)
            if loop.time() - judged_s > _RIGHT_EVERY_S and not each.ended:
                judged_s = loop.time()
                await self._judge(each, request)
            if not events:
                continue
            try:
                async with asyncio.timeout(_UNREAD_S):
                    await response.write(events)
                    await request.protocol._drain_helper()  # noqa: SLF001 - write() waits for 64 KiB
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                return
            except ConnectionError:  # the viewer has left
                return

    async def _judge(self, each: _Watching, request: web.Request) -> None:
        """Ends a stream whose viewer may no longer look."""
        try:
            self._refuse_signed_out(request)
            await self._refuse_without_inspect(each.viewer)
        except PageRefusal as refusal:
            if refusal.status in {401, 403}:
                each.end(refusal)

    async def _refuse_without_inspect(self, viewer: Viewer) -> None:
        if not (await self._nodes.rights(viewer)).may_somewhere(Right.INSPECT):
            raise forbidden(Right.INSPECT)

    # --- snapshots

    async def _make(self) -> None:
        """Makes snapshots as long as somebody looks."""
        due_s = dict.fromkeys(("hour", "span"), 0.0)
        loop = asyncio.get_running_loop()
        try:
            while watching := [each for each in self._watching if not each.ended]:
                began_s = loop.time()
                try:
                    await self._snapshot(watching[0].viewer, due_s, began_s)
                except PageRefusal as refusal:
                    if refusal.status in {401, 403}:
                        watching[0].end(refusal)
                        continue
                    away = {"at_ms": _wall_ms(), "since_ms": self._answered_ms, **refusal.shape}
                    self._tell("away", json.dumps(away))
                await asyncio.sleep(max(0.0, began_s + _EVERY_S - loop.time()))
        finally:
            self._making = None
            self._newest.clear()
            self._answered_ms = None

    async def _snapshot(self, viewer: Viewer, due_s: dict[str, float], now_s: float) -> None:
        _, answer = await self._nodes.ask(
            viewer, _DESCRIBE, pb.DescribeClusterRequest(all_members=True)
        )
        assert isinstance(answer, pb.DescribeClusterResponse)
        withhold_names(answer)  # the asked viewer may see them, others perhaps not
        self._clock_ahead_ms = answer.now_ms - _wall_ms()
        self._span_s = answer.limits.span_seconds or self._span_s
        self._answered_ms = _wall_ms()
        self._newest.pop("away", None)
        self._tell("cluster", self._cluster(answer))
        await self._tell_slots(viewer, "minute", _MINUTE_S, 1)
        if now_s >= due_s["hour"]:
            await self._tell_slots(viewer, "hour", _HOUR_S, _MINUTE_S)
            due_s["hour"] = now_s + 10 * _EVERY_S
        if now_s >= due_s["span"]:
            bucket_s = _HOUR_S if self._span_s <= 14 * _DAY_S else _DAY_S
            await self._tell_slots(viewer, "span", self._span_s + bucket_s, bucket_s)
            due_s["span"] = now_s + 60 * _EVERY_S

    def _cluster(self, answer: pb.DescribeClusterResponse) -> str:
        found = verdict(answer)
        head = {
            "at_ms": _wall_ms(),
            "verdict": found.state,
            "causes": [
                {"text": cause.text, "section": cause.section, "is_down": cause in found.down}
                for cause in found.causes
            ],
            "insecure": self._insecure,
        }
        return f'{json.dumps(head)[:-1]}, "status": {as_json(answer)}}}'

    async def _tell_slots(self, viewer: Viewer, name: str, length_s: int, bucket_s: int) -> None:
        now = (_wall_ms() + self._clock_ahead_ms) // 1000
        request = pb.ListSlotsRequest(
            from_slot=now, to_slot=now + length_s, bucket_seconds=bucket_s, all_members=True
        )
        _, answer = await self._nodes.ask(viewer, _LIST, request)
        assert isinstance(answer, pb.ListSlotsResponse)
        del answer.wheels[:]  # the status has them
        head = {"at_ms": _wall_ms(), "from_slot": now, "length_s": length_s, "bucket_s": bucket_s}
        self._tell(name, f'{json.dumps(head)[:-1]}, "slots": {as_json(answer)}}}')

    def _tell(self, name: str, data: str) -> None:
        event = _event(name, next(self._ids), data)
        self._newest[name] = event
        for each in self._watching:
            each.tell(name, event)


def _event(name: str, number: int, data: str) -> bytes:
    return f"id: {number}\nevent: {name}\ndata: {data}\n\n".encode()


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
