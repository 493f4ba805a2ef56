"""A record or two of an ingress partition, two nodes that lead in turn or at once, and any trouble.

The real `Intake` plans, with the real meaning of headers. Around it all is minimal: a wheel is the
messages that W members hold, a second of it is done as a whole, and time goes by in seconds. What
may happen at any time: a node takes the lead over one that does not know it yet; a transaction is
committed and nobody hears of it, or is not; a server takes a record and its answer is lost, or
never gets it, or takes nothing, upon which the announcement may be taken back; seals move with the
clock, but for those of a node that leads.

What could be wrong with a state:

- a record was delivered twice, or before its due;
- its offset is committed, and it was neither delivered nor is it held: it is lost;
- it became a dead letter, though nothing is wrong with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from delaywheel import ingress
from delaywheel.seqset import NO_SEQS, SeqSet
from delaywheel_replica.core.ingress.moment import Kind, Moment
from delaywheel_replica.core.ingress.partition import Intake
from delaywheel_replica.core.ingress.place import Place
from delaywheel_replica.core.ingress.reading import Delayed, Incoming, Rules
from delaywheel_replica.core.ingress.underway import Answer, Dies, Goes, IntakeStep, Taken
from delaywheel_replica.core.protocol.control import IngressRecord

T = TypeVar("T")

NODES = ("a", "b")
LATE_WINDOW = 1
OFFSETS = (0, 2)
"""What lies between them was aborted."""
END = 3
DUES = (1, 2)
RULES = Rules({}, 1_000, frozenset())

Message = tuple[int, int]
"""The offset of the record that it was made of, and the slot of its due."""


@dataclass(frozen=True)
class Term:
    """One leadership as a value: two that know the same are alike."""

    epoch: int
    intake: Intake = field(compare=False)
    key: tuple[object, ...]

    @classmethod
    def of(cls, epoch: int, intake: Intake) -> Term:
        """A term with what it knows now."""
        key = (
            intake.position,
            _committed(intake.record),
            tuple(
                (each.offset, each.stage, each.answer, each.perhaps_held) for each in intake._taken
            ),
        )
        return cls(epoch, intake, key)


class State(NamedTuple):
    """Everything.

    Attributes:
        now: the second that all clocks show.
        control: what is committed of the partition: the next offset, and what is announced.
        floor: seconds below are forgotten.
        epoch: of the newest leader.
        terms: of each node; None: it does not lead.
        begins: so many terms may still begin.
        wheels: of each node what W members hold.
        seals: of each node's wheel.
        done: what was delivered out of wheels, while it is not forgotten.
        delivered: how often each record was.
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
        records: how many were sent.
        begins: how many terms there are at most.
        seconds: for how long time goes on.
        due_by_clock: dues count from when a record is read, as they must not.
    """

    records: int = 1
    begins: int = 2
    seconds: int = 4
    due_by_clock: bool = False

    @property
    def start(self) -> State:
        """Two records were sent, and nobody has read them."""
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
        """Everything that may happen next."""
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
        """What is wrong with a state."""
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
        term = Term.of(state.epoch + 1, Intake(record, RULES))
        state = state._replace(epoch=state.epoch + 1, begins=state.begins - 1)
        return state._replace(terms=_put(state.terms, index, term))

    def _seals(self, state: State, index: int) -> State:
        """As far as the clock lets it, and the term of the node itself, if it has one."""
        term = state.terms[index]
        slot = state.now - LATE_WINDOW
        if term is not None:
            slot = _bounded(slot, term.intake.bound())
        return state._replace(seals=_put(state.seals, index, max(slot, state.seals[index])))

    def _leads(self, state: State, index: int, term: Term) -> Iterator[tuple[str, State]]:
        yield "reads", self._reads(state, index, term)
        yield from self._hands(state, index, term)
        if term.epoch == state.epoch:
            mosts: tuple[dict[Kind, int], ...] = ({}, {Delayed: 0})
            for most in mosts:
                after, intake, step = self._transacts(state, term, most)
                if most and not step.taken_back:
                    continue
                name = "commits, taking back" if most else "commits"
                yield (
                    f"{name}, and nobody hears",
                    after._replace(terms=_put(state.terms, index, None)),
                )
                intake.committed(step)
                yield name, _with(after, index, term, intake)
            bound = term.intake.bound()
            if bound and bound < state.seals[index]:
                yield (
                    "opens a new wheel",
                    state._replace(seals=_put(state.seals, index, state.floor)),
                )

    def _reads(self, state: State, index: int, term: Term) -> State:
        intake = _copied(term.intake)
        base = state.now if self.due_by_clock else 0
        for number, offset in enumerate(OFFSETS[: self.records]):
            if offset >= intake.position:
                headers = [
                    (ingress.TOPIC, b"t"),
                    (ingress.DELAY_MS, b"%d" % (DUES[number] * 1000)),
                ]
                place = Place("ingress", 0, offset)
                intake.read([Incoming(place, base * 1000, None, None, headers)], offset + 1)
                return _with(state, index, term, intake)
        intake.read([], END)
        return _with(state, index, term, intake)

    def _hands(self, state: State, index: int, term: Term) -> Iterator[tuple[str, State]]:
        """The first record that waits for it; a second one has its turn when that is held."""

        def answered(answer: Answer) -> State:
            intake = _copied(term.intake)
            (taken,) = intake.to_hand(1)
            intake.answered(taken, answer)
            return _with(state, index, term, intake)

        handed = _copied(term.intake).to_hand(1)
        if not handed:
            return
        message = _message(handed[0])
        if message[1] < state.seals[index]:
            yield f"hands {message}, sealed", answered(Answer.SEALED)
            return
        wheels = _put(state.wheels, index, state.wheels[index] | {message})
        yield f"hands {message}", answered(Answer.HELD)._replace(wheels=wheels)
        lost = answered(Answer.UNKNOWN)
        yield f"hands {message}, hears nothing", lost._replace(wheels=wheels)
        yield f"hands {message}, in vain", lost
        yield f"hands {message}, refused", answered(Answer.NOT_NOW)

    def _transacts(
        self, state: State, term: Term, most: Mapping[Kind, int]
    ) -> tuple[State, Intake, IntakeStep]:
        """The state once its transaction is committed; what it does not know yet; and the step."""
        intake = _copied(term.intake)
        moment = Moment(
            now_ms=state.now * 1000,
            least_slot=state.now - LATE_WINDOW + 1,
            span_end_ms=10**9,
            floor=state.floor,
            most=most,
        )
        step = intake.plan(moment, room=9)
        counts, wrong = list(state.delivered), state.wrong
        out = [_message(each.taken) for each in step.settled if isinstance(each, Goes)]
        dead = {each.taken.offset for each in step.settled if isinstance(each, Dies)}
        due = {
            message
            for wheel in state.wheels
            for message in wheel
            if message[1] <= state.now and message not in state.done
        }
        for offset, slot in [*out, *due]:
            counts[OFFSETS.index(offset)] += 1
            if slot > state.now:
                wrong = f"{offset} was early"
        floor = _bounded(min(state.now - LATE_WINDOW, *state.seals), intake.bound(step))
        floor = max(floor, state.floor)
        after = state._replace(
            control=_committed(step.record),
            floor=floor,
            done=_kept(state.done | due, floor),
            wheels=tuple(_kept(wheel, floor) for wheel in state.wheels),
            delivered=tuple(counts),
            dead=state.dead | dead,
            wrong=wrong,
        )
        return after, intake, step


def _copied(intake: Intake) -> Intake:
    copy = Intake(intake.record, RULES)
    copy.position = intake.position
    copy._inherited = intake._inherited
    copy._taken = deque(replace(each) for each in intake._taken)
    return copy


def _with(state: State, index: int, term: Term, intake: Intake) -> State:
    return state._replace(terms=_put(state.terms, index, Term.of(term.epoch, intake)))


def _message(taken: Taken) -> Message:
    assert isinstance(taken.wish, Delayed)
    return taken.offset, taken.wish.due_ms // 1000


def _committed(record: IngressRecord) -> tuple[int, SeqSet]:
    return record.next_offset, record.announced


def _bounded(slot: int, bound: int | None) -> int:
    """REST lies below every slot of a real clock; here slots begin at 0."""
    if bound is None:
        return slot
    return -LATE_WINDOW if bound == 0 else min(slot, bound)


def _kept(messages: frozenset[Message], floor: int) -> frozenset[Message]:
    return frozenset(message for message in messages if message[1] >= floor)


def _put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])
