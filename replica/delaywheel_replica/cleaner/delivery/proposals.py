"""Finds the proposals of other dues that no cancel contradicts.

A proposal, a request for another due, may be decided once all cancels of its second, up to what is
admitted, were examined. The server has an index of ids, and says up to which frames it found none;
what came since is examined here. That is done in pieces, so that no transaction waits for it: a
bounded part in each, and the rest in later ones. Proposals about messages of one second are
examined together; those that arrive meanwhile come next.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from delaywheel.identity import WheelId
from delaywheel.storage.reading.cancels import BEGIN_BYTES, Budget, CancelLook
from delaywheel_replica.core.leader.rescheduling import MOST
from delaywheel_replica.core.protocol.reschedules import MessageKey, RescheduleProposal

FRAMES_AT_ONCE: Final = 512
BYTES_AT_ONCE: Final = 4 << 20
"""How much is read for the requests of one transaction."""


@dataclass(slots=True)
class _SecondOfProposals:
    """The messages of one second that are examined together."""

    keys: frozenset[MessageKey]
    look: CancelLook
    is_whole: bool = False

    @classmethod
    def of(cls, slot: int, proposals: Mapping[MessageKey, RescheduleProposal]) -> Self:
        begins = {key.id[:BEGIN_BYTES] for key in proposals}
        return cls(frozenset(proposals), CancelLook(slot, begins, _all_looked(proposals.values())))

    @property
    def uncancelled(self) -> Collection[MessageKey]:
        if not self.is_whole:
            return ()
        return self.keys - {MessageKey(row.id, row.due_ms, row.topic) for row in self.look.rows}


class ProposalSearch:
    """Looks for cancels of messages that are to be rescheduled. For one thread."""

    def __init__(self, look_for_cancels: Callable[[CancelLook, Budget], bool]) -> None:
        """Begins without requests; a look returns whether all that is admitted was read."""
        self._look_for_cancels = look_for_cancels
        self._seconds: dict[int, _SecondOfProposals] = {}  # the next one to examine is the first

    def uncancelled(self, proposals: Sequence[RescheduleProposal]) -> list[RescheduleProposal]:
        """Returns the requests without an admitted cancel, as far as known."""
        wanted: dict[int, dict[MessageKey, RescheduleProposal]] = {}
        for proposal in proposals:
            wanted.setdefault(proposal.key.due_ms // 1000, {})[proposal.key] = proposal
        self._begin(wanted)
        budget = Budget(FRAMES_AT_ONCE, BYTES_AT_ONCE)
        found: set[MessageKey] = set()
        for slot in [slot for slot in self._seconds if slot in wanted]:
            if budget.is_spent():
                break
            # It goes to the end of the queue: a second with many cancels delays no other one.
            second = self._seconds[slot] = self._seconds.pop(slot)
            second.is_whole = self._look_for_cancels(second.look, budget)
            found.update(second.uncancelled)
        return [proposal for proposal in proposals if proposal.key in found]

    def _begin(self, wanted: Mapping[int, Mapping[MessageKey, RescheduleProposal]]) -> None:
        for slot, proposals in wanted.items():
            second = self._seconds.get(slot)
            if second is None or second.keys.isdisjoint(proposals):
                self._seconds.pop(slot, None)
                self._seconds[slot] = _SecondOfProposals.of(slot, proposals)
            elif second.is_whole and not second.keys.issuperset(proposals):
                self._seconds[slot] = _SecondOfProposals.of(slot, proposals)
        forgotten = [slot for slot in self._seconds if slot not in wanted]
        for slot in forgotten[: max(0, len(self._seconds) - MOST)]:
            del self._seconds[slot]


def _all_looked(proposals: Iterable[RescheduleProposal]) -> dict[WheelId, int]:
    """Returns up to where the server has looked for cancels of each of them."""
    first, *others = (dict(proposal.looked) for proposal in proposals)
    return {
        wheel: min(seq, *(other.get(wheel, 0) for other in others)) if others else seq
        for wheel, seq in first.items()
    }
