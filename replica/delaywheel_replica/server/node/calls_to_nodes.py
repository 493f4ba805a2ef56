"""Calls from this node to others: forwarded to the leader's node, or sent to all.

Only the leader's node can answer a cancel, or carry out an operator's request. A call that a node
has passed on is never forwarded again: if two nodes take each other for the leader, it would
circulate forever. It may do anything, as the node that it came to first has judged its caller. So
it carries a secret of the node that it goes to, which that one's process made and tells its peers
alone, in the hello and the welcome of their connections.

Questions that each node answers best for itself are sent to all at once; a node that does not
answer in time is named with the reason, and is not waited for any longer. Each question has a
connection for itself, one that answered the last or a new one: to connect costs both nodes more
than most questions do. What failed on one that may be of a process that has ended is asked again on
a new one, which finds a node that came back at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, TypeVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1 import delaywheel_pb2_grpc as rpc
from delaywheel_replica.peers.states import PeerState
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.certificates import NodeCertificates
from delaywheel_replica.server.node.node_view import NodeView, heartbeats_heard, leader_heard
from delaywheel_replica.server.node.refusals import DETAILS_KEY, Refusal, RequestRefusedError
from delaywheel_replica.server.node.turns import TurnsAtOnce, start

PASSED: Final = "dw-passed"
"""Metadata of a call that another node makes: the secret of the node that is called, as hex."""

Metadata: TypeAlias = tuple[tuple[str, str], ...]

_Answer = TypeVar("_Answer")
_Request = TypeVar("_Request")

# These reasons describe a message's change; other reasons that are forwarded describe the leader's
# node.
_OF_A_CHANGE: Final = frozenset(
    {
        Reason.NO_LEADER,
        Reason.NOT_UP_TO_DATE,
        Reason.BACKPRESSURE,
        Reason.CANCEL_UNKNOWN,
        Reason.RESCHEDULE_UNKNOWN,
        Reason.RESCHEDULES_BUSY,
    }
)

_TIMEOUT_S: Final = 12.0
# How long a search may take before anything is cancelled.
_SEARCHING_S: Final = 4.0
_CLOSING_S: Final = _TIMEOUT_S + _SEARCHING_S
"""How long calls on a channel that was replaced may go on: as long as any of them takes."""
WAIT_S: Final = 10.0
"""How long a change is waited for at most, on the leader's node and by one that passes it on."""
# Optional answers are not waited for any longer than this.
_ASKED_BY_THE_WAY_S: Final = 1.0
# How many callers at once may have all other nodes asked for a message.
_ASKS: Final = 4
_MOST: Final = (1 << 64) - 1
_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Silent:
    """A node that gave no answer, and why, for people."""

    why: str


class OtherNode(NamedTuple):
    """A node as it is called.

    Attributes:
        metadata: Shows that the caller is a node.
        within_s: How long an answer is waited for, where several nodes are asked.
    """

    stub: "rpc.DelayWheelAsyncStub"
    admin: "rpc.DelayWheelAdminAsyncStub"
    metadata: Metadata
    within_s: float = _TIMEOUT_S

    @classmethod
    def on(
        cls, channel: grpc.aio.Channel, metadata: Metadata, within_s: float = _TIMEOUT_S
    ) -> "OtherNode":
        """Returns the node at the other end of a channel."""
        return cls(
            rpc.DelayWheelStub(channel), rpc.DelayWheelAdminStub(channel), metadata, within_s
        )

    async def ask(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer]",
        request: _Request,
        within_s: float | None = None,
    ) -> _Answer:
        """Makes a call as a node does; without a time of its own, it has `self.within_s`."""
        timeout = self.within_s if within_s is None else within_s
        return await method(request, timeout=timeout, metadata=self.metadata)


class _Kept(NamedTuple):
    """A channel that is kept, and the node behind it."""

    channel: grpc.aio.Channel
    node: OtherNode


class CallsToNodes:
    """Addresses of the other nodes, and calls to them. For the event loop's thread."""

    def __init__(self, view: NodeView, certificates: NodeCertificates | None = None) -> None:
        self._view = view
        self._certificates = certificates
        self._channels: dict[tuple[str, object], _Kept] = {}
        self._answered: dict[tuple[str, object], grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._asks = TurnsAtOnce(_ASKS)

    async def close(self) -> None:
        """Closes the connections."""
        for closing in self._closing:
            closing.cancel()
        channels = [*(kept.channel for kept in self._channels.values()), *self._answered.values()]
        self._channels, self._answered = {}, {}
        await asyncio.gather(*(channel.close() for channel in channels))

    def leader_address(self) -> str | None:
        """Returns the address of the leader's node, if it is another one and is heard."""
        status = self._view.status()
        leader = leader_heard(status)
        if leader is None or leader.node == status.heartbeat.node:
            return None
        peer = self._view.peers().get(leader.node)
        return None if peer is None else peer.client_address

    async def commit(self, node: str, request: pb.CommitRequest) -> pb.CommitResponse | None:
        """Makes the same call at another node; None: it is not heard, or does not answer soon."""
        peer = self._view.peers().get(node)
        if peer is None or not peer.client_address:
            return None
        try:
            return await self.call(
                peer.client_address,
                lambda there: there.ask(there.stub.Commit, request, _ASKED_BY_THE_WAY_S),
                unknown=Reason.WHEEL_LOST,
            )
        except RequestRefusedError:
            return None

    async def cancel(
        self,
        address: str,
        messages: Sequence[pb.MessageRef],
        whole_within_s: float | None,
        sharers: Iterable[Hashable] = (),
    ) -> Sequence[pb.MessageCancelled]:
        """Cancels messages there: all within so many seconds, or, without that, until some are.

        `sharers` says who has named each.

        Raises:
            RequestRefusedError: With the reason given there; CANCEL_UNKNOWN if there was none. A
                reason that concerns only that node (DRAINING) becomes NO_LEADER or, if the cancel
                may have been written (WHEEL_LOST), CANCEL_UNKNOWN: this node is as well as before.
        """
        request = pb.CancelRequest(
            messages=messages, partly=whole_within_s is None, sharers=numbers_of(sharers)
        )
        within_s = WAIT_S if whole_within_s is None else whole_within_s
        answer = await self._change_there(
            address,
            lambda node: node.ask(node.stub.Cancel, request, within_s),
            Reason.CANCEL_UNKNOWN,
        )
        return answer.results

    async def cancel_many(
        self, address: str, request: pb.CancelManyRequest
    ) -> pb.CancelManyResponse:
        """Makes the same call there; raises as `cancel`."""
        return await self._change_there(
            address,
            lambda node: node.ask(node.stub.CancelMany, request, _TIMEOUT_S + _SEARCHING_S),
            Reason.CANCEL_UNKNOWN,
        )

    async def reschedule(
        self,
        address: str,
        messages: Sequence[pb.NewDue],
        whole_within_s: float | None,
        sharers: Iterable[Hashable] = (),
    ) -> Sequence[pb.MessageRescheduled]:
        """Gives messages other dues there; as `cancel`, but with RESCHEDULE_UNKNOWN."""
        request = pb.RescheduleRequest(
            messages=messages, partly=whole_within_s is None, sharers=numbers_of(sharers)
        )
        within_s = WAIT_S if whole_within_s is None else whole_within_s
        answer = await self._change_there(
            address,
            lambda node: node.ask(node.stub.Reschedule, request, within_s),
            Reason.RESCHEDULE_UNKNOWN,
        )
        return answer.results

    async def _change_there(
        self,
        address: str,
        call: Callable[[OtherNode], Awaitable[_Answer]],
        unknown: Reason,
    ) -> _Answer:
        try:
            return await self.call(address, call, unknown=unknown)
        except RequestRefusedError as error:
            raise RequestRefusedError.of(_of_a_change(error.refusal, unknown)) from error

    async def get_message(
        self, address: str, request: pb.GetMessageRequest
    ) -> pb.StoredMessage | None:
        """Returns that node's answer about a message; None if it does not answer soon."""
        try:
            answer = await self.call(
                address,
                lambda node: node.ask(node.stub.GetMessage, request, _ASKED_BY_THE_WAY_S),
                unknown=Reason.NOT_UP_TO_DATE,
            )
        except RequestRefusedError:
            return None
        return answer.message

    async def others_have_none(
        self, message: pb.MessageRef, *, wanted: int, sharer: Hashable = ""
    ) -> bool:
        """Whether `wanted` other nodes, asked now, report that they do not have a message.

        A node that may have lost frames does not count.
        """
        if not wanted:
            return True
        request = pb.GetMessageRequest(message=message)

        async def has_none(node: OtherNode) -> bool:
            try:
                await node.ask(node.stub.GetMessage, request)
            except grpc.aio.AioRpcError as error:
                if _reason_of(error) is not Reason.MESSAGE_NOT_FOUND:
                    raise
                return True
            return False

        async with self._asks.turn(sharer):
            answers = await self.ask_all(has_none, within_s=_ASKED_BY_THE_WAY_S)
        heartbeats = heartbeats_heard(self._view.status())
        complete = {node for node, heartbeat in heartbeats.items() if heartbeat.complete}
        none = [node for node, answer in answers.items() if answer is True and node in complete]
        return len(none) >= wanted and False not in answers.values()

    async def call(
        self,
        address: str,
        call: Callable[[OtherNode], Awaitable[_Answer]],
        *,
        unknown: Reason,
    ) -> _Answer:
        """Calls the leader's node, as `call` does by `OtherNode.ask`.

        Refuses with the reason and text given there; as `unknown` without: the call may have
        arrived.
        """
        try:
            return await call(self._node(address))
        except grpc.aio.AioRpcError as error:
            reason = _reason_of(error) or unknown
            _log.debug("passed call refused", address=address, reason=reason.value)
            refusal = _said_by_the_leader(reason, error.details() or "", _retry_delay_ms(error))
            raise RequestRefusedError.of(refusal) from error

    async def ask_all(
        self, call: Callable[[OtherNode], Awaitable[_Answer]], *, within_s: float
    ) -> dict[str, _Answer | Silent]:
        """Asks all other members concurrently; never fails."""
        peers = self._view.peers()
        answers = await asyncio.gather(
            *(self._ask(state, call, within_s) for state in peers.values())
        )
        return dict(zip(peers, answers, strict=True))

    async def _ask(
        self,
        peer: PeerState,
        call: Callable[[OtherNode], Awaitable[_Answer]],
        within_s: float,
    ) -> _Answer | Silent:
        if peer.refusal is not None:
            return Silent(f"{peer.refusal.reason}: {peer.refusal.text}")
        if peer.client_address is None:
            return Silent("it was never reached, so its address for callers is not known")
        address = peer.client_address
        key = self._key(address, speaks_tls=peer.client_tls)

        async def asked_on(channel: grpc.aio.Channel) -> _Answer:
            try:
                answer = await call(OtherNode.on(channel, _metadata_for(peer), within_s))
            except BaseException:
                await channel.close()
                raise
            await self._keep(key, channel)
            return answer

        try:
            if (kept := self._answered.pop(key, None)) is not None:
                try:
                    return await asked_on(kept)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
            fresh = (*_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
            return await asked_on(self._open(address, fresh, speaks_tls=peer.client_tls))
        except grpc.aio.AioRpcError as error:
            return Silent(_why(error, address, within_s))

    async def _keep(self, key: tuple[str, object], channel: grpc.aio.Channel) -> None:
        """Keeps a connection for the next question, and closes those that none will use again."""
        used = {each.client_address for each in self._view.peers().values()} - {key[0]}
        unused = [each for each in self._answered if each[0] not in used]
        closed = [self._answered.pop(each) for each in unused]
        self._answered[key] = channel
        await asyncio.gather(*(each.close() for each in closed))

    def _node(self, address: str) -> OtherNode:
        """Returns the node at an address, on a new channel once the credentials have changed."""
        peers = [each for each in self._view.peers().values() if each.client_address == address]
        speaks_tls = any(each.client_tls for each in peers)
        key = self._key(address, speaks_tls=speaks_tls)
        if key not in self._channels:
            self._retire(address)
            channel = self._open(address, _OPTIONS, speaks_tls=speaks_tls)
            self._channels[key] = _Kept(channel, OtherNode.on(channel, ()))
        return self._channels[key].node._replace(metadata=_metadata_for(*peers))

    def _retire(self, address: str) -> None:
        """Closes channels that nobody will use again, once their calls have ended."""
        used = {each.client_address for each in self._view.peers().values()} - {address}
        for key in [key for key in self._channels if key[0] not in used]:
            start(self._channels.pop(key).channel.close(_CLOSING_S), self._closing)

    def _key(self, address: str, *, speaks_tls: bool) -> tuple[str, object]:
        """Returns what a channel is known by: what it reaches, with which credentials."""
        shown = self._certificates if speaks_tls else None
        return address, None if shown is None else shown.current

    def _open(
        self, address: str, options: Sequence[tuple[str, int]], *, speaks_tls: bool
    ) -> grpc.aio.Channel:
        if not speaks_tls:
            return grpc.aio.insecure_channel(address, options=options)
        credentials = (
            grpc.ssl_channel_credentials()
            if self._certificates is None
            else self._certificates.channel_credentials()
        )
        return grpc.aio.secure_channel(address, credentials, options=options)


def _metadata_for(*peers: PeerState) -> Metadata:
    """Shows that a node calls, by the secret that the other one told this node."""
    return ((PASSED, next((each.call_secret.hex() for each in peers if each.call_secret), "1")),)


def _why(error: grpc.aio.AioRpcError, address: str, within_s: float) -> str:
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer from {address} within {within_s:.1f} s"
        case grpc.StatusCode.UNAVAILABLE:
            return f"no node is reached at {address}"
        case code:
            return f"{address} answered {code.name}: {error.details()}"


def numbers_of(sharers: Iterable[Hashable]) -> Iterator[int]:
    """Returns numbers by which another node tells them apart: names may be long, and are ours."""
    return (hash(each) & _MOST for each in sharers)


def refusal_of_a_change(error: pb.Error, unknown: Reason) -> Refusal:
    """Returns why the leader's node did not change one of many messages."""
    is_known = error.reason in Reason.__members__
    reason = Reason[error.reason] if is_known else unknown
    delay_ms = error.retry_delay_ms if error.HasField("retry_delay_ms") else None
    return _of_a_change(_said_by_the_leader(reason, error.message, delay_ms), unknown)


def _said_by_the_leader(reason: Reason, text: str, delay_ms: int | None) -> Refusal:
    words = text.removesuffix(reason.advice).strip(" .")
    return Refusal(reason, f"The leader's node: {words or 'no'}", delay_ms)


def _of_a_change(refusal: Refusal, unknown: Reason) -> Refusal:
    """Returns the reason for a caller of this node: one that concerns only the other is NO_LEADER.

    Or `unknown`, if something may have been written there: this node is as well as before.
    """
    reason = refusal.reason
    if reason in _OF_A_CHANGE or not reason.retry_helps:
        return refusal
    of_change = Reason.NO_LEADER if reason.outcome_known else unknown
    return Refusal(of_change, f"The leader's node cannot write it: {reason.value}")


def _details_of(error: grpc.aio.AioRpcError) -> Iterator[any_pb2.Any]:
    """Yields the details of a status, if it is one of ours."""
    for key, content in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(content, bytes):
            yield from status_pb2.Status.FromString(content).details


def _reason_of(error: grpc.aio.AioRpcError) -> Reason | None:
    """Returns the reason if the status is one of ours."""
    info = error_details_pb2.ErrorInfo()
    for detail in _details_of(error):
        if detail.Unpack(info) and info.reason in Reason.__members__:
            return Reason[info.reason]
    return None


def _retry_delay_ms(error: grpc.aio.AioRpcError) -> int | None:
    """Returns when to come back, if the status says it."""
    info = error_details_pb2.RetryInfo()
    for detail in _details_of(error):
        if detail.Unpack(info):
            return int(info.retry_delay.ToMilliseconds())
    return None
