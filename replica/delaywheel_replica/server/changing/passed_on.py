"""Cancels on a node that does not lead: passed on to the leader's node, many in one call.

A call costs the leader's node about a millisecond of its one thread, however many messages it
names. So a few calls are under way at once, and what comes meanwhile goes together when one of them
ends; a lone cancel waits for nothing. No caller waits for what another one named: the leader's node
answers soon after some are decided, and the others are asked for again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.changing.awaited import AwaitedCall
from delaywheel_replica.server.changing.gathering import QUEUED_AT_MOST, WAIT_S
from delaywheel_replica.server.node.answering import defect
from delaywheel_replica.server.node.calls_to_nodes import Passing, refusal_of_a_cancel
from delaywheel_replica.server.node.refusals import Refusal, RefusedError

MESSAGES_AT_MOST: Final = 1_000
"""How many messages one call names."""
CALLS_AT_ONCE: Final = 4

PassedOn = pb.MessageCancelled | Refusal
"""What became of one message."""


@dataclass(slots=True, eq=False)
class _One:
    """One message of a caller's."""

    message: pb.MessageRef
    call: AwaitedCall[PassedOn]
    row: int
    is_sent: bool = False

    @property
    def over(self) -> Refusal:
        """What its caller hears if its time is over."""
        if self.is_sent:
            return Refusal(Reason.CANCEL_UNKNOWN)
        return Refusal(Reason.BACKPRESSURE, "Its turn did not come in time")


@dataclass(slots=True, eq=False)
class _Line:
    """What is passed on to one address."""

    waiting: deque[_One]
    calls: int = 0


class PassedCancels:
    """Passes cancels on. For the event loop's thread."""

    def __init__(self, passing: Passing) -> None:
        self._passing = passing
        self._lines: dict[str, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def cancel(
        self, address: str, messages: Sequence[pb.MessageRef], within_s: float
    ) -> list[PassedOn]:
        """Cancels messages; returns what became of each, in order.

        Raises:
            RefusedError: BACKPRESSURE.
        """
        line = self._lines.setdefault(address, _Line(deque()))
        if len(line.waiting) + len(messages) > QUEUED_AT_MOST:
            raise RefusedError(Reason.BACKPRESSURE, "Many cancels wait for the leader's node")
        call = AwaitedCall[PassedOn].of(len(messages))
        ones = [_One(message, call, row) for row, message in enumerate(messages)]
        line.waiting.extend(ones)
        self._pump(address, line)
        try:
            async with asyncio.timeout(within_s):
                await call.done
        except TimeoutError:
            pass
        finally:
            call.is_over = True
        return [
            one.over if result is None else result
            for one, result in zip(ones, call.results, strict=True)
        ]

    def _pump(self, address: str, line: _Line) -> None:
        while line.waiting and line.calls < CALLS_AT_ONCE:
            group = [
                line.waiting.popleft() for _ in range(min(MESSAGES_AT_MOST, len(line.waiting)))
            ]
            group = [one for one in group if not one.call.is_over]
            if group:
                line.calls += 1
                task = asyncio.create_task(self._send(address, line, group))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        if not (line.waiting or line.calls):
            self._lines.pop(address, None)

    async def _send(self, address: str, line: _Line, group: Sequence[_One]) -> None:
        for one in group:
            one.is_sent = True
        request = pb.CancelRequest(messages=[one.message for one in group], partly=True)
        refusal = Refusal(Reason.CANCEL_UNKNOWN)
        results: Sequence[pb.MessageCancelled] = ()
        try:
            response = await self._passing.cancel(address, request, within_s=WAIT_S)
            results = response.results
        except RefusedError as error:
            refusal = error.refusal
        except Exception as error:  # noqa: BLE001 - a defect is named to its callers alone
            refusal = defect(error)
        finally:
            line.calls -= 1
        if len(results) == len(group):
            for one, result in zip(group, results, strict=True):
                self._settle(line, one, result)
        else:
            for one in group:
                one.call.settle(one.row, refusal)
        self._pump(address, line)

    @staticmethod
    def _settle(line: _Line, one: _One, result: pb.MessageCancelled) -> None:
        if result.HasField("error"):
            one.call.settle(one.row, refusal_of_a_cancel(result.error))
        elif result.outcome != pb.CANCEL_OUTCOME_UNSPECIFIED:
            one.call.settle(one.row, result)
        else:
            line.waiting.append(one)
