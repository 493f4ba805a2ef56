"""`POST /api/v1/<Service>/<Method>`: the nodes' unary calls as JSON, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, Final

from aiohttp import web
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web.acts import ActLog
from delaywheel_replica.web.guard import viewer_of
from delaywheel_replica.web.nodes import NodeAnswer, NodeCalls, NodeMethod
from delaywheel_replica.web.refusals import PageRefusal

BODY_AT_MOST: Final = 10 << 20
SHORT_BYTES: Final = 64 << 10
"""What is read of anybody; a longer body of those alone whom a node knows, and of few at once."""
_LONG_AT_ONCE: Final = 2
_PARTS_AT_MOST: Final = 500_000
"""Values of JSON in a body: of the shortest ones 10 MiB would take a gigabyte, and a minute."""
_BODY_S: Final = 30.0
READS: Final = frozenset(
    {"WhoAmI", "DescribeCluster", "ListSlots", "GetSlot", "Search", "GetMessage"}
)
"""What changes nothing, and is left with `--read-only`."""
_ONCE: Final = frozenset({"DelayProduce"})
"""A message without an id would be another one the second time."""


METHODS: Final[Mapping[str, NodeMethod]] = {
    f"{service.name}/{method.name}": NodeMethod(
        f"/{service.full_name}/{method.name}",
        GetMessageClass(method.input_type),
        GetMessageClass(method.output_type),
        repeatable=method.name not in _ONCE,
    )
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
}


class CallRoutes:
    """Answers calls."""

    def __init__(self, nodes: NodeCalls, acts: ActLog, *, read_only: bool) -> None:
        self._nodes: Final = nodes
        self._acts: Final = acts
        self._read_only: Final = read_only
        self._long: Final = asyncio.Semaphore(_LONG_AT_ONCE)

    async def call(self, request: web.Request) -> web.Response:
        """Passes a call to a node."""
        name = f"{request.match_info['service']}/{request.match_info['method']}"
        method = METHODS[name]
        is_act = request.match_info["method"] not in READS
        if is_act and self._read_only:
            raise PageRefusal(403, "READ_ONLY", "this page was started with --read-only")
        viewer = viewer_of(request)
        asked = method.request()
        if is_short(request):
            parse(await body_of(request), asked)
        else:
            refuse_longer(request, BODY_AT_MOST)
            await self._nodes.who(viewer)
            await asyncio.shield(self._parse_long(request, asked))  # a thread cannot be cancelled
        asking: Awaitable[NodeAnswer] = self._nodes.ask(viewer, method, asked)
        if is_act:
            asking = asyncio.shield(self._acts.noted(viewer, name, asked, asking))
        return web.Response(text=as_json((await asking)[1]), content_type="application/json")

    async def _parse_long(self, request: web.Request, into: Message) -> None:
        async with self._long:
            await asyncio.to_thread(parse, await body_of(request), into)


def is_short(request: web.Request) -> bool:
    """Whether a body is short for certain: neither packed nor of a length that is not told."""
    length = request.content_length
    return (
        length is not None and length <= SHORT_BYTES and "Content-Encoding" not in request.headers
    )


def refuse_longer(request: web.Request, at_most_bytes: int) -> None:
    """Refuses a body before it is read, if its length is told: REQUEST_TOO_LARGE."""
    if (request.content_length or 0) > at_most_bytes:
        raise _too_large(at_most_bytes)


def _too_large(at_most_bytes: int) -> PageRefusal:
    return PageRefusal(413, "REQUEST_TOO_LARGE", f"a body may have {at_most_bytes:,} bytes")


async def body_of(request: web.Request) -> bytes:
    """Reads a body.

    Refuses: REQUEST_TOO_LARGE, REQUEST_TOO_SLOW; REQUEST_MALFORMED: too many values.
    """
    refuse_longer(request, BODY_AT_MOST)
    try:
        async with asyncio.timeout(_BODY_S):
            body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(BODY_AT_MOST) from error
    except TimeoutError as error:
        raise PageRefusal(408, "REQUEST_TOO_SLOW", f"send it within {_BODY_S:g} s") from error
    if sum(map(body.count, (b",", b"{", b"["))) > _PARTS_AT_MOST:
        text = f"a request may have {_PARTS_AT_MOST:,} values, each with its comma or bracket"
        raise PageRefusal(400, "REQUEST_MALFORMED", text)
    return body


async def short_body_of(request: web.Request) -> bytes:
    """Reads the body of somebody who is not known yet; raises as `body_of` does."""
    refuse_longer(request, SHORT_BYTES)
    if not is_short(request):
        raise PageRefusal(400, "REQUEST_MALFORMED", "send it with its length, and not packed")
    return await body_of(request)


def parse(body: bytes, into: Any) -> None:
    """Fills a request, or refuses it as REQUEST_MALFORMED, with the place."""
    if not body.lstrip().startswith(b"{"):  # of a list it would take nothing
        raise PageRefusal(400, "REQUEST_MALFORMED", "send one JSON object")
    try:
        Parse(body, into)
    # The library raises other errors than its own for some texts, such as numbers that are none.
    except (ParseError, ValueError, TypeError, RecursionError, AttributeError) as error:
        text = str(error) or type(error).__name__
        raise PageRefusal(400, "REQUEST_MALFORMED", text[:500]) from error


def as_json(message: Any) -> str:
    """Writes an answer, with the protocol's names; what is 0 or empty is left out."""
    return MessageToJson(message, preserving_proto_field_name=True, indent=None)
