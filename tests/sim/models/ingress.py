"""Models one or two records of an ingress partition, two nodes that lead in turn or at once.

The real `Intake` plans, with the real parsing of headers. All else is minimal: a wheel is the
messages that W members hold, its seconds are finished as a whole, and time advances in seconds. At
any time a node takes the lead from one that does not know it yet; a transaction is committed
unnoticed, or is not; a server takes a record and its answer is lost, or never gets it, or takes
nothing, upon which the announcement may be withdrawn; seals move with the clock, except those of a
node that leads.

What could be wrong with a state:

- a record was delivered twice, or before its due;
- its offset is committed, and it was neither delivered nor is it held: it is lost;
- it became a dead letter, though nothing is wrong with it.

What a term does follows from what it knows and from few things beside: each is asked of the real
`Intake` once, and remembered with the term.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar, cast

from delaywheel import ingress
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.ingress.moment import Moment, RequestKind, TransactionRoom
from delaywheel_replica.core.ingress.partition import Intake
from delaywheel_replica.core.ingress.place import IngressPlace
from delaywheel_replica.core.ingress.reading import CommittedRecord, Delayed, IngressRules
from delaywheel_replica.core.ingress.underway import (
    Forwarded,
    RecordAnswer,
    RecordUnderWay,
    Rejected,
)
from delaywheel_replica.core.protocol.control import IngressRecord

T = TypeVar("T")

NODES = ("a", "b")
LATE_WINDOW = 1
OFFSETS = (0, 2)
"""Records between them were aborted."""
END = 3
DUES = (1, 2)
RULES = IngressRules({}, 1_000, frozenset())

Message = tuple[int, int]
"""The offset of the record it was made of, and the slot of its due."""


class Planned(NamedTuple):
    """What a term's next transaction carries for its partition.

    Attributes:
        control: the control record that it commits.
        out: messages that it forwards directly, not through a wheel.
        dead: offsets of its dead letters.
        bound: the bound of the floor.
        takes_back: whether it withdraws announcements.
        term: the term that knows it is committed.
    """

    control: tuple[int, SeqSet]
    out: tuple[Message, ...]
    dead: frozenset[int]
    bound: int | None
    takes_back: bool
    term: Term


@dataclass(frozen=True)
class Term:
    """One leadership as a value: two with the same knowledge are equal.

    Attributes:
        epoch: the leader's epoch.
        intake: what it knows; never changed.
        key: identifies the term's knowledge.
        found: results computed from it, by the other inputs they depend on.
    """

    epoch: int
    intake: Intake = field(compare=False)
    key: tuple[object, ...]
    found: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, epoch: int, intake: Intake) -> Term:
        """A term with its present knowledge."""
        key = (
            intake.position,
            _committed(intake.record),
            tuple(
                (each.offset, each.stage, each.answer, each.perhaps_held) for each in intake._taken
            ),
        )
        return cls(epoch, intake, key)

    @cached_property
    def bound(self) -> int | None:
        """The bound of the floor, and of the seals of its own wheel."""
        return self.intake.bound()

    def once(self, what: Hashable, find: Callable[[], T]) -> T:
        """Computes something that depends on the term and on `what` alone; cached."""
        if what not in self.found:
            self.found[what] = find()
        return cast("T", self.found[what])


class State(NamedTuple):
    """The whole state.

    Attributes:
        now: the second that all clocks show.
        control: what is committed of the partition: the next offset, and the announced ones.
        floor: seconds below it are forgotten.
        epoch: the latest leader's epoch.
        terms: the term of each node; None: it does not lead.
        begins: how many terms may still begin.
        wheels: for each node, the messages that W members hold.
        seals: the seal of each node's wheel.
        done: messages delivered out of wheels, until they are forgotten.
        delivered: how often each record was delivered.
        dead: offsets of dead letters.
        wrong: what went wrong.
    """

    now: int
    control: tuple[int, SeqSet]
    floor: int
    epoch: int
    terms: tuple[Term | None, ...]
    begins: int
    wheels: tuple[frozenset[Message], ...]
    seals: tuple[int, ...]
    done: frozenset[Message] = frozenset()
    delivered: tuple[int, ...] = (0,) * len(OFFSETS)
    dead: frozenset[int] = frozenset()
    wrong: str | None = None


@dataclass(frozen=True)
class IngressModel:
    """The model of one size.

    Attributes:
        records: the number of records.
        begins: limit for the number of terms.
        seconds: how long time advances.
        due_by_clock: dues count from when a record is read, which is wrong.
    """

    records: int = 1
    begins: int = 2
    seconds: int = 4
    due_by_clock: bool = False
    _terms: dict[Hashable, Term] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    @property
    def start(self) -> State:
        """Begins with unread records."""
        nothing: tuple[frozenset[Message], ...] = (frozenset(),) * len(NODES)
        return State(
            now=0,
            control=(0, NO_SEQS),
            floor=-LATE_WINDOW,
            epoch=0,
            terms=(None,) * len(NODES),
            begins=self.begins,
            wheels=nothing,
            seals=(-LATE_WINDOW,) * len(NODES),
        )

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields every possible move; its name says how the node stood before it."""
        return ((move, _in_order(after)) for move, after in self._moves(state))

    def _moves(self, state: State) -> Iterator[tuple[str, State]]:
        if state.now < self.seconds:
            yield "a second passes", state._replace(now=state.now + 1)
        for index, name in enumerate(NODES):
            sealed = self._seals(state, index)
            if sealed != state:
                yield f"{name} seals", sealed
            if state.begins:
                yield f"{name} takes the lead", self._begins(state, index)
            term = state.terms[index]
            if term is not None:
                for move, after in self._leads(state, index, term):
                    if after != state:
                        yield f"{name} {move}", after

    def wrong(self, state: State) -> str | None:
        """Returns what is wrong with a state."""
        if state.wrong is not None:
            return state.wrong
        held = {offset for wheel in state.wheels for offset, _ in wheel}
        for number, offset in enumerate(OFFSETS[: self.records]):
            if state.delivered[number] > 1:
                return f"{offset} was delivered twice"
            is_settled = offset < state.control[0]
            if is_settled and not state.delivered[number] and offset not in held | state.dead:
                return f"{offset} is lost"
        return "a dead letter" if state.dead else None

    def _begins(self, state: State, index: int) -> State:
        record = IngressRecord("topic", *state.control, RULES.levels_ms)
        term = self._term(state.epoch + 1, Intake(record, RULES))
        state = state._replace(epoch=state.epoch + 1, begins=state.begins - 1)
        return state._replace(terms=_put(state.terms, index, term))

    def _seals(self, state: State, index: int) -> State:
        """Moves seals as far as the clock and the node's own term allow."""
        term = state.terms[index]
        slot = state.now - LATE_WINDOW
        if term is not None:
            slot = _bounded(slot, term.bound)
        return state._replace(seals=_put(state.seals, index, max(slot, state.seals[index])))

    def _leads(self, state: State, index: int, term: Term) -> Iterator[tuple[str, State]]:
        yield "reads", _with(state, index, self._reads(term, state.now))
        yield from self._hands(state, index, term)
        if term.epoch == state.epoch:
            mosts: tuple[dict[RequestKind, int], ...] = ({}, {Delayed: 0})
            for most in mosts:
                planned = self._plans(term, state, most)
                if most and not planned.takes_back:
                    continue
                after = _transacted(state, planned)
                name = "commits, taking back" if most else "commits"
                yield f"{name}, and nobody hears", _with(after, index, None)
                yield name, _with(after, index, planned.term)
            if term.bound and term.bound < state.seals[index]:
                yield (
                    "opens a new wheel",
                    state._replace(seals=_put(state.seals, index, state.floor)),
                )

    def _reads(self, term: Term, now: int) -> Term:
        base = now if self.due_by_clock else 0

        def read() -> Term:
            intake = _copied(term.intake)
            for number, offset in enumerate(OFFSETS[: self.records]):
                if offset >= intake.position:
                    headers = [
                        (ingress.TOPIC, b"t"),
                        (ingress.DELAY_MS, b"%d" % (DUES[number] * 1000)),
                    ]
                    place = IngressPlace("ingress", 0, offset)
                    intake.read(
                        [CommittedRecord(place, base * 1000, None, None, headers)], offset + 1
                    )
                    return self._term(term.epoch, intake)
            intake.read([], END)
            return self._term(term.epoch, intake)

        return term.once(("reads", base), read)

    def _hands(self, state: State, index: int, term: Term) -> Iterator[tuple[str, State]]:
        """Hands over the first record that waits; a second one follows when that is held."""

        def answered(answer: RecordAnswer) -> State:
            return _with(state, index, self._answered(term, answer))

        message = term.once("hands", lambda: _handed(term))
        if message is None:
            return
        if message[1] < state.seals[index]:
            yield f"hands {message}, sealed", answered(RecordAnswer.SEALED)
            return
        wheels = _put(state.wheels, index, state.wheels[index] | {message})
        yield f"hands {message}", answered(RecordAnswer.HELD)._replace(wheels=wheels)
        lost = answered(RecordAnswer.UNKNOWN)
        yield f"hands {message}, hears nothing", lost._replace(wheels=wheels)
        yield f"hands {message}, in vain", lost
        yield f"hands {message}, refused", answered(RecordAnswer.NOT_NOW)

    def _answered(self, term: Term, answer: RecordAnswer) -> Term:
        def answered() -> Term:
            intake = _copied(term.intake)
            (taken,) = intake.to_hand(TransactionRoom(1))
            intake.answered(taken, answer)
            return self._term(term.epoch, intake)

        return term.once(answer, answered)

    def _plans(self, term: Term, state: State, most: Mapping[RequestKind, int]) -> Planned:
        def planned() -> Planned:
            intake = _copied(term.intake)
            moment = Moment(
                now_ms=state.now * 1000,
                least_slot=state.now - LATE_WINDOW + 1,
                span_end_ms=10**9,
                floor=state.floor,
                most=most,
            )
            step = intake.plan(moment, room=TransactionRoom(9))
            out = [_message(each.taken) for each in step.settled if isinstance(each, Forwarded)]
            dead = frozenset(
                each.taken.offset for each in step.settled if isinstance(each, Rejected)
            )
            bound, takes_back = intake.bound(step), bool(step.taken_back)
            intake.committed(step)
            after = self._term(term.epoch, intake)
            return Planned(_committed(step.record), tuple(out), dead, bound, takes_back, after)

        return term.once(("plans", state.now, state.floor, bool(most)), planned)

    def _term(self, epoch: int, intake: Intake) -> Term:
        """Merges terms with the same knowledge, also of details outside of their keys."""
        term = Term.of(epoch, intake)
        requests = tuple((each.request, each.record) for each in intake._taken)
        known = (term, intake._inherited, repr(requests))
        return self._terms.setdefault(known, term)


def _in_order(state: State) -> State:
    """Which of the two nodes is which does not matter."""
    (first, second), (left, right) = state.terms, state.seals
    one = (first.epoch if first else 0, left)
    other = (second.epoch if second else 0, right)
    if one < other or (one == other and sorted(state.wheels[0]) <= sorted(state.wheels[1])):
        return state
    return state._replace(
        terms=state.terms[::-1], wheels=state.wheels[::-1], seals=state.seals[::-1]
    )


def _transacted(state: State, planned: Planned) -> State:
    """Returns the state once a transaction is committed, which its leader does not know yet."""
    counts, wrong = list(state.delivered), state.wrong
    due = {
        message
        for wheel in state.wheels
        for message in wheel
        if message[1] <= state.now and message not in state.done
    }
    for offset, slot in [*planned.out, *due]:
        counts[OFFSETS.index(offset)] += 1
        if slot > state.now:
            wrong = f"{offset} was early"
    floor = _bounded(min(state.now - LATE_WINDOW, *state.seals), planned.bound)
    floor = max(floor, state.floor)
    return state._replace(
        control=planned.control,
        floor=floor,
        done=_kept(state.done | due, floor),
        wheels=tuple(_kept(wheel, floor) for wheel in state.wheels),
        delivered=tuple(counts),
        dead=state.dead | planned.dead,
        wrong=wrong,
    )


def _handed(term: Term) -> Message | None:
    handed = _copied(term.intake).to_hand(TransactionRoom(1))
    return _message(handed[0]) if handed else None


def _copied(intake: Intake) -> Intake:
    copy = Intake(intake.record, RULES)
    copy.position = intake.position
    copy._inherited = intake._inherited
    copy._taken = deque(replace(each) for each in intake._taken)
    return copy


def _with(state: State, index: int, term: Term | None) -> State:
    return state._replace(terms=_put(state.terms, index, term))


def _message(taken: RecordUnderWay) -> Message:
    assert isinstance(taken.request, Delayed)
    return taken.offset, taken.request.due_ms // 1000


def _committed(record: IngressRecord) -> tuple[int, SeqSet]:
    return record.next_offset, record.announced


def _bounded(slot: int, bound: int | None) -> int:
    """FROZEN lies below every slot of a real clock; here slots begin at 0."""
    if bound is None:
        return slot
    return -LATE_WINDOW if bound == 0 else min(slot, bound)


def _kept(messages: frozenset[Message], floor: int) -> frozenset[Message]:
    return frozenset(message for message in messages if message[1] >= floor)


def _put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])
