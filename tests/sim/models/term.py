"""Models two candidates, two transactional ids and brokers that act at any time.

The candidates are the real election machine, with the real meaning of what the library reports
(`VERDICTS`). Kafka is minimal: who inited each id last, and the log of the control topic with the
messages in it. A leader moves progress on by one with each transaction, its ids taking turns: a
message, and then the progress that takes account of it.

A leader inits an id again within its term (core/election/id_turns.py), and goes on with the other.
It says meanwhile that the id is left out: a candidate whose init of it is held, whether Kafka has
carried it out or not, does without. One whose node led last does so too where nobody has said it.

Requests that a node no longer waits for stay around, to be carried out at any time
or never: inits, records, and ends of transactions, because the node gave up, or because the library
sent one twice and the second copy was faster.

What could be wrong with a state:

- a message is visible without its progress: it will be forwarded again;
- a message is visible twice;
- progress is committed by a leader that did not know the previous progress: both have forwarded
  what lies between;
- a leader stands still: though Kafka answers from now on, but for the inits of ids that it keeps,
  no id ever comes to be usable, and the term does not end either.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, TypeVar

from delaywheel_replica.core.election.events import (
    IN_TERM,
    BecomeLeader,
    CommitMark,
    ControlRead,
    DestroyProducers,
    Effect,
    ElectionPhase,
    ElectionTick,
    Event,
    IdleCommit,
    InitFailed,
    InitProducers,
    InitsDone,
    MarkReport,
    ReadControl,
    TransactionReport,
)
from delaywheel_replica.core.election.id_turns import IdState, IdTurns
from delaywheel_replica.core.election.machine import (
    IDLE_COMMIT_MS,
    MAX_SILENCE_MS,
    Election,
    ElectionConfig,
)
from delaywheel_replica.core.protocol.control import ControlState, LeaderRecord, LeftOut
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.transaction_outcomes import (
    VERDICTS,
    Call,
    LibraryAnswer,
    TransactionState,
)

T = TypeVar("T")

IDS = 2
NAMES = ("a", "b")
ROUNDS = 4
"""In so many rounds of inits, each with a commit behind it, a leader comes to a usable id."""


class Kind(Enum):
    """The kind of a record in the log."""

    MARK = "mark"
    MESSAGE = "message"
    PROGRESS = "progress"
    LEFT_OUT = "left out"
    NOTHING = "nothing"


class Record(NamedTuple):
    """A record of the log, of a transaction of id `number`.

    Attributes:
        value: A token, a message, a progress, or the ids that are left out.
    """

    number: int
    kind: Kind
    value: str | int | frozenset[int]
    is_committed: bool = False


class Request(NamedTuple):
    """An init (`Call.INIT`), a record (`Call.PRODUCE`), or the end of a transaction."""

    call: Call
    number: int
    epoch: str
    record: Record | None = None


class Kafka(NamedTuple):
    """What Kafka knows.

    Attributes:
        owners: for each id, its producer epoch, which says who inited it last.
        marks: for each id, the latest readable mark.
        newest: the index of the latest mark of all.
        progress: the readable progress.
        messages: how many messages are readable.
        left_out: the ids that are left out, by what is readable.
        tail: the log from the first open transaction on, which no reader sees.
        late: requests that no node waits for.
        wrong: what went wrong.
    """

    owners: tuple[str, ...] = ("",) * IDS
    marks: tuple[str, ...] = ("",) * IDS
    newest: int = 0
    progress: int = 0
    messages: int = 0
    left_out: frozenset[int] = frozenset()
    tail: tuple[Record, ...] = ()
    late: frozenset[Request] = frozenset()
    wrong: str | None = None

    def carry_out(self, request: Request) -> tuple["Kafka", LibraryAnswer]:
        """Carries out a request that may be late."""
        if request.call is Call.INIT:
            owners = _put(self.owners, request.number, request.epoch)
            return self._replace(owners=owners).dropped(request.number), LibraryAnswer.OK
        if self.owners[request.number] != request.epoch:
            return self, LibraryAnswer.FENCED
        mine = [r for r in self.tail if r.number == request.number and not r.is_committed]
        if request.record is not None:  # taken by a transaction that is open, by no other
            return self._replace(tail=(*self.tail, request.record)) if mine else self, _OK
        wrong = self.wrong
        if mine and mine[0].kind is Kind.MESSAGE and mine[-1].kind is not Kind.PROGRESS:
            wrong = f"message {mine[0].value} is visible, and its progress is not"
        tail = tuple(r._replace(is_committed=True) if r in mine else r for r in self.tail)
        return self._replace(tail=tail, wrong=wrong)._stable(), LibraryAnswer.OK

    def dropped(self, number: int) -> "Kafka":
        """Aborts what is open of an id."""
        left = tuple(r for r in self.tail if r.number != number or r.is_committed)
        return self._replace(tail=left)._stable()

    def produce(self, record: Record, epoch: str) -> tuple["Kafka", LibraryAnswer]:
        """Adds a record of a transaction; begins one if there is none."""
        if self.owners[record.number] != epoch:
            return self, LibraryAnswer.FENCED
        if record.kind is Kind.NOTHING:  # all of its transaction: visible or not, it is the same
            return self, LibraryAnswer.OK
        return self._replace(tail=(*self.tail, record)), LibraryAnswer.OK

    def _stable(self) -> "Kafka":
        """Makes everything before the first open transaction readable."""
        kafka = self
        while kafka.tail and kafka.tail[0].is_committed:
            kafka = kafka._replace(tail=kafka.tail[1:])._read(kafka.tail[0])
        return kafka

    def _read(self, record: Record) -> "Kafka":
        match record.kind, record.value:
            case Kind.MARK, str(token):
                marks = _put(self.marks, record.number, token)
                return self._replace(marks=marks, newest=record.number)
            case Kind.MESSAGE, int(message) if message != self.messages + 1:
                wrong = f"message {message} is visible after message {self.messages}"
                return self._replace(wrong=self.wrong or wrong)
            case Kind.MESSAGE, int(message):
                return self._replace(messages=message)
            case Kind.PROGRESS, int(progress):
                wrong = f"progress {progress} is committed over {self.progress}"
                is_next = progress == self.progress + 1
                return self._replace(
                    progress=progress, wrong=self.wrong or (None if is_next else wrong)
                )
            case Kind.LEFT_OUT, frozenset() as ids:
                return self._replace(left_out=ids)
        return self


@dataclass(frozen=True)
class Machine:
    """An election machine as a value: times apart, two in the same state are equal."""

    election: Election = field(compare=False)
    now_ms: int = field(compare=False)
    key: tuple[object, ...]

    @classmethod
    def of(cls, election: Election, now_ms: int) -> "Machine":
        """The machine as it is now."""
        key = (
            election.phase,
            election.token,
            election._mark,
            election._candidacies,
            election._without,
            tuple(sorted(election._last_marks.items())),
        )
        return cls(election, now_ms, key)

    def step(self, event: Event) -> tuple["Machine", list[Effect]]:
        """The machine after an event, and the effect that it wants."""
        election = copy(self.election)
        effects = election.step(event)
        return Machine.of(election, event.now_ms), effects


class Candidate(NamedTuple):
    """One node.

    Attributes:
        machine: its election machine.
        effect: what it is about to carry out; None: nothing.
        to_init: the ids that are not inited yet.
        without: the ids whose inits are held.
        left_out: the ids that are left out, as it knows.
        marks: the marks of its term, as it read them.
        last_marks: ids that it may do without, as it led last, and their marks.
        produced: records of its transaction that Kafka has taken.
        known: the progress that it knows.
        epochs: the producer epoch of each of its ids; none: that of its candidacy.
        loose: the marks whose ends may have been repeated.
        turns: which ids it may use.
        renewal: the init of an id within its term that Kafka has not carried out.
    """

    machine: Machine
    effect: InitProducers | CommitMark | ReadControl | IdleCommit | None = None
    to_init: frozenset[int] = frozenset()
    without: frozenset[int] = frozenset()
    left_out: frozenset[int] = frozenset()
    marks: tuple[str, ...] = ()
    last_marks: tuple[tuple[int, str], ...] = ()
    produced: int = 0
    known: int = 0
    epochs: tuple[str, ...] = ("",) * IDS
    loose: frozenset[int] = frozenset()
    turns: IdTurns = IdTurns.begun(IDS)
    renewal: Request | None = None

    @property
    def token(self) -> str:
        """The token of its candidacy."""
        return self.machine.election.token

    @property
    def number(self) -> int | None:
        """The id of its transaction; None: it has none to use."""
        if isinstance(self.effect, CommitMark):
            return self.effect.index
        return self.turns.voucher if self.turns.usable is None else self.turns.usable

    @property
    def waits_for_id(self) -> bool:
        """Whether it leads, and has no id to use at present."""
        return self.machine.election.phase in IN_TERM and self.turns.usable is None

    def epoch(self, number: int) -> str:
        """The producer epoch of one of its ids."""
        return self.epochs[number] or self.token

    def records(self, number: int) -> tuple[Record, ...]:
        """The records of its transaction."""
        if isinstance(self.effect, CommitMark):
            return (Record(number, Kind.MARK, self.token),)
        left_out = self.turns.left_out.ids
        said = () if left_out == self.left_out else (Record(number, Kind.LEFT_OUT, left_out),)
        if self.turns.usable is None:
            return said or (Record(number, Kind.NOTHING, 0),)
        following = self.known + 1
        return (
            Record(number, Kind.MESSAGE, following),
            *said,
            Record(number, Kind.PROGRESS, following),
        )


class State(NamedTuple):
    """The whole state, and how much may still come: candidacies, late requests, and so on."""

    kafka: Kafka
    candidates: tuple[Candidate, ...]
    candidacies: int
    late: int
    renewals: int
    held: int


@dataclass(frozen=True)
class TermModel:
    """The model of one size.

    Attributes:
        candidacies: limit for the candidacies of both nodes together.
        transactions: the progress at which nodes stop.
        late: limit for requests that are carried out late.
        renewals: limit for the inits within terms.
        held: limit for the inits of candidates that are held, and for ids that Kafka keeps.
        ids: the number of ids with which the machines commit their marks.
    """

    candidacies: int = 3
    transactions: int = 3
    late: int = 2
    renewals: int = 0
    held: int = 0
    ids: int = IDS
    _known: dict[object, str | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def start(self) -> State:
        """Begins before any node has stood."""
        candidates = []
        for name in NAMES:
            # Each as if it were alone: they stand at any time.
            election = Election(ElectionConfig(run=name, ids=self.ids))
            candidates.append(Candidate(Machine.of(election, 0)))
        limits = (self.candidacies, self.late, self.renewals, self.held)
        return State(Kafka(), tuple(candidates), *limits)

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields every possible move."""
        for request in state.kafka.late:
            kafka = state.kafka._replace(late=state.kafka.late - {request})
            kafka, _ = kafka.carry_out(request)
            yield (
                f"late: {request.call} {request.number} {request.epoch}",
                state._replace(kafka=kafka),
            )
        for index in range(len(NAMES)):
            for move, after in self._moves_of(state, index):
                yield f"{NAMES[index]} {move}", after

    def wrong(self, state: State) -> str | None:
        """Returns what is wrong with a state."""
        return state.kafka.wrong or self._standing_still(state)

    def _standing_still(self, state: State) -> str | None:
        for index, candidate in enumerate(state.candidates):
            if candidate.effect is not None or not candidate.waits_for_id:
                continue
            owned = [state.kafka.owners[each] == candidate.epoch(each) for each in range(IDS)]
            key = (candidate.turns, candidate.left_out, candidate.renewal is None, *owned)
            if key not in self._known:
                self._known[key] = self._why_still(state, index)
            if self._known[key] is not None:
                return self._known[key]
        return None

    def _why_still(self, state: State, index: int) -> str | None:
        for away in (frozenset[int](), *(frozenset({each}) for each in range(IDS))):
            if not self._goes_on(state, index, away):
                return f"{NAMES[index]} stands still while Kafka keeps {sorted(away)}"
        return None

    def _goes_on(self, state: State, index: int, away: frozenset[int]) -> bool:
        """Whether a leader has an id to use soon, or ends its term, if all else is answered."""
        plenty = replace(self, transactions=self.transactions + ROUNDS)
        state = state._replace(renewals=IDS * ROUNDS, late=0, held=0)
        for _ in range(ROUNDS):
            for step in (*_renewals(away), "has no id left", "goes on", "produces", "commits"):
                if not state.candidates[index].waits_for_id:
                    return True
                moves = plenty._moves_of(state, index)
                state = next((after for move, after in moves if move.startswith(step)), state)
        return False

    def _moves_of(self, state: State, index: int) -> Iterator[tuple[str, State]]:
        candidate = state.candidates[index]
        if candidate.renewal is not None:
            kafka, _ = state.kafka.carry_out(candidate.renewal)
            done = self._with(state, index, candidate._replace(renewal=None))
            yield f"inits {candidate.renewal.number} again", done._replace(kafka=kafka)
        match candidate.effect:
            case None:
                yield from self._ticks(state, index)
                yield from self._hears_of_renewal(state, index)
            case InitProducers():
                yield from self._inits(state, index)
            case ReadControl():
                event = ControlRead(candidate.machine.now_ms, candidate.token, _seen(state.kafka))
                known = candidate._replace(
                    known=state.kafka.progress,
                    left_out=state.kafka.left_out,
                    marks=state.kafka.marks,
                )
                yield "reads", self._notified(state, index, known, event)
            case CommitMark() | IdleCommit():
                yield from self._transacts(state, index)

    def _ticks(self, state: State, index: int) -> Iterator[tuple[str, State]]:
        candidate = state.candidates[index]
        phase, now_ms = candidate.machine.election.phase, candidate.machine.now_ms
        if phase is ElectionPhase.STANDBY and state.candidacies:
            fewer = state._replace(candidacies=state.candidacies - 1)
            event = _tick(now_ms + 10 * MAX_SILENCE_MS)
            yield "stands", self._notified(fewer, index, candidate, event)
        if phase in IN_TERM and candidate.turns.is_lost:
            is_replaced = candidate.turns.is_replaced
            verdict = TransactionState.FENCED if is_replaced else TransactionState.UNKNOWN
            report = TransactionReport(now_ms, candidate.token, verdict)
            yield "has no id left", self._notified(state, index, candidate, report)
        elif phase in IN_TERM and candidate.known < self.transactions:
            if candidate.number is None:
                return
            event = _tick(now_ms + IDLE_COMMIT_MS)
            yield "goes on", self._notified(state, index, candidate, event)

    def _hears_of_renewal(self, state: State, index: int) -> Iterator[tuple[str, State]]:
        candidate = state.candidates[index]
        if candidate.machine.election.phase not in IN_TERM:
            return
        turns, number = candidate.turns, candidate.turns.to_renew
        if number is not None and state.renewals:
            epoch = f"{candidate.token}/{state.renewals}"
            begun = candidate._replace(
                epochs=_put(candidate.epochs, number, epoch),
                turns=turns.renewing(number),
                renewal=Request(Call.INIT, number, epoch),
            )
            fewer = state._replace(renewals=state.renewals - 1)
            yield f"begins to init {number} again", self._with(fewer, index, begun)
        for one in range(IDS):
            if state.held and turns.kept(one) != turns:
                kept = candidate._replace(turns=turns.kept(one))
                fewer = state._replace(held=state.held - 1)
                yield f"leaves {one} out", self._with(fewer, index, kept)
        if IdState.RENEWING not in turns.states:
            return
        number, request = turns.states.index(IdState.RENEWING), candidate.renewal
        failed = candidate._replace(
            turns=turns.renewed(number, TransactionState.UNKNOWN), renewal=None
        )
        yield f"gives up init {number}", self._with(state, index, failed)
        if request is None:
            done = candidate._replace(turns=turns.renewed(number, TransactionState.CONTINUE))
            yield f"has inited {number} again", self._with(state, index, done)
        elif state.late:
            late = self._with(self._late(state, request), index, failed)
            yield f"gives up, init {number} is late", late

    def _inits(self, state: State, index: int) -> Iterator[tuple[str, State]]:
        candidate = state.candidates[index]
        now_ms, token = candidate.machine.now_ms, candidate.token
        for one in candidate.to_init:
            request = Request(Call.INIT, one, token)
            kafka, _ = state.kafka.carry_out(request)
            left = candidate._replace(to_init=candidate.to_init - {one})
            yield f"inits {one}", self._inited(state._replace(kafka=kafka), index, left)
            if not state.held or len(candidate.without) == IDS - 1:
                continue
            left, held = (
                left._replace(without=candidate.without | {one}),
                state._replace(held=state.held - 1),
            )
            yield f"init {one} is held", self._inited(held, index, left)
            fenced = held._replace(kafka=kafka)
            yield f"init {one} is held, and fences", self._inited(fenced, index, left)
            if state.late:
                late = self._late(held, request)
                yield f"init {one} is held and late", self._inited(late, index, left)
        verdict = VERDICTS[Call.INIT, LibraryAnswer.TIMED_OUT]
        requests = [Request(Call.INIT, one, token) for one in sorted(candidate.to_init)]
        failed = InitFailed(now_ms, token, verdict)
        yield "gives up its inits", self._notified(state, index, candidate, failed)
        for request in requests:
            if state.late:
                late = self._late(state, request)
                yield (
                    f"gives up, init {request.number} is late",
                    self._notified(late, index, candidate, failed),
                )

    def _inited(self, state: State, index: int, candidate: Candidate) -> State:
        if candidate.to_init:
            return self._with(state, index, candidate)
        last_marks = dict(candidate.last_marks)
        done = InitsDone(candidate.machine.now_ms, candidate.token, candidate.without, last_marks)
        return self._notified(state, index, candidate, done)

    def _transacts(self, state: State, index: int) -> Iterator[tuple[str, State]]:
        candidate = state.candidates[index]
        number = candidate.number
        assert number is not None
        records, epoch = candidate.records(number), candidate.epoch(number)
        timed_out = VERDICTS[Call.FLUSH, LibraryAnswer.TIMED_OUT]
        if candidate.produced < len(records):
            record = records[candidate.produced]
            kafka, answer = state.kafka.produce(record, epoch)
            after = state._replace(kafka=kafka)
            verdict = VERDICTS[Call.FLUSH, answer]
            if verdict is TransactionState.CONTINUE:
                more = candidate._replace(produced=candidate.produced + 1)
                yield f"produces {record.kind.value}", self._with(after, index, more)
            else:
                yield f"produces: {answer}", self._ended(after, index, verdict)
            if self.renewals and answer is LibraryAnswer.OK:
                name = f"produces {record.kind.value}, hears nothing"
                yield name, self._ended(after, index, timed_out)
                if state.late:
                    late = self._late(state, Request(Call.PRODUCE, number, epoch, record))
                    yield f"{name}, it is late", self._ended(late, index, timed_out)
            return
        end = Request(Call.COMMIT, number, epoch)
        kafka, answer = state.kafka.carry_out(end)
        after = state._replace(kafka=kafka)
        yield f"commits: {answer}", self._ended(after, index, VERDICTS[Call.COMMIT, answer])
        timed_out = VERDICTS[Call.COMMIT, LibraryAnswer.TIMED_OUT]
        yield "commits, hears nothing", self._ended(after, index, timed_out)
        if state.late:
            yield (
                "commits late, hears nothing",
                self._ended(self._late(state, end), index, timed_out),
            )
            if answer is LibraryAnswer.OK:
                retried = VERDICTS[Call.COMMIT, LibraryAnswer.OK_RETRIED]
                yield (
                    "commits at the second try",
                    self._ended(self._late(after, end), index, retried),
                )

    def _late(self, state: State, request: Request) -> State:
        kafka = state.kafka._replace(late=state.kafka.late | {request})
        return state._replace(kafka=kafka, late=state.late - 1)

    def _ended(self, state: State, index: int, verdict: TransactionState) -> State:
        """Ends a transaction: of a mark, or of a leader."""
        candidate = state.candidates[index]
        number = candidate.number
        assert number is not None
        now_ms, token = candidate.machine.now_ms, candidate.token
        if verdict is TransactionState.ABORTED:
            state = state._replace(kafka=state.kafka.dropped(number))
        if isinstance(candidate.effect, CommitMark):
            report = MarkReport(now_ms, token, number, verdict)
            if verdict is TransactionState.COMMITTED_LOOSE:
                candidate = candidate._replace(loose=candidate.loose | {number})
            return self._notified(state, index, candidate, report)
        if verdict.is_committed:
            candidate = candidate._replace(left_out=candidate.turns.left_out.ids)
            if candidate.turns.usable is not None:
                candidate = candidate._replace(known=candidate.known + 1)
        candidate = candidate._replace(turns=candidate.turns.ended(number, verdict))
        return self._notified(state, index, candidate, TransactionReport(now_ms, token, verdict))

    def _notified(self, state: State, index: int, candidate: Candidate, event: Event) -> State:
        """Passes an event to a candidate, which begins what it then wants."""
        has_led = candidate.machine.election.phase in IN_TERM
        machine, effects = candidate.machine.step(event)
        candidate = candidate._replace(machine=machine, effect=None, produced=0)
        for effect in effects:
            match effect:
                case InitProducers():
                    candidate = candidate._replace(effect=effect, to_init=frozenset(range(IDS)))
                case CommitMark() | ReadControl() | IdleCommit():
                    candidate = candidate._replace(effect=effect)
                case BecomeLeader():
                    turns = IdTurns.begun(
                        IDS,
                        candidate.loose,
                        without=candidate.without,
                        left_out=candidate.left_out,
                    )
                    candidate = candidate._replace(turns=turns)
                case DestroyProducers():
                    left = candidate.last_marks
                    if has_led:
                        marks = _leaders(candidate.marks, 0)
                        left = tuple(sorted(candidate.turns.last_marks(marks).items()))
                    candidate = Candidate(machine, known=candidate.known, last_marks=left)
        return self._with(state, index, candidate)

    def _with(self, state: State, index: int, candidate: Candidate) -> State:
        return state._replace(candidates=_put(state.candidates, index, candidate))


_OK = LibraryAnswer.OK


def _renewals(away: frozenset[int]) -> Iterator[str]:
    """Yields the moves by which each id is inited again, but those that Kafka keeps."""
    for number in range(IDS):
        yield f"begins to init {number} again"
        if number in away:
            yield f"gives up init {number}"
        else:
            yield f"inits {number} again"
            yield f"has inited {number} again"


def _put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _tick(now_ms: int) -> ElectionTick:
    return ElectionTick(now_ms, now_ms, server_fresh=True, holds_progress=True)


def _seen(kafka: Kafka) -> ControlState:
    """Returns what a reader sees; only the order of offsets counts."""
    return ControlState(
        progress=Progress(kafka.progress, None),
        leaders=_leaders(kafka.marks, kafka.newest),
        left_out=LeftOut(kafka.left_out),
    )


def _leaders(marks: tuple[str, ...], newest: int) -> dict[int, LeaderRecord]:
    return {
        index: LeaderRecord(token.partition("-")[0], token, int(index == newest))
        for index, token in enumerate(marks)
        if token
    }
