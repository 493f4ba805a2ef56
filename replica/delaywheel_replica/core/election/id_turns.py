"""Which of its transactional ids a leader may use, and which it inits again within its term.

The Kafka client repeats requests, and a copy may be under way when the answer comes. Copies of all
requests but one are harmless within their transaction. A copy of an EndTxn ends a later transaction
of its producer epoch in the middle. So after one that may have been repeated, and after a
transaction that was never ended, nothing follows in that epoch: the id is inited again, which
aborts what is open and fences all copies. The other ids go on meanwhile.

| id | what is known of its epoch |
|---|---|
| SOUND | no candidate that inited this id earlier can come to lead, and no copy is under way |
| LOOSE | the same, but a copy of its last EndTxn may be under way; that transaction is known |
| ABANDONED | its last transaction was not committed: open, aborted, or with copies under way |
| TAKEN | it was inited, by a candidate, or by a late copy of an init of this node's |
| RENEWING | it is being inited again |
| RENEWED | it was inited again; another candidate may have been fenced by that |

docs/PROTOCOL.md, "What the client sends again", has what leads from one to the next. Besides, an id
whose last transaction has touched a partition that takes nothing by now is ABANDONED, while another
one is SOUND or LOOSE: the next transaction would wait for that partition. A RENEWING id whose init
was fenced is TAKEN.

Why a RENEWED id has to wait. A candidate inits all ids before it marks any of them. If it inited
this one before our init, it is fenced here, and would be lost; but it may have marked it, read, led
and committed before, and we would go on from what we knew. A commit of another id, in an epoch of
before our init, shows that the candidate had not inited that one yet: so it had marked none, and
never will mark this one. If it inited this one after our init, we are fenced. That commit counts
whether it may have been repeated or not.

A TAKEN id shows no more than that somebody has inited it. A candidate inits all: the commit of
another one shows that none had come so far, and that id is ABANDONED like any other. A leader that
was replaced hears of all its ids that they are TAKEN, and inits none: it disturbs nobody.

Once no id is SOUND or LOOSE, none can vouch for the others: the term ends as after an unknown
outcome, and a candidacy finds out. If one is TAKEN, it ends as fenced.

A LOOSE id that is left alone carries no message, and nothing vouches for an init of it: if all
others were inited again and could not be, the term would last until a broker is back, and forward
nothing. So it ends, too, once it has said which ids are left out: a candidacy inits the LOOSE one,
and does without those.

Kafka keeps an id for as long as a partition that its transaction has written to takes nothing: no
init of it succeeds before the partition's broker is back. So each transaction says in the control
topic which ids are LEFT OUT, and a candidate may do without an id that it cannot init:

| id | what is committed | a candidate that cannot init it |
|---|---|---|
| SOUND, LOOSE | it is not left out | cannot lead |
| ABANDONED, RENEWING after it | it is left out, from the next transaction on | leads without |
| RENEWING after LOOSE | it is not left out | cannot lead |
| RENEWED | it is not, with the commit that vouches for it | cannot lead, from that commit on |
| of a new leader, inited, but left out | as RENEWED; as ABANDONED if LOOSE | as there |
| of a new leader, not inited | as ABANDONED: it is inited again within the term | as there |
| any, of a process that led last | it is not left out, nor may be | leads without, if it is that |
|   |   | process, and none has marked it since |

So that an outage keeps not all of them, one is reserved: as long as another is sound, it carries no
message whose partition is closed while any one of its brokers is away (`usable_at_risk`). Before
such a message goes with the last id that can vouch, that one vouches for renewed ones, and so does
the reserved one. Once an id is left out, no message goes that might cost the last one that can
vouch, or the reserved one (`is_scarce`).

Why that is safe. Whoever uses such an id again has committed with another id, after its init, that
the id is not left out. The candidate inits those others, and reads the control topic after that: if
that commit came before, it reads so, and does not lead; if not, the commit is fenced. What was open
of the id was never asked to be committed, and never will be.

The last row is for a term that has lost all its ids before it could say so. A process that has led
and leads no more has nothing under way but what ends before it can read its own marks: its last
transaction is open in the control topic until it is decided. And nobody else has led since: whoever
does without an id that is not left out marks it first, all but this process itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from delaywheel_replica.core.protocol.control import LeaderRecord, LeftOut
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState


class IdState(StrEnum):
    """What is known of an id's producer epoch."""

    SOUND = "sound"
    LOOSE = "loose"
    ABANDONED = "abandoned"
    TAKEN = "taken"
    RENEWING = "renewing"
    RENEWED = "renewed"


RESERVED = 0
"""The id that carries such messages only where no other can."""

_VOUCHING = (IdState.SOUND, IdState.LOOSE)
_NEVER_COMMITTED = (
    TransactionState.ABORTED,
    TransactionState.ABANDONED,
    TransactionState.TAKEN,
)
_AFTER = {
    TransactionState.COMMITTED_LOOSE: IdState.LOOSE,
    TransactionState.ABANDONED: IdState.ABANDONED,
    TransactionState.TAKEN: IdState.TAKEN,
}
_ONCE_ANOTHER_COMMITTED = {
    IdState.RENEWED: IdState.SOUND,
    IdState.TAKEN: IdState.ABANDONED,
}


@dataclass(frozen=True, slots=True)
class IdTurns:
    """The ids of one term; they take turns.

    Attributes:
        abandoned: Those not inited again since a transaction was not ended, or an init failed.
        unmarked: Those that this leader could not init as a candidate.
        said: Those of which it is committed, or may be, that they are left out.
        failed: Those whose last init in this term has failed, the newest last.
    """

    states: tuple[IdState, ...]
    latest: int = -1
    abandoned: frozenset[int] = frozenset()
    unmarked: frozenset[int] = frozenset()
    said: frozenset[int] = frozenset()
    failed: tuple[int, ...] = ()

    @classmethod
    def begun(
        cls,
        ids: int,
        loose: Collection[int] = (),
        *,
        without: frozenset[int] = frozenset(),
        left_out: Collection[int] = (),
    ) -> IdTurns:
        """Returns those of a new leader, of so many ids.

        Args:
            loose: The ends of their marks may have been repeated.
            without: They could not be inited.
            left_out: It is committed that they are.
        """
        # A copy of its mark's end outlasts the commit that would vouch for it.
        abandoned = without | frozenset(loose).intersection(left_out)

        def state_of(each: int) -> IdState:
            if each in abandoned:
                return IdState.ABANDONED
            if each in left_out:
                return IdState.RENEWED
            return IdState.LOOSE if each in loose else IdState.SOUND

        states = tuple(map(state_of, range(ids)))
        return cls(states, abandoned=abandoned, unmarked=without, said=frozenset(left_out))

    def __str__(self) -> str:
        return ", ".join(f"{each} {state.value}" for each, state in enumerate(self.states))

    @property
    def usable(self) -> int | None:
        """The id of the next transaction; None: there is none at present."""
        return next(iter(self._sound), None)

    @property
    def usable_at_risk(self) -> int | None:
        """The same, if that may be kept by Kafka once a broker leaves."""
        return min(self._sound, key=lambda each: each == RESERVED, default=None)

    @property
    def vouches_first(self) -> int | None:
        """The id that had better vouch for others before it is risked: none else could."""
        risked = self.usable_at_risk
        if risked is None or not self.awaits_voucher:
            return None
        return risked if risked == RESERVED or not self._has_other(risked) else None

    @property
    def _sound(self) -> list[int]:
        """Those that may be used, in their turns."""
        count = len(self.states)
        order = ((self.latest + step) % count for step in range(1, count + 1))
        return [each for each in order if self.states[each] is IdState.SOUND]

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
            ids = [each for each, known in enumerate(self.states) if known is state]
            if ids and self._has_other(ids[0]):
                return min(ids, key=self._tried)
        return None

    @property
    def left_out(self) -> LeftOut:
        """What the next transaction has to say."""
        return LeftOut(self.abandoned, self.unmarked)

    def last_marks(self, leaders: Mapping[int, LeaderRecord]) -> dict[int, str]:
        """Returns the ids that this process may do without after its term, with the tokens it read.

        Each still has to be marked with that token then.
        """
        return {each: mark.token for each, mark in leaders.items() if each not in self.said}

    @property
    def is_scarce(self) -> bool:
        """Whether ids are kept by Kafka, as far as is known, and no other one may be risked."""
        risked = self.usable_at_risk
        if risked is None or risked == RESERVED:
            return bool(self.abandoned)
        return bool(self.abandoned) and not self._has_other(risked)

    @property
    def is_lost(self) -> bool:
        """Whether no id comes to be usable in this term, as far as is known."""
        return not self._has_other() or self._is_left_alone

    @property
    def is_replaced(self) -> bool:
        """Whether, as far as is known, a candidate has inited all."""
        return not self._has_other() and IdState.TAKEN in self.states

    @property
    def _is_left_alone(self) -> bool:
        """Whether one LOOSE id is left, the others cannot be inited, and that is said."""
        loose = self.voucher
        if loose is None or self.awaits_voucher or self._has_other(loose):
            return False
        others = frozenset(range(len(self.states))) - {loose}
        return bool(others) and others.issubset(self.failed) and self.abandoned <= self.said

    def ended(self, number: int, verdict: TransactionState) -> IdTurns:
        """Returns what follows from a transaction."""
        states = [*self.states]
        if verdict.is_committed:
            states = [_ONCE_ANOTHER_COMMITTED.get(state, state) for state in states]
        states[number] = _AFTER.get(verdict, states[number])
        abandoned, said = self.abandoned, self.said
        if verdict.is_committed:
            said = abandoned
        elif verdict not in _NEVER_COMMITTED:
            said |= abandoned
        if states[number] in {IdState.ABANDONED, IdState.TAKEN}:
            abandoned |= {number}
        return replace(self, states=tuple(states), latest=number, abandoned=abandoned, said=said)

    def kept(self, number: int) -> IdTurns:
        """Returns what follows when Kafka cannot write the markers of a committed transaction.

        The last id that could vouch for others is used all the same.
        """
        if self.states[number] not in _VOUCHING or not self._has_other(number):
            return self
        left = self._with(number, IdState.ABANDONED)
        return replace(left, abandoned=self.abandoned | {number})

    def renewing(self, number: int) -> IdTurns:
        """Returns what follows when an id begins to be inited again."""
        return self._with(number, IdState.RENEWING)

    def renewed(self, number: int, verdict: TransactionState) -> IdTurns:
        """Returns what follows when that has ended; it counts from the next transaction on."""
        failed = tuple(each for each in self.failed if each != number)
        if verdict is TransactionState.CONTINUE:
            done = self._with(number, IdState.RENEWED)
            return replace(done, abandoned=self.abandoned - {number}, failed=failed)
        is_taken = verdict is TransactionState.FENCED
        left = self._with(number, IdState.TAKEN if is_taken else IdState.ABANDONED)
        return replace(left, abandoned=self.abandoned | {number}, failed=(*failed, number))

    def _tried(self, number: int) -> int:
        """Orders ids by when their inits failed: one that fails at once holds up no other."""
        return self.failed.index(number) if number in self.failed else -1

    def _first(self, state: IdState) -> int | None:
        return self.states.index(state) if state in self.states else None

    def _has_other(self, number: int | None = None) -> bool:
        """Whether an id can vouch for this one; None: for any."""
        return any(s in _VOUCHING for each, s in enumerate(self.states) if each != number)

    def _with(self, number: int, state: IdState) -> IdTurns:
        states = (*self.states[:number], state, *self.states[number + 1 :])
        return replace(self, states=states)
