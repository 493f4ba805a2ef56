"""Which of its transactional ids a leader may use, and which it inits again within its term.

The Kafka client repeats requests, and a copy may be under way when the answer comes. Copies of all
requests but one are harmless within their transaction: records have sequence numbers, a partition
is added once, an init only fences. A copy of an EndTxn ends a later transaction of its producer
epoch in the middle. So after one that may have been repeated, and after a transaction that was
never ended, nothing follows in that epoch: the id is inited again, which aborts what is open and
fences all copies. The other ids go on meanwhile.

| id | what is known of its epoch |
|---|---|
| SOUND | no candidate that inited this id earlier can come to lead, and no copy is under way |
| LOOSE | the same, but a copy of its last EndTxn may be under way; that transaction is known |
| ABANDONED | its last transaction was not committed: open, aborted, or with copies under way |
| RENEWING | it is being inited again |
| RENEWED | it was inited again; another candidate may have been fenced by that |

| id | transaction | next |
|---|---|---|
| SOUND | any | SOUND; LOOSE if its end may have been repeated; ABANDONED if it was not ended |
| LOOSE | of one record: there is nothing to tear | the same |
| LOOSE, ABANDONED | none | RENEWING, while another id is SOUND or LOOSE |
| RENEWING | none | RENEWED; ABANDONED if the init has failed |
| RENEWED | none | SOUND once another id has committed after the init |

Why a RENEWED id has to wait. A candidate inits all ids before it marks any of them. If it inited
this one before our init, it is fenced here, and would be lost; but it may have marked it, read, led
and committed before, and we would go on from what we knew. A commit of another id, in an epoch of
before our init, shows that the candidate had not inited that one yet: so it had marked none, and
never will mark this one. If it inited this one after our init, we are fenced. That commit counts
whether it may have been repeated or not.

Once no id is SOUND or LOOSE, none can vouch for the others: the term ends as after an unknown
outcome, and a candidacy finds out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState


class IdState(StrEnum):
    """What is known of an id's producer epoch."""

    SOUND = "sound"
    LOOSE = "loose"
    ABANDONED = "abandoned"
    RENEWING = "renewing"
    RENEWED = "renewed"


_VOUCHING = (IdState.SOUND, IdState.LOOSE)
_AFTER = {
    TransactionState.COMMITTED_LOOSE: IdState.LOOSE,
    TransactionState.ABANDONED: IdState.ABANDONED,
}


@dataclass(frozen=True, slots=True)
class IdTurns:
    """The ids of one term; they take turns."""

    states: tuple[IdState, ...]
    latest: int = -1

    @classmethod
    def begun(cls, ids: int, loose: Collection[int] = ()) -> IdTurns:
        """Returns those of a new leader; ends of some marks may have been repeated."""
        kinds = (IdState.LOOSE if each in loose else IdState.SOUND for each in range(ids))
        return cls(tuple(kinds))

    @property
    def usable(self) -> int | None:
        """The id of the next transaction; None: there is none at present."""
        count = len(self.states)
        order = ((self.latest + step) % count for step in range(1, count + 1))
        return next((each for each in order if self.states[each] is IdState.SOUND), None)

    @property
    def voucher(self) -> int | None:
        """The id that may commit one record, for want of a usable one."""
        return None if self.usable is not None else self._first(IdState.LOOSE)

    @property
    def awaits_voucher(self) -> bool:
        """Whether an id will be usable once another has committed."""
        return IdState.RENEWED in self.states

    @property
    def to_renew(self) -> int | None:
        """The id that should be inited again now."""
        for state in (IdState.ABANDONED, IdState.LOOSE):
            each = self._first(state)
            if each is not None and self._has_other(each):
                return each
        return None

    @property
    def is_lost(self) -> bool:
        """Whether no id can vouch for another."""
        return not any(state in _VOUCHING for state in self.states)

    def ended(self, number: int, verdict: TransactionState) -> IdTurns:
        """Returns what follows from a transaction."""
        states = [*self.states]
        if verdict.is_committed:
            states = [_vouched_for(state) for state in states]
        states[number] = _AFTER.get(verdict, states[number])
        return replace(self, states=tuple(states), latest=number)

    def renewing(self, number: int) -> IdTurns:
        """Returns what follows when an id begins to be inited again."""
        return self._with(number, IdState.RENEWING)

    def renewed(self, number: int, *, is_ready: bool) -> IdTurns:
        """Returns what follows when that has ended; it counts from the next transaction on."""
        return self._with(number, IdState.RENEWED if is_ready else IdState.ABANDONED)

    def _first(self, state: IdState) -> int | None:
        return self.states.index(state) if state in self.states else None

    def _has_other(self, number: int) -> bool:
        return any(s in _VOUCHING for each, s in enumerate(self.states) if each != number)

    def _with(self, number: int, state: IdState) -> IdTurns:
        states = (*self.states[:number], state, *self.states[number + 1 :])
        return replace(self, states=states)


def _vouched_for(state: IdState) -> IdState:
    return IdState.SOUND if state is IdState.RENEWED else state
