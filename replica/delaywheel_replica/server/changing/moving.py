"""Asks for nearer dues of messages that were put off under clocks that were ahead.

Once w is set back, such a message is pending at a due that nobody chose, perhaps a day from now.
The server of the leader's node asks its cleaner to give it another one, until that is decided
(core/leader/rescheduling.py).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.leader.rescheduling import nearer_due_ms, to_move
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule, RescheduleWish
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.changing.sights import Sights
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.node.answering import defect
from delaywheel_replica.server.node.node_view import NodeView, wall_ms
from delaywheel_replica.server.node.refusals import RequestRefusedError

_AGAIN_S: Final = 0.5
"""How often it is asked again: what one transaction does not decide, it forgets."""

_log = get_logger(__name__)


class Moves:
    """Asks while this node's cleaner leads. For the event loop's thread."""

    def __init__(
        self,
        view: NodeView,
        sights: Sights,
        *,
        announce: Callable[[RescheduleWish], object],
        next_change: Callable[[], Awaitable[object]],
    ) -> None:
        """Prepares; `run` asks.

        Args:
            view: What the parts know of the node.
            sights: Finds messages, and examines them.
            announce: Sends a wish to the cleaner.
            next_change: Waits for a new progress or role in the cleaner's row.
        """
        self._view = view
        self._sights = sights
        self._announce = announce
        self._next_change = next_change

    async def run(self) -> None:
        """Asks until the task is cancelled."""
        while True:
            await self._next_change()
            leading = self._view.cleaner.leading()
            if leading is None or leading.progress is None:
                continue
            moving = to_move(leading.reschedules, leading.progress)
            for key, stands in moving.items():
                try:
                    await self._ask(key, stands, leading.progress)
                except RequestRefusedError as error:
                    reason = error.refusal.reason.value
                    _log.info("a message is not moved yet", reason=reason, due_ms=key[1])
                except Exception as error:  # noqa: BLE001 - it is named, and tried again
                    defect(error)
            if moving:
                await asyncio.sleep(_AGAIN_S)

    async def _ask(self, key: MessageKey, stands: Reschedule, progress: Progress) -> None:
        """Asks, unless somebody has cancelled the message, or given it another due."""
        id_, due_ms = key
        subject = await self._sights.find(Reference(due_ms // 1000, id_, due_ms))
        decided = await self._sights.decide(subject)
        if decided.decision is CancelDecision.WRITE:
            to_ms = nearer_due_ms(stands, progress, wall_ms())
            self._announce(RescheduleWish(key, to_ms, self._sights.place(subject.found)))
