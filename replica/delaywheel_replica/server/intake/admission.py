"""Bounds on bytes that were received and not yet answered: the last row of reception.py's table.

Without them a slow disk would fill the memory, and so would a caller that does not read: an answer
is counted until it is on its way to the caller. Of twice what is still free a principal alone takes
two thirds of the bound, two of them two fifths each: so room is left for whoever comes next.

An answer stays until it is read, and gRPC can end no call with an answer under way. So whoever
reads none of its answers for a minute, or for ten seconds if others are refused for lack of room,
loses its connection: four of them would shut out all others for good.

A request counts with its bytes plus a fixed cost per message, however short: its decoded form and
its answer are at least as long.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

from delaywheel.reasons import Reason
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.quantities import size
from delaywheel_replica.server.access.callers import CallOrigin
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError, quoted

_log = get_logger(__name__)

MESSAGE_COST_BYTES: Final = 320

_IN_FLIGHT_RETRY_MS: Final = 50
_LOOK_S: Final = 5.0
_NAMED: Final = 10
_UNREAD_LOOKS: Final = 12
_UNREAD_LOOKS_FULL: Final = 2
"""How often a caller is seen to read nothing; looks, since nobody reads while the loop stands."""


@dataclass(slots=True)
class _Reader:
    """A connection with answers that it has not read, and how many looks ago it has read one."""

    answers: int = 0
    looks: int = 0


def cost_bytes(request: bytes, messages: int) -> int:
    """Returns how many bytes a request counts for while it is in flight."""
    return len(request) + messages * MESSAGE_COST_BYTES


class Admission:
    """Counts the bytes in flight. For the event loop's thread."""

    def __init__(
        self,
        *,
        max_bytes: int,
        max_caller_bytes: int,
        close: Callable[[Collection[str]], object] | None = None,
        quota_of: Callable[[str], int | None] | None = None,
    ) -> None:
        """Begins with nothing in flight.

        Args:
            max_bytes: Of all callers.
            max_caller_bytes: Of one caller.
            close: Closes the connections of callers that do not read; may be slow.
            quota_of: Returns how many bytes a principal may have in flight; None: no limit.
        """
        self._close = close
        self._readers: dict[str, _Reader] = {}  # by address
        self._full_looks = 0  # how many looks to come are less patient, since callers are refused
        self._max_bytes = max_bytes
        self._max_caller_bytes = max_caller_bytes
        self._held = Counter[str | tuple[str, str]]()  # by address, and by principal
        self._quota_of = quota_of
        self.in_flight_bytes = 0
        self._requests = 0
        self._is_looking = False
        self._less = asyncio.Event()

    async def wait_idle(self) -> None:
        """Waits until no request is in flight, ignoring callers that do not read their answers."""
        while self._requests:
            await self._until_less()

    async def wait_for_room(self, caller: CallOrigin, length_bytes: int) -> None:
        """Waits until a caller's own bounds have room for this many more bytes."""
        while self._refusal(caller, length_bytes) is not None:
            await self._until_less()

    async def _until_less(self) -> None:
        self._less.clear()
        await self._less.wait()

    def _refusal(self, caller: CallOrigin, length_bytes: int) -> Refusal | None:
        """Says why a caller's own bounds have no room for this much; an idle one always has."""
        of_caller = self._held[caller.address]
        if of_caller and of_caller + length_bytes > self._max_caller_bytes:
            return Refusal(Reason.BACKPRESSURE, f"{size(of_caller)} of this caller are in flight")
        held = self._held[caller.sharer] if caller.principal else 0
        quota = self._quota_of(caller.principal) if held and self._quota_of is not None else None
        if quota is not None and held + length_bytes > quota:
            return Refusal(
                Reason.QUOTA_EXCEEDED,
                f"{size(held)} of {quoted(caller.principal)} are in flight, of {size(quota)}",
                after_ms=_IN_FLIGHT_RETRY_MS,
                principal=caller.principal,
            )
        if held and held + length_bytes > 2 * (self._max_bytes - self.in_flight_bytes):
            return Refusal(
                Reason.BACKPRESSURE,
                f"{size(held)} of this principal are in flight, and the rest is for others",
            )
        return None

    def admit(self, caller: CallOrigin, length_bytes: int) -> "Ticket":
        """Counts a request until its ticket is returned.

        Raises:
            RequestRefusedError: BACKPRESSURE.
        """
        refusal = self._refusal(caller, length_bytes)
        if refusal is not None:
            raise RequestRefusedError.of(refusal)
        if self.in_flight_bytes and self.in_flight_bytes + length_bytes > self._max_bytes:
            self._full_looks = 2 * _UNREAD_LOOKS_FULL
            raise RequestRefusedError(
                Reason.BACKPRESSURE, f"{size(self.in_flight_bytes)} are in flight on this node"
            )
        self._count(caller, length_bytes)
        self._requests += 1
        return Ticket(partial(self._end_request, caller, length_bytes))

    def _end_request(self, caller: CallOrigin, length_bytes: int) -> None:
        self._requests -= 1
        self._count(caller, -length_bytes)

    def hold_answer(self, caller: CallOrigin, length_bytes: int) -> Callable[[], None]:
        """Counts an answer; the returned function must be called once, when the caller has it.

        The answer exists already, so it is never refused: its request was counted with it.
        """
        self._count(caller, length_bytes)
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        reader = self._readers.setdefault(caller.address, _Reader())
        reader.answers += 1
        return partial(self._read, caller, reader, length_bytes)

    def _read(self, caller: CallOrigin, reader: _Reader, length_bytes: int) -> None:
        reader.answers -= 1
        reader.looks = 0
        if not reader.answers:
            del self._readers[caller.address]
        self._count(caller, -length_bytes)

    def _look(self) -> None:
        """Closes the connections of callers that do not read."""
        most = _UNREAD_LOOKS_FULL if self._full_looks else _UNREAD_LOOKS
        self._full_looks = max(0, self._full_looks - 1)
        for reader in self._readers.values():
            reader.looks += 1
        unread = {address for address, reader in self._readers.items() if reader.looks > most}
        loop = asyncio.get_running_loop()
        if unread and self._close is not None:
            _log.warning(
                "callers that do not read", callers=sorted(unread)[:_NAMED], closed=len(unread)
            )
            loop.run_in_executor(None, self._close, unread)
        self._is_looking = bool(self._readers)
        if self._is_looking:
            loop.call_later(_LOOK_S, self._look)

    def _count(self, caller: CallOrigin, length_bytes: int) -> None:
        """Counts bytes more, or less; who has none is not kept."""
        self.in_flight_bytes += length_bytes
        for holder in (caller.address, caller.sharer) if caller.principal else (caller.address,):
            self._held[holder] += length_bytes
            if not self._held[holder]:
                del self._held[holder]
        if length_bytes <= 0:
            self._less.set()


class Ticket:
    """One admitted request; it is returned by whoever leaves it last: its context, or a writer.

    A caller that goes away does not take back what it sent: what the writer has is counted until it
    is written.
    """

    __slots__ = ("_end", "_holders")

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._holders = 1

    def hand_on(self, answer: "asyncio.Future[Any]") -> None:
        """Keeps the ticket until ``answer`` is done, too."""
        self._holders += 1
        answer.add_done_callback(self.__exit__)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._holders -= 1
        if not self._holders:
            self._end()
