"""Asks for nearer dues of messages that were put off under clocks that were ahead.

Once w is set back, such a message is pending at a due that nobody chose, perhaps a day from now.
The server of the leader's node asks its cleaner to give it another one, until that is decided
(core/leader/rescheduling.py).
"""

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from delaywheel_replica.core.leader.cancel import CancelDecision
from delaywheel_replica.core.leader.rescheduling import nearer_due_ms, to_move
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.reschedules import MessageKey, Reschedule, RescheduleProposal
from delaywheel_replica.core.protocol.status_files import CleanerStatus
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.changing.finder import MessageFinder, place_in
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Found
from delaywheel_replica.server.node.node_view import NodeView, monotonic_ms, wall_ms
from delaywheel_replica.server.node.refusals import RequestRefusedError, defect

AGAIN_MS: Final = 500
"""How often it is asked again: what one transaction does not decide, it forgets."""

_log = get_logger(__name__)


class NearerDue(NamedTuple):
    """A message that needs a nearer due.

    Attributes:
        key: It, with the due that the leader chose.
        record: Of its reschedule, as committed.
        progress: Committed.
    """

    key: MessageKey
    record: Reschedule
    progress: Progress

    @property
    def reference(self) -> Reference:
        """Where the message is looked for."""
        return Reference.of(self.key)

    def proposal(
        self, found: Found, decision: CancelDecision, now_ms: int
    ) -> RescheduleProposal | None:
        """Returns what to ask for; None if somebody has cancelled it, or given it another due.

        Args:
            found: What was found of it.
            decision: What follows from that.
            now_ms: The wall clock.
        """
        if decision is not CancelDecision.WRITE:
            return None
        to_ms = nearer_due_ms(self.record, self.progress, now_ms)
        place = place_in(found, self.progress)
        return RescheduleProposal(self.key, to_ms, place, chosen_ms=self.record.chosen_ms)


class Moves:
    """Says when which messages are asked for."""

    def __init__(self) -> None:
        self._again_ms = 0

    def due(self, leading: CleanerStatus | None, now_ms: int) -> list[NearerDue]:
        """Returns the messages to ask for now.

        Args:
            leading: The status of this node's cleaner; None if it does not lead.
            now_ms: The monotonic clock.
        """
        if leading is None or leading.progress is None or now_ms < self._again_ms:
            return []
        moving = to_move(leading.reschedules, leading.progress)
        if moving:
            self._again_ms = now_ms + AGAIN_MS
        return [NearerDue(key, record, leading.progress) for key, record in moving.items()]


async def keep_moving(
    view: NodeView,
    finder: MessageFinder,
    *,
    propose: Callable[[RescheduleProposal], object],
    next_change: Callable[[], Awaitable[object]],
) -> None:
    """Asks while this node's cleaner leads, until the task is cancelled.

    Args:
        next_change: Waits for a new progress or role in the cleaner's row.
    """
    moves = Moves()
    while True:
        await next_change()
        for move in moves.due(view.cleaner.leading(), monotonic_ms()):
            try:
                subject = await finder.find(move.reference)
                decided = await finder.decide(subject)
                proposal = move.proposal(subject.found, decided.decision, wall_ms())
                if proposal is not None:
                    propose(proposal)
            except RequestRefusedError as error:
                reason = error.refusal.reason.value
                _log.info("a message is not moved yet", reason=reason, due_ms=move.key.due_ms)
            except Exception as error:  # noqa: BLE001 - it is named, and tried again
                defect(error)
