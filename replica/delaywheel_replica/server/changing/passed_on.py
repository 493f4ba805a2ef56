"""Cancels and reschedules on a node that does not lead: passed on to the leader's node, together.

A call costs the leader's node about a millisecond of its one thread, however many messages it
names. So calls begin `APART_S` apart for each that is under way, or as soon as `WORTH_A_CALL`
messages wait: the slower that node, the more gather. A lone message waits for nothing. Cancels wait
for nothing more on the leader's node (cancel_groups.py). No caller waits for what another one
named: the leader's node answers soon after some are decided, or after `PASSED_ON_S` (awaited.py) if
none is, and the others are asked for again. A large call that is not answered in part shares its
cost by itself: it is passed on as it is, once, and waits behind no other. Sharers have turns in
each call, and share the room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, Generic, TypeAlias, TypeVar

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.process.round_robin import RoundRobin
from delaywheel_replica.server.access.shared_room import SharedRoom
from delaywheel_replica.server.changing.awaited import MESSAGES_AT_MOST, AwaitedCall
from delaywheel_replica.server.node.calls_to_nodes import refusal_of_a_change
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, refusal_of
from delaywheel_replica.server.node.turns import start

CALLS_AT_MOST: Final = 32
APART_S: Final = 0.01
WORTH_A_CALL: Final = 256
"""Of so many messages each pays more for itself than for the call."""
LARGE: Final = 100
"""Messages of a call that is passed on by itself."""
KEPT_AT_MOST: Final = 32_768
"""Messages that wait here, or for the leader's node."""
QUEUED_S: Final = 1.0
"""Nothing is queued behind what waits for so long: the leader's node has too much to do."""

LATE: Final[Mapping[type, Collection[int]]] = {
    pb.MessageCancelled: {pb.CANCEL_OUTCOME_TOO_LATE, pb.CANCEL_OUTCOME_NOT_FOUND},
    pb.MessageRescheduled: {pb.RESCHEDULE_OUTCOME_TOO_LATE, pb.RESCHEDULE_OUTCOME_NOT_FOUND},
}
"""These say nothing of what was written before."""

NamedT = TypeVar("NamedT", bound=pb.MessageRef | pb.NewDue)
ResultT = TypeVar("ResultT", bound=pb.MessageCancelled | pb.MessageRescheduled)
SendChanges: TypeAlias = Callable[
    [str, Sequence[NamedT], float | None, Iterable[Hashable]], Awaitable[Sequence[ResultT]]
]


@dataclass(slots=True, eq=False)
class _AskedOne(Generic[NamedT, ResultT]):
    """One message of a caller's.

    Attributes:
        sharer: Who that is.
        is_doubtful: The leader's node was deciding it: it may have written something.
    """

    message: NamedT
    call: AwaitedCall[ResultT | Refusal]
    row: int
    sharer: Hashable
    since_s: float
    is_sent: bool = False
    is_doubtful: bool = False


@dataclass(slots=True, eq=False)
class _AddressQueue(Generic[NamedT, ResultT]):
    """What is passed on to one address.

    Attributes:
        messages: How many wait.
        begun_s: When the last call began.
        room: What waits, and what that node was asked.
    """

    address: str
    waiting: RoundRobin[_AskedOne[NamedT, ResultT]] = field(default_factory=RoundRobin)
    messages: int = 0
    begun_s: float = -inf
    room: SharedRoom = field(default_factory=lambda: SharedRoom(KEPT_AT_MOST))
    calls: int = 0
    timer: asyncio.TimerHandle | None = None

    def add(self, one: _AskedOne[NamedT, ResultT]) -> None:
        """Has a message wait, behind others of its sharer."""
        self.waiting.add(one.sharer, one)
        self.messages += 1

    def take(self) -> list[_AskedOne[NamedT, ResultT]]:
        """Takes the messages of one call, but for those whose callers have left."""
        group = list[_AskedOne[NamedT, ResultT]]()
        while self.messages and len(group) < MESSAGES_AT_MOST:
            one = self.waiting.take()
            self.messages -= 1
            if one.call.is_over:
                self.room.give_back(one.sharer)
            else:
                group.append(one)
        return group

    def is_full(self, sharer: Hashable) -> bool:
        """Whether what comes now from a sharer would wait for too long."""
        if not self.room.left(sharer):
            return True
        first = self.waiting.first(sharer)
        return first is not None and time.monotonic() - first.since_s >= QUEUED_S


class PassedChanges(Generic[NamedT, ResultT]):
    """Passes cancels, or reschedules, on. For the event loop's thread."""

    def __init__(self, send: SendChanges[NamedT, ResultT], unknown: Reason) -> None:
        """Prepares.

        Args:
            send: Makes one call at an address, which is answered as a whole within the time given;
                without one in part, soon after some messages are decided. It tells sharers apart.
            unknown: The reason if nothing is known of a message that was sent.
        """
        self._send_all = send
        self._unknown = unknown
        self._queues: dict[str, _AddressQueue[NamedT, ResultT]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(
        self,
        address: str,
        messages: Sequence[NamedT],
        within_s: float,
        sharer: Hashable = "",
        *,
        partly: bool,
    ) -> list[ResultT | Refusal | None]:
        """Passes messages of a sharer on; returns what became of each, in order.

        With `partly` it returns soon after some are decided; None: others, which go on there.

        Raises:
            RequestRefusedError: BACKPRESSURE.
        """
        queue = self._queues.setdefault(address, _AddressQueue(address))
        if queue.is_full(sharer):
            raise RequestRefusedError(
                Reason.BACKPRESSURE, "Many messages wait for the leader's node"
            )
        queue.room.take(sharer, len(messages))
        if len(messages) >= LARGE and not partly:
            return await self._ask_by_itself(queue, messages, within_s, sharer)
        call = AwaitedCall[ResultT | Refusal].of(len(messages))
        now_s = time.monotonic()
        ones = [
            _AskedOne(message, call, row, sharer, now_s) for row, message in enumerate(messages)
        ]
        for one in ones:
            queue.add(one)
        self._pump(queue)

        def are_sent() -> bool:
            # What is still here would be dropped with its caller.
            return all(one.is_sent for one in ones)

        if await call.wait(within_s, are_sent if partly else None):
            return list(call.results)
        return [
            self._over(one) if result is None else result
            for one, result in zip(ones, call.results, strict=True)
        ]

    async def _ask_by_itself(
        self,
        queue: _AddressQueue[NamedT, ResultT],
        messages: Sequence[NamedT],
        within_s: float,
        sharer: Hashable,
    ) -> list[ResultT | Refusal | None]:
        try:
            results = await self._send_all(
                queue.address, messages, within_s, [sharer] * len(messages)
            )
        except RequestRefusedError as error:
            return [error.refusal] * len(messages)
        finally:
            queue.room.give_back(sharer, len(messages))
            self._pump(queue)
        if len(results) != len(messages):
            return [Refusal(self._unknown)] * len(messages)
        return [self._result(result) for result in results]

    def _result(self, result: ResultT) -> ResultT | Refusal:
        if result.HasField("error"):
            return refusal_of_a_change(result.error, self._unknown)
        return result if result.outcome else Refusal(self._unknown)

    def _over(self, one: _AskedOne[NamedT, ResultT]) -> Refusal:
        """What the caller of a message hears if its time is over."""
        if one.is_sent:
            return Refusal(self._unknown)
        return Refusal(Reason.BACKPRESSURE, "Its turn did not come in time")

    def _pump(self, queue: _AddressQueue[NamedT, ResultT]) -> None:
        while queue.messages and queue.calls < CALLS_AT_MOST:
            wait_s = queue.begun_s + queue.calls * APART_S - time.monotonic()
            if wait_s > 0 and queue.messages < WORTH_A_CALL:
                if queue.timer is None:
                    loop = asyncio.get_running_loop()
                    queue.timer = loop.call_later(wait_s, self._gathered, queue)
                return
            if group := queue.take():
                queue.calls += 1
                queue.begun_s = time.monotonic()
                start(self._send(queue, group), self._tasks)
        if not queue.room.taken:
            if queue.timer is not None:
                queue.timer.cancel()
            self._queues.pop(queue.address, None)

    def _gathered(self, queue: _AddressQueue[NamedT, ResultT]) -> None:
        queue.timer = None
        self._pump(queue)

    async def _send(
        self,
        queue: _AddressQueue[NamedT, ResultT],
        group: Sequence[_AskedOne[NamedT, ResultT]],
    ) -> None:
        for one in group:
            one.is_sent = True
        refusal = Refusal(self._unknown)
        results: Sequence[ResultT] = ()
        try:
            results = await self._send_all(
                queue.address,
                [one.message for one in group],
                None,
                [one.sharer for one in group],
            )
        except Exception as error:  # noqa: BLE001 - a defect is named to its callers alone
            refusal = refusal_of(error)
        finally:
            queue.calls -= 1
        if len(results) == len(group):
            for one, result in zip(group, results, strict=True):
                self._settle(queue, one, self._answer(one, result))
        else:
            for one in group:
                self._settle(queue, one, self._refused(one, refusal))
        self._pump(queue)

    def _refused(self, one: _AskedOne[NamedT, ResultT], refusal: Refusal) -> Refusal:
        """Returns why a message is not changed; in doubt, that nothing is known.

        Since it was asked about first, another node may lead, or that one may have forgotten it.
        """
        if one.is_doubtful and refusal.reason.retry_helps and refusal.reason.outcome_known:
            return self._in_doubt(refusal.reason.value, refusal.after_ms)
        return refusal

    def _in_doubt(self, now: str, after_ms: int | None = None) -> Refusal:
        return Refusal(self._unknown, f"It was being decided; now {now}", after_ms)

    def _settle(
        self,
        queue: _AddressQueue[NamedT, ResultT],
        one: _AskedOne[NamedT, ResultT],
        answer: ResultT | Refusal | None,
    ) -> None:
        if answer is None:
            one.is_doubtful = True
            one.since_s = time.monotonic()
            queue.add(one)
        else:
            queue.room.give_back(one.sharer)
            one.call.settle(one.row, answer)

    def _answer(self, one: _AskedOne[NamedT, ResultT], result: ResultT) -> ResultT | Refusal | None:
        """Returns what became of a message; None: it is being decided."""
        if result.HasField("error"):
            return self._refused(one, refusal_of_a_change(result.error, self._unknown))
        if one.is_doubtful and result.outcome in LATE[type(result)]:
            return self._in_doubt("it is too late, or not found")
        return result if result.outcome else None
