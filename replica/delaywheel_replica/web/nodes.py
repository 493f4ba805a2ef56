"""Calls to the nodes for a viewer, with what that viewer showed and nothing else.

Before each call the node that will answer it is asked who the viewer is (WhoAmI): without grants it
would do anything for any token. So what counts is decided where the call is judged, each time.

| the node has | the viewer came by the link | the viewer shows a token |
|---|---|---|
| no grants | the call is made | SIGN_IN: tokens mean nothing there |
| no grants, and others reach the page, without `--insecure` | NODES_HAVE_NO_GRANTS | the same |
| grants | TOKEN_UNKNOWN, by the node: `UNKNOWN_TOKEN` is sent | the call is made, if it knows it |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from delaywheel.client.exchange.channel import CHANNEL_OPTIONS, Credentials, Security
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.patterns import Pattern
from delaywheel_replica.rights import EVERYTHING, Granted, Right, Rights
from delaywheel_replica.web.refusals import PageRefusal, signed_out
from delaywheel_replica.web.settings import PageSettings

UNKNOWN_TOKEN: Final = "-"  # noqa: S105 - it is none
"""What is sent for viewers by the link: nodes with grants refuse it, others look at no token."""

_WITHIN_S: Final = 15.0
_WHO_WITHIN_S: Final = 3.0
ResultT = TypeVar("ResultT")
NodeAnswer = tuple[pb.WhoAmIResponse, Message]
"""Who a viewer is at a node, and its answer."""


class Viewer(NamedTuple):
    """Who looks.

    Attributes:
        token: What their calls carry.
        by_link: They know the secret of this start.
    """

    token: str
    address: str
    by_link: bool


class NodeMethod(NamedTuple):
    """A call of the nodes' protocol; a repeatable one without an answer may go to another node."""

    path: str
    request: type[Message]
    response: type[Message]
    repeatable: bool = True


class NodeCalls:
    """Asks the first node that answers, and stays with it. For the event loop's thread."""

    def __init__(self, settings: PageSettings) -> None:
        self._settings: Final = settings
        self._security: Final = Security(settings.nodes_tls)
        self._channels: Final[dict[str, tuple[Credentials, grpc.aio.Channel]]] = {}
        self._order = [*settings.nodes]

    async def stop(self) -> None:
        """Closes all connections."""
        for _, channel in self._channels.values():
            await channel.close()

    async def ask(self, viewer: Viewer, method: NodeMethod, request: Message) -> NodeAnswer:
        """Makes a call for a viewer.

        Refuses if the viewer does not count there, the node refuses, or none answers.
        """
        metadata = (
            ("authorization", f"Bearer {viewer.token}"),
            ("dw-via", f"page {viewer.address}"),
        )

        async def both(channel: grpc.aio.Channel) -> NodeAnswer:
            who = await _call(channel, WHO_AM_I, pb.WhoAmIRequest(), metadata, _WHO_WITHIN_S)
            assert isinstance(who, pb.WhoAmIResponse)
            self._judge(viewer, who)
            if method is WHO_AM_I:
                return who, who
            return who, await _call(channel, method, request, metadata, _WITHIN_S)

        return await self._at_first(both, repeatable=method.repeatable)

    async def who(self, viewer: Viewer) -> pb.WhoAmIResponse:
        """Returns who a viewer is; raises as `ask` does."""
        return (await self.ask(viewer, WHO_AM_I, pb.WhoAmIRequest()))[0]

    async def rights(self, viewer: Viewer) -> Rights:
        """Returns what nodes grant a viewer, for what they are not asked about themselves."""
        who = await self.who(viewer)
        return EVERYTHING if who.unlimited else Rights(map(_granted, who.grants))

    async def have_grants(self) -> bool:
        """Whether the nodes have grants."""

        async def unlimited(channel: grpc.aio.Channel) -> bool:
            who = await _call(channel, WHO_AM_I, pb.WhoAmIRequest(), (), _WHO_WITHIN_S)
            assert isinstance(who, pb.WhoAmIResponse)
            return who.unlimited

        return not await self._at_first(unlimited, repeatable=True)

    def _judge(self, viewer: Viewer, who: pb.WhoAmIResponse) -> None:
        if not who.unlimited:
            return  # the node has judged, and will judge the call
        if not (self._settings.is_local or self._settings.insecure):
            raise PageRefusal(
                403,
                "NODES_HAVE_NO_GRANTS",
                f"{who.node} has no grants, and other machines reach this page: give the nodes"
                " grants, or start the page with --insecure",
            )
        if not viewer.by_link:
            raise signed_out(f"{who.node} has no grants: sign in by the printed link")

    async def _at_first(
        self, call: Callable[[grpc.aio.Channel], Awaitable[ResultT]], *, repeatable: bool
    ) -> ResultT:
        last: AttemptFailure | None = None
        for address in [*self._order]:
            try:
                answer = await call(self._channel(address))
            except grpc.aio.AioRpcError as error:
                last = AttemptFailure.of_call(error)
                goes_on = last.unanswered and (repeatable or last.unsent)
                if not goes_on:
                    raise PageRefusal.of_node(last) from error
            else:
                self._order.remove(address)
                self._order.insert(0, address)
                return answer
        assert last is not None, "there is an address"
        raise PageRefusal.of_node(last)

    def _channel(self, address: str) -> grpc.aio.Channel:
        credentials = self._security.credentials()
        opened = self._channels.get(address)
        if opened is None or opened[0].edition != credentials.edition:
            channel = (
                grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
                if credentials.grpc is None
                else grpc.aio.secure_channel(address, credentials.grpc, CHANNEL_OPTIONS)
            )
            opened = self._channels[address] = credentials, channel
        return opened[1]


def _granted(grant: pb.Grant) -> Granted:
    known = frozenset(right for right in Right if right in grant.may)
    return Granted(known, tuple(map(Pattern, grant.topics)))


async def _call(
    channel: grpc.aio.Channel,
    method: NodeMethod,
    request: Message,
    metadata: tuple[tuple[str, str], ...],
    within_s: float,
) -> Message:
    call: grpc.aio.UnaryUnaryMultiCallable[Message, Message] = channel.unary_unary(
        method.path,
        request_serializer=lambda asked: asked.SerializeToString(),
        response_deserializer=method.response.FromString,
    )
    return await call(request, metadata=metadata, timeout=within_s)


WHO_AM_I: Final = NodeMethod(
    "/delaywheel.v1.DelayWheel/WhoAmI", pb.WhoAmIRequest, pb.WhoAmIResponse
)
