"""Operator calls: replace a node's data folder, remove a node, set w back.

Only the leading cleaner can commit it, and it forgets requests at the end of its term. So any
node forwards the call to the leader's node, which repeats it to its cleaner until the cleaner's
status shows it committed. Refusals come before anything is requested.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, TypeAlias, TypeVar

import grpc.aio

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.holders import held_alone
from delaywheel_replica.core.leader.registration import wheels_of_a_node
from delaywheel_replica.core.leader.replacing import frames_at_risk
from delaywheel_replica.core.protocol.control import REMOVED, ROLLED_BACK, ControlState
from delaywheel_replica.core.protocol.progress import Progress, SetBackRefusal
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.link import NodeStorage, SetBack
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.access.callers import CallContext
from delaywheel_replica.server.node.calls_to_nodes import CallsToNodes, OtherNode
from delaywheel_replica.server.node.node_view import (
    NodeView,
    done_slot,
    heartbeats_heard,
    monotonic_ms,
    storage_is_replaced,
    wall_ms,
)
from delaywheel_replica.server.node.refusals import RequestRefusedError, quoted

_WAIT_S: Final = 10.0
"""How long a change may take to be committed."""
_AGAIN_S: Final = 0.1
_TIMEOUT_S: Final = 12.0

_Answer = TypeVar("_Answer")
_Request = TypeVar("_Request")
_Word: TypeAlias = NodeStorage | SetBack


def wheel_refusal(
    cleaner: CleanerStatus | None,
    node: str,
    storage: str,
    *,
    members: Collection[str],
    heard: Collection[str],
) -> str:
    """Returns why a node gets no wheel, as far as it knows; otherwise an empty text.

    `members` are named by its settings; of these it heard some since it started, and itself.
    """
    if storage == ROLLED_BACK:
        return (
            f"STORAGE_ROLLED_BACK: the data folder of node {node} is an older copy of itself, a"
            " backup or a snapshot: it lacks what the node has accepted and promised since. Stop"
            " the node and put back its newest folder; if that is lost, start it with an empty one,"
            f" then: delaywheel node replace {node}"
        )
    if cleaner is None:
        return ""
    if not storage_is_replaced(cleaner, node, storage):
        unheard = sorted(set(members) - cleaner.nodes.keys() - set(heard))
        if unheard and cleaner.control_offset >= 0:
            return (
                f"NEVER_HEARD: no node gets a wheel until each was heard once, and"
                f" {' and '.join(unheard)} never was. Start it, or take it out of `members` on all"
                " nodes"
            )
        count = sum(wheel.node == node for wheel in cleaner.wheels)
        if count < wheels_of_a_node(len(members)):
            return ""
        return (
            f"TOO_MANY_WHEELS: node {node} has {counted(count, 'wheel')} with messages that are"
            " pending: it started very often. It gets another one when one of these is done with"
        )
    known = cleaner.nodes[node].storage
    what = "taken out" if known == REMOVED else f"registered with storage {known}"
    return (
        f"STORAGE_REPLACED: node {node} runs on storage {storage}, but is {what}."
        f" If that is to stay so: delaywheel node replace {node}"
    )


class Operator:
    """The calls of ``delaywheel.v1.DelayWheelAdmin``. For the event loop's thread."""

    def __init__(
        self,
        view: NodeView,
        other_nodes: CallsToNodes,
        *,
        members: Collection[str],
        send: Callable[[_Word], object],
        pending: Callable[[Mapping[WheelId, tuple[int, int]], int], Mapping[WheelId, int]],
    ) -> None:
        """Prepares for calls.

        Args:
            send: Sends to the cleaner; lost messages are repeated.
            pending: Counts the pending messages of frames that this node holds, as
                `alone.pending_messages`; blocks.
        """
        self._view = view
        self._other_nodes = other_nodes
        self._members = members
        self._send = send
        self._pending = pending
        # Two repeated requests about the same thing would replace each other without end.
        self._one_at_a_time = asyncio.Lock()

    async def ReplaceNode(
        self, request: pb.ReplaceNodeRequest, context: CallContext
    ) -> pb.ReplaceNodeResponse:
        """Registers the data folder that is heard, or the one that is named, for a node.

        Refuses: NODE_UNKNOWN, NODE_NOT_HEARD, NOTHING_TO_REPLACE, STORAGE_ROLLED_BACK, NO_LEADER,
        NODE_CHANGE_UNKNOWN.
        """

        async def here() -> pb.ReplaceNodeResponse:
            storage = self._new_storage(request.node, request.storage)
            change = await self._changed(request.node, storage, dry_run=request.dry_run)
            return pb.ReplaceNodeResponse(change=change)

        unknown = Reason.NODE_CHANGE_UNKNOWN
        return await self._led(lambda node: node.admin.ReplaceNode, request, context, here, unknown)

    async def RemoveNode(
        self, request: pb.RemoveNodeRequest, context: CallContext
    ) -> pb.RemoveNodeResponse:
        """Removes a node for good.

        Refuses: NODE_UNKNOWN, NODE_LEADS, NODE_IN_USE, NO_LEADER, NODE_CHANGE_UNKNOWN.
        """

        async def here() -> pb.RemoveNodeResponse:
            self._refuse_used(request.node)
            change = await self._changed(request.node, REMOVED, dry_run=request.dry_run)
            return pb.RemoveNodeResponse(change=change)

        unknown = Reason.NODE_CHANGE_UNKNOWN
        return await self._led(lambda node: node.admin.RemoveNode, request, context, here, unknown)

    async def SetBack(self, request: pb.SetBackRequest, context: CallContext) -> pb.SetBackResponse:
        """Sets w back to the leader's clock; the operator knows how often it was set back before.

        Refuses: NOTHING_TO_SET_BACK, SET_BACK_TOO_OFTEN, NO_LEADER, SET_BACK_UNKNOWN.
        """

        async def here() -> pb.SetBackResponse:
            before = self._progress()
            if not request.dry_run and request.set_backs < before.set_backs:
                return self._set_back(before)  # done by an earlier call
            after = before.set_back(wall_ms())
            if isinstance(after, SetBackRefusal):
                raise RequestRefusedError(Reason[after.name])
            if request.dry_run:
                return self._set_back_answer(before.set_backs, before.due_ms, after)
            if request.set_backs > before.set_backs:
                raise RequestRefusedError(
                    Reason.NOTHING_TO_SET_BACK, "It was never set back that often"
                )
            return self._set_back(await self._commit_set_back(before))

        unknown = Reason.SET_BACK_UNKNOWN
        return await self._led(lambda node: node.admin.SetBack, request, context, here, unknown)

    def _progress(self) -> Progress:
        progress = self._control().progress
        if progress is None:
            raise RequestRefusedError(Reason.NOTHING_TO_SET_BACK, "Nothing was ever forwarded")
        return progress

    async def _commit_set_back(self, before: Progress) -> Progress:
        def is_committed() -> bool:
            progress = self._progress()
            if progress.set_backs != before.set_backs:
                return True
            if progress.due_ms <= wall_ms():
                raise RequestRefusedError(Reason.NOTHING_TO_SET_BACK)
            return False

        word = SetBack(before.set_backs)
        await self._repeat_until(is_committed, word, unknown=Reason.SET_BACK_UNKNOWN)
        return self._progress()

    def _set_back(self, progress: Progress) -> pb.SetBackResponse:
        """Describes the committed change; parts of it may have passed by now."""
        forwarded_to_ms = progress.ahead[-1].due_ms if progress.ahead else progress.due_ms
        return self._set_back_answer(progress.set_backs - 1, forwarded_to_ms, progress)

    def _set_back_answer(
        self, set_backs: int, forwarded_to_ms: int, progress: Progress
    ) -> pb.SetBackResponse:
        return pb.SetBackResponse(
            node=self._view.status().heartbeat.node,
            set_backs=set_backs,
            forwarded_to_ms=forwarded_to_ms,
            goes_on_from_ms=progress.due_ms,
            floor=progress.floor,
        )

    async def _led(
        self,
        method_of: Callable[[OtherNode], "grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer]"],
        request: _Request,
        context: CallContext,
        here: Callable[[], Awaitable[_Answer]],
        unknown: Reason,
    ) -> _Answer:
        """Answers a call if this node leads, one at a time; else the leader's node does.

        It refuses as that node does, as `unknown` if no reason was given; or as it knows no leader.
        """
        cleaner = self._view.cleaner.status
        # It leads also while it rests, and waits for frames of a lost folder.
        if cleaner is not None and cleaner.is_in_term(monotonic_ms()):
            async with self._one_at_a_time:
                return await here()
        is_passed_on = context.caller.is_node
        address = None if is_passed_on else self._other_nodes.leader_address()
        if address is None:
            raise RequestRefusedError(Reason.NO_LEADER)
        return await self._other_nodes.call(
            address,
            lambda node: node.ask(method_of(node), request, _TIMEOUT_S),
            unknown=unknown,
        )

    def _control(self) -> ControlState:
        cleaner = self._view.cleaner.status
        return ControlState() if cleaner is None else cleaner.control

    def _refuse_unknown(self, node: str) -> None:
        if node not in self._members and node not in self._control().nodes:
            raise RequestRefusedError(Reason.NODE_UNKNOWN, f"Node {quoted(node)}")

    def _new_storage(self, node: str, wanted: str) -> str:
        """Returns the folder that is heard; a different one in the request may be a mistake."""
        self._refuse_unknown(node)
        known = self._control().nodes.get(node)
        if known is None:
            raise RequestRefusedError(
                Reason.NOTHING_TO_REPLACE,
                f"Node {node} was never registered: it will be with the first folder that is heard",
            )
        heard = heartbeats_heard(self._view.status()).get(node)
        if heard is None:
            raise RequestRefusedError(Reason.NODE_NOT_HEARD, f"Node {node} is not heard")
        if wanted not in {"", heard.storage}:
            raise RequestRefusedError(
                Reason.NODE_NOT_HEARD,
                f"Node {node} runs on storage {heard.storage}, not on {wanted}",
            )
        if heard.storage == ROLLED_BACK:
            raise RequestRefusedError(Reason.STORAGE_ROLLED_BACK, f"Node {node}")
        if heard.storage == known.storage:
            raise RequestRefusedError(
                Reason.NOTHING_TO_REPLACE, f"Node {node} runs on storage {known.storage}"
            )
        return heard.storage

    def _refuse_used(self, node: str) -> None:
        self._refuse_unknown(node)
        if node == self._view.status().heartbeat.node:
            raise RequestRefusedError(Reason.NODE_LEADS, f"Node {node} leads")
        if node in self._members:
            raise RequestRefusedError(
                Reason.NODE_IN_USE, f"Node {node} is among the leader's members"
            )

    async def _changed(self, node: str, storage: str, *, dry_run: bool) -> pb.NodeChange:
        """Returns the change once it is committed."""
        control, status = self._control(), self._view.status()
        before = control.nodes[node].storage
        alone = held_alone(control, status.heartbeats, without=node)
        frames = {wheel: (first, last) for wheel, (_, first, last) in alone.items()}
        slot = done_slot(control.progress, wall_ms())
        messages = await asyncio.to_thread(self._pending, frames, slot)
        change = pb.NodeChange(
            node=node,
            storage_before=_shown(before),
            storage=_shown(storage),
            wheels=[
                pb.WheelAtRisk(
                    wheel=str(wheel),
                    frames=at_risk,
                    alone_messages=messages.get(wheel, 0),
                    alone_on=alone[wheel][0] if messages.get(wheel) else "",
                )
                for wheel, at_risk in frames_at_risk(control, node, status.heartbeats).items()
            ],
        )
        if not dry_run and before != storage:
            await self._commit(node, storage)
        return change

    async def _commit(self, node: str, storage: str) -> None:
        await self._repeat_until(
            lambda: self._control().nodes[node].storage == storage,
            NodeStorage(node, storage),
            unknown=Reason.NODE_CHANGE_UNKNOWN,
        )

    async def _repeat_until(
        self, is_committed: Callable[[], bool], word: _Word, *, unknown: Reason
    ) -> None:
        """Repeats a request to the cleaner until it is fulfilled.

        Refuses: `unknown`, if it takes too long; and what `is_committed` refuses.
        """
        try:
            async with asyncio.timeout(_WAIT_S):
                while not is_committed():
                    self._send(word)
                    await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            raise RequestRefusedError(unknown) from None


def _shown(storage: str) -> str:
    return "" if storage == REMOVED else storage
