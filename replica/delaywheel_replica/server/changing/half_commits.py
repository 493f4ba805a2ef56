"""Commit: half messages that a call names, at whichever node the caller has asked.

A commit is one row, which names the half by topic, id and due (own_halves.py says which row). It is
written with the next group, and answered once W members hold it. If the caller names the wheel that
has the half, and that is another node's, the commit is passed on: only there it is a release. If
that node does not answer, it is written here.

A commit behind a cancel would change nothing. So where the half's second has a cancel, of whatever
it is (near_cancels.py), it is looked whether that is one of the half; and while such a cancel is
undecided, for a second at most, the commit waits.

| the half | the caller gets |
|---|---|
| was cancelled, as this node knows | ROLLED_BACK |
| its hold has ended, or nearly; its second is sealed | LEFT_TO_CHECK |
| is due later than any half can be: the caller names another due | HALF_INVALID |
| is of a topic that the caller may not send to | FORBIDDEN |
| any other | COMMITTED; or why no row is known to be held |
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.leader.halves import longest_left_ms
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.rights import Right
from delaywheel_replica.server.access.callers import CallContext
from delaywheel_replica.server.changing.awaited import parsed
from delaywheel_replica.server.changing.id_checks import AGAIN_S, CANCEL_WAIT_S
from delaywheel_replica.server.changing.pending import DecisionBasis
from delaywheel_replica.server.changing.permission import judged
from delaywheel_replica.server.commit.near_cancels import NearCancels
from delaywheel_replica.server.commit.own_halves import CommitWriting, is_left_to_check
from delaywheel_replica.server.lookup.queries import Queries
from delaywheel_replica.server.lookup.references import Reference, named_by
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.calls_to_nodes import CallsToNodes
from delaywheel_replica.server.node.node_view import monotonic_ms, wall_ms
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

_COMMITTED: Final = pb.HalfCommitted(outcome=pb.COMMIT_OUTCOME_COMMITTED)
_LEFT: Final = pb.HalfCommitted(outcome=pb.COMMIT_OUTCOME_LEFT_TO_CHECK)
_ROLLED_BACK: Final = pb.HalfCommitted(outcome=pb.COMMIT_OUTCOME_ROLLED_BACK)


class HalfCommits:
    """Commits halves. For the event loop's thread."""

    def __init__(
        self,
        node: str,
        queries: Queries,
        other_nodes: CallsToNodes,
        writing: CommitWriting,
        refusal: Callable[[], Refusal | None],
        *,
        near_cancels: NearCancels,
        basis_of_look: Callable[[], DecisionBasis],
        clock_skew_ms: int,
    ) -> None:
        """Begins.

        Args:
            node: This node's id.
            refusal: Returns why the node takes no halves; None: it does.
            near_cancels: Where a half may have a cancel.
            basis_of_look: Returns what decisions by a look that begins now are based on.
            clock_skew_ms: By how much clocks may differ.
        """
        self._node = node
        self._queries = queries
        self._other_nodes = other_nodes
        self._writing = writing
        self._refusal = refusal
        self._near_cancels = near_cancels
        self._basis_of_look = basis_of_look
        self._longest_ms = longest_left_ms(clock_skew_ms)

    async def commit(self, request: pb.CommitRequest, call: CallContext) -> pb.CommitResponse:
        """Commits halves, each on its own.

        Raises:
            RequestRefusedError: TOO_MANY_MESSAGES, HALVES_OFF, HALVES_NOT_READY.
        """
        refusal = self._refusal()
        if refusal is not None:
            raise RequestRefusedError.of(refusal)
        named = judged(call.caller, parsed(request.halves, named_by), Right.PRODUCE)
        keys = {row: each.key for row, each in enumerate(named) if isinstance(each, Reference)}
        results = [
            pb.HalfCommitted(error=each.as_error()) if isinstance(each, Refusal) else None
            for each in named
        ]
        rows: dict[str, list[int]] = {}
        for row in keys:
            node = (
                self._node if call.caller.is_node else request.halves[row].wheel.partition(".")[0]
            )
            rows.setdefault(node or self._node, []).append(row)
        at_nodes = (
            self._commit_at(node, some, request.halves, keys, results, call.sharer)
            for node, some in rows.items()
        )
        await asyncio.gather(*at_nodes)
        return pb.CommitResponse(results=[each or pb.HalfCommitted() for each in results])

    async def _commit_at(
        self,
        node: str,
        rows: Sequence[int],
        halves: Sequence[pb.HalfRef],
        keys: Mapping[int, MessageKey],
        results: list[pb.HalfCommitted | None],
        sharer: Hashable,
    ) -> None:
        """Commits halves in one node's wheels: there, or here if it does not answer.

        Halves in other nodes' wheels do not wait for that.
        """
        if node != self._node:
            some = pb.CommitRequest(halves=[halves[row] for row in rows])
            answer = await self._other_nodes.commit(node, some)
            if answer is not None and len(answer.results) == len(rows):
                for row, result in zip(rows, answer.results, strict=True):
                    results[row] = None if result.HasField("error") else result
        left = {row: keys[row] for row in rows if results[row] is None}
        near = {row: left[row] for row in left if left[row].due_ms in self._near_cancels}
        if near:
            left = {row: left[row] for row in left if row not in near}
            await asyncio.gather(
                self._write(left, results), self._write_uncancelled(near, results, sharer)
            )
        else:
            await self._write(left, results)

    async def _write_uncancelled(
        self,
        keys: Mapping[int, MessageKey],
        results: list[pb.HalfCommitted | None],
        sharer: Hashable,
    ) -> None:
        """Commits halves of seconds that have a cancel."""
        until_ms = monotonic_ms() + round(CANCEL_WAIT_S * 1000)
        while keys:
            known = await self._known(list(keys.values()), sharer)
            decisions = dict(zip(keys, known, strict=True))
            may_wait = monotonic_ms() < until_ms
            to_write, waiting = dict[int, MessageKey](), dict[int, MessageKey]()
            for row, decision in decisions.items():
                if decision is CancelDecision.CANCELLED:
                    results[row] = _ROLLED_BACK
                elif decision is CancelDecision.WAIT and may_wait:
                    waiting[row] = keys[row]
                else:
                    to_write[row] = keys[row]
            await asyncio.gather(
                self._write(to_write, results), asyncio.sleep(AGAIN_S if waiting else 0)
            )
            keys = waiting

    async def _known(
        self, keys: Sequence[MessageKey], sharer: Hashable
    ) -> list[CancelDecision | None]:
        """Returns what is decided of halves that have a cancel; None: of others."""
        basis = self._basis_of_look()
        found = await self._queries.find_many([*map(Reference.of, keys)], sharer)
        return [
            basis.after_writing(key, each).decision
            if isinstance(each, Found) and each.cancels
            else None
            for key, each in zip(keys, found, strict=True)
        ]

    async def _write(
        self, wanted: Mapping[int, MessageKey], results: list[pb.HalfCommitted | None]
    ) -> None:
        now_ms = wall_ms()
        keys = dict[int, MessageKey]()
        for row, key in wanted.items():
            left_ms = key.due_ms - now_ms
            if is_left_to_check(key.due_ms, now_ms):
                results[row] = _LEFT
            elif left_ms > self._longest_ms:
                refusal = Refusal(Reason.HALF_INVALID, f"No half is held for {left_ms:,} ms more")
                results[row] = pb.HalfCommitted(error=refusal.as_error())
            else:
                keys[row] = key
        failed = await self._writing.write(keys, now_ms) if keys else {}
        for row in keys:
            results[row] = _result_of(failed.get(row))


def _result_of(refusal: Refusal | None) -> pb.HalfCommitted:
    if refusal is None:
        return _COMMITTED
    is_late = refusal.reason is Reason.DUE_TOO_OLD
    return _LEFT if is_late else pb.HalfCommitted(error=refusal.as_error())
