"""`POST /api/v1/<Service>/<Method>`: the nodes' unary calls as JSON, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Final

from aiohttp import web
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from google.protobuf.message_factory import GetMessageClass

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.web.acts import ActLog
from delaywheel_replica.web.guard import viewer_of
from delaywheel_replica.web.nodes import NodeCalls, NodeMethod
from delaywheel_replica.web.refusals import PageRefusal

BODY_AT_MOST: Final = 10 << 20
_BODY_S: Final = 30.0
READS: Final = frozenset(
    {"WhoAmI", "DescribeCluster", "ListSlots", "GetSlot", "Search", "GetMessage"}
)
"""What changes nothing, and is left with `--read-only`."""
_ONCE: Final = frozenset({"DelayProduce"})
"""A message without an id would be another one the second time."""


def _methods() -> Iterator[tuple[str, NodeMethod]]:
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            if not (method.client_streaming or method.server_streaming):
                made = NodeMethod(
                    f"/{service.full_name}/{method.name}",
                    GetMessageClass(method.input_type),
                    GetMessageClass(method.output_type),
                    repeatable=method.name not in _ONCE,
                )
                yield f"{service.name}/{method.name}", made


METHODS: Final[Mapping[str, NodeMethod]] = dict(_methods())


class CallRoutes:
    """Answers calls."""

    def __init__(self, nodes: NodeCalls, acts: ActLog, *, read_only: bool) -> None:
        self._nodes: Final = nodes
        self._acts: Final = acts
        self._read_only: Final = read_only

    async def call(self, request: web.Request) -> web.Response:
        """Passes a call to a node."""
        name = f"{request.match_info['service']}/{request.match_info['method']}"
        method = METHODS[name]
        is_act = request.match_info["method"] not in READS
        if is_act and self._read_only:
            raise PageRefusal(403, "READ_ONLY", "this page was started with --read-only")
        asked = method.request()
        parse(await body_of(request), asked)
        viewer = viewer_of(request)
        try:
            who, answer = await self._nodes.ask(viewer, method, asked)
        except PageRefusal as refusal:
            if is_act:
                self._acts.refused(viewer, name, asked, refusal)
            raise
        if is_act:
            self._acts.done(viewer, name, asked, answer, who.principal)
        return web.Response(text=as_json(answer), content_type="application/json")


async def body_of(request: web.Request) -> bytes:
    """Reads a body that may be as long as that.

    Raises:
        PageRefusal: REQUEST_TOO_LARGE, before it is read if its length is told; REQUEST_TOO_SLOW.
    """
    refusal = PageRefusal(413, "REQUEST_TOO_LARGE", f"a body may have {BODY_AT_MOST:,} bytes")
    if (request.content_length or 0) > BODY_AT_MOST:
        raise refusal
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise refusal from error
    except TimeoutError as error:
        raise PageRefusal(408, "REQUEST_TOO_SLOW", f"send it within {_BODY_S:g} s") from error


def parse(body: bytes, into: Any) -> None:
    """Fills a request.

    Raises:
        PageRefusal: REQUEST_MALFORMED, with the place.
    """
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
