"""The ingress during one term: reads records, joins the leader's transactions, hands over.

Only the leader's thread calls this module, and nothing here waits: other threads find the topics
and fetch the records. An iteration is

take what was read and answered -> plan -> transaction -> hand over what it announced

so that nothing is handed over between a plan and the end of its transaction. What could go wrong
in between, and why it does not:

| what happens | what follows |
|---|---|
| this node dies, or ends its term, before the transaction | nothing has changed: the next leader reads the same records from the same offsets |
| the transaction's outcome is unknown | the term ends. If it was committed: what it settled is settled, and what it announced may be in a wheel, as the next leader knows. If not: as above |
| the transaction is aborted | nothing has changed here: the next one is planned afresh |
| this node dies after the commit, before or after handing over | the records are announced: the next leader hands them to its own server, and their second, for which the floor waits, shows whether there is a copy |
| an old leader, fenced and unaware of it, hands over | only records announced before it was fenced: the new leader knows them as announced |
| an answer is lost, the server dies | UNKNOWN: the record may be held, so only a wheel delivers it |
| an answer comes after the end of the term | it is ignored; the next leader hands the record over again |
| a transaction carries a direct message and its partition's offset | both are committed, or neither |
| a direct message's topic takes nothing | it is deferred. Where it cannot be, it waits, and with it the rest of its partition, until it becomes a dead letter; other partitions continue |
| records are read twice | those below the position are skipped |
| a partition ends before what was read or announced of it | each leader reads it to that end, and no further; records announced after the end are reported as accepted or lost |
| a topic is recreated | nothing of the new one counts (`IngressPort.recreated`) until this term starts again from what is committed, as a new leader does, and finds the new topic id |
"""  # noqa: E501 - rows of a table

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from delaywheel.record_headers import TTL_HEADER
from delaywheel_replica.cleaner.ingress import letters
from delaywheel_replica.cleaner.ingress.direct import direct_rows
from delaywheel_replica.cleaner.ingress.half_letters import asked
from delaywheel_replica.cleaner.ingress.handing import Handing
from delaywheel_replica.cleaner.ingress.searching import TopicSearch
from delaywheel_replica.cleaner.ingress.taken import (
    NOTHING,
    Taken,
    counted_of,
    log_losses,
    name_and_more,
    name_of,
)
from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.cleaner.outside.ports import (
    IngressFound,
    IngressKafkaPort,
    IngressPort,
    KafkaAway,
    MakeHandover,
    ReadsRefused,
    Record,
)
from delaywheel_replica.cleaner.outside.runner import Runner
from delaywheel_replica.core.ingress.moment import Moment, TransactionRoom
from delaywheel_replica.core.ingress.partition import unread_bound
from delaywheel_replica.core.ingress.reading import IngressRules
from delaywheel_replica.core.ingress.term import IngressTerm
from delaywheel_replica.core.ingress.underway import Deleted, Forwarded, GroupAnswered, Rejected
from delaywheel_replica.core.leader.halves import are_known, nodes_behind
from delaywheel_replica.core.protocol.control import (
    ControlState,
    IngressPartition,
)
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.status_files import IngressStatus
from delaywheel_replica.kafka_settings import KafkaNames
from delaywheel_replica.process.logs import get_logger

LAGS_REPORTED: Final = 200
"""How many of the greatest lags the status lists, and how many cut-off partitions."""

LOOK_S: Final = 0.05
"""Interval of looking for records that fall due while nothing else happens."""

REPORT_GROUP_S: Final = 1.0

FAULT_KEPT_S: Final = 30.0
"""A reader that is still refused reports it again within this time."""

REPORT_AGAIN_S: Final = 30.0
"""Offsets are committed again so often: a commit may be lost, and unrenewed offsets expire."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """The ingress topics of a cluster, and what it accepts from them.

    Attributes:
        topics: The ingress topics; none: only records announced before are read.
        span_ms: How far ahead a due may be.
        letter_bytes: The limit of the dead-letter topic for one record.
        ttl_header: The header that states a message's time to live; empty: none.
    """

    names: KafkaNames
    topics: frozenset[str]
    rules: IngressRules
    span_ms: int
    letter_bytes: int
    ttl_header: str = TTL_HEADER


@dataclass(slots=True)
class _ReadFault:
    """What a reader says now and then, while it lasts."""

    fault: str | None = None
    until_s: float = 0.0

    def note(self, fault: str, now_s: float) -> None:
        """Keeps it until it could have been said again."""
        self.fault, self.until_s = fault, now_s + FAULT_KEPT_S

    def drop(self, now_s: float, *, is_over: bool) -> None:
        """Forgets it if it is over, or was not said again."""
        if is_over or now_s >= self.until_s:
            self.fault = None


@dataclass(slots=True)
class _Surroundings:
    """The state of this node and the others."""

    state: ControlState
    heartbeats: Mapping[str, Heartbeat]
    node: str
    halves_objection: str | None

    @property
    def least_slot(self) -> int | None:
        """The first slot that this node's server accepts; None: it accepts nothing."""
        heartbeat = self.heartbeats.get(self.node)
        if heartbeat is None or heartbeat.draining or heartbeat.disk_out or heartbeat.open is None:
            return None
        wheel = heartbeat.wheels.get(heartbeat.open)
        # The seal may have advanced by one second since the heartbeat.
        return None if wheel is None else wheel.seal_slot + 1


class Ingress:
    """Reads and settles ingress records during one term. Each term creates its own."""

    def __init__(
        self,
        kafka: IngressKafkaPort,
        make_handover: MakeHandover,
        settings: IngressSettings,
        *,
        runner: Runner,
        clock: Clock,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins with nothing read; `on_news` is called on other threads when `poll` has work."""
        self._kafka = kafka
        self._settings = settings
        self._clock = clock
        self._on_news = on_news
        self._search = TopicSearch(kafka, runner=runner, clock=clock, on_found=on_news)
        self._handing = Handing(make_handover, clock)
        self._make_handover = make_handover
        self._around: _Surroundings | None = None
        self._term: IngressTerm | None = None
        self._reader: IngressPort | None = None
        self._full: AbstractSet[IngressPartition] = frozenset()
        self._unread = _ReadFault()
        self._unheard = _ReadFault()  # of the cluster's own topic
        # Which partitions wait with halves, until all nodes know these, and which nodes do not.
        self._with_halves: tuple[Sequence[IngressPartition], Sequence[str]] = (), ()
        self._is_changed = True
        self._bound: int | None = None
        self._is_bound_known = False
        self._planned = NOTHING
        self._planned_for = TransactionRoom(0)
        self._look_at = 0.0
        self._report_group_at = 0.0
        self._report_again_at = 0.0
        self._is_group_behind = False

    # --- state

    @property
    def fileno(self) -> int | None:
        """The descriptor to poll for the server's answers; None: there is no connection."""
        return self._handing.fileno

    @property
    def hears_answers(self) -> bool:
        """Whether the cluster's own topic is read, by which groups answer about halves."""
        return self._is_own_found and self.answers_objection is None

    @property
    def answers_objection(self) -> str | None:
        """Why the answers of groups about halves are not read; None: they are, or it is open.

        Halves are refused then. They would wait in other ingress topics, with all behind them, and
        what is committed with a delay, or by a group, would wait in this one.
        """
        if self._term is None or not self._settings.rules.halves:
            return None
        fault = self._search.lasting_fault(self._settings.names.ingress) or self._unheard.fault
        if fault is None and not self._is_own_found:
            fault = self._search.lasting_fault()
        return None if fault is None else f"answers about them are not heard: {fault}"

    @property
    def _is_own_found(self) -> bool:
        return self._term is not None and self._settings.names.ingress in self._term.topic_ids

    @property
    def faults(self) -> tuple[str, ...]:
        """Returns what keeps records from being accepted, and what operators can do about it."""
        found = [*self._search.faults, *self._handing.faults]
        if self._unread.fault is not None:
            found.append(f"the ingress topics cannot be read: {self._unread.fault}")
        waiting, nodes = self._with_halves
        if waiting:
            until = f"the ingress topic {self._settings.names.ingress} is read"
            if self.hears_answers:
                which = f"node {', '.join(nodes)}" if nodes else "one of members"
                until = f"every node has reported that its release knows them: {which} has not"
            found.append(
                f"ingress partition {name_and_more(waiting)} waits with half messages, and all"
                f" behind them, until {until}"
            )
        if cut_off := self._cut_off:
            found.append(
                f"ingress partition {name_and_more(sorted(cut_off))} ends before what was read of"
                f" it, and is no longer read, from offset {cut_off[min(cut_off)]} on: send what"
                " lies there again, then delete the topic, and let it be recreated"
            )
        if open_ := sorted(self._open):
            found.append(
                f"ingress partition {name_and_more(open_)} waits for a transaction that its"
                " producer leaves open: Kafka aborts it after that producer's"
                " transaction.timeout.ms; kafka-transactions.sh finds it, and aborts it sooner"
            )
        return tuple(found)

    @property
    def unread(self) -> frozenset[int] | None:
        """The partitions of the cluster's own topic that are no longer read; None: it is off.

        Those that wait for an open transaction are among them, unless no other is left.
        """
        own = self._settings.names.ingress
        if own not in self._settings.topics:
            return None
        if self._term is None:
            return frozenset()
        cut_off = self._term.cut_off.keys()
        avoided = cut_off | self._open
        are_others_left = any(at[0] == own and at not in avoided for at in self._term.offsets)
        chosen = avoided if are_others_left else cut_off
        return frozenset(number for topic, number in chosen if topic == own)

    def status(self) -> IngressStatus | None:
        """Returns the status to publish; None: there is nothing to read."""
        term, reader = self._term, self._reader
        if term is None or reader is None or not (self._settings.topics or term.partitions):
            return None
        unread, positions = reader.lags(), term.positions
        unread = {at: count for at, count in unread.items() if at not in term.done}
        lags = {
            at: positions[at] - offset + unread.get(at, 0) for at, offset in term.offsets.items()
        }
        greatest = sorted(lags, key=lambda at: (-lags[at], at))[:LAGS_REPORTED]
        return IngressStatus(
            partitions=term.partitions,
            lag=sum(lags.values()),
            lags={name_of(at): lags[at] for at in sorted(greatest)},
            held_bytes=term.held_bytes,
            cut_off=tuple(name_of(at) for at in sorted(self._cut_off))[:LAGS_REPORTED],
            open_transactions=tuple(map(name_of, sorted(self._open)))[:LAGS_REPORTED],
            faults=self.faults,
        )

    def bound(self, state: ControlState, taken: Taken | None = None) -> int | None:
        """Returns the slot that the floor and the leader's own seals must not pass; None: no limit.

        With `taken` that is after the transaction, otherwise as committed.
        """
        if self._term is None:
            return unread_bound(state.ingress.values())
        if taken is not None and taken.step:
            return self._term.bound(taken.step)
        if not self._is_bound_known:  # cached: each iteration asks, and it visits all records
            self._bound, self._is_bound_known = self._term.bound(), True
        return self._bound

    # --- steps of the term

    def poll(
        self,
        state: ControlState,
        node: str,
        heartbeats: Mapping[str, Heartbeat],
        halves_objection: str | None = None,
    ) -> None:
        """Takes in topics, records and answers that came since the last call.

        Without an objection groups can be asked about halves.
        """
        before, objection = self._around, halves_objection or self.answers_objection
        self._around = _Surroundings(state, heartbeats, node, objection)
        self._is_changed |= before is None or before.halves_objection != objection
        announced = {at[0] for at, record in state.ingress.items() if record.announced}
        has_topics = bool(self._settings.topics or announced)
        if self._term is None and not (has_topics or self._switched_off(state)):
            return
        if self._term is None:
            self._begin(state)
        is_recreated = self._reader is not None and bool(self._reader.recreated)
        if has_topics or self._search.faults:  # which the next search may end
            self._search.look(frozenset(announced), is_urgent=is_recreated)
        found = self._search.found()
        if found is not None:
            self._take_found(found, state)
        self._take_answers()
        self._read()
        self._hand()
        self._report_to_group(state)

    def take_levels(self, levels_ms: Mapping[str, int]) -> None:
        """Applies new levels from now on."""
        rules = replace(self._settings.rules, levels_ms=dict(levels_ms))
        self._settings = replace(self._settings, rules=rules)
        if self._term is not None and self._around is not None:
            self._restart(self._around.state)

    def plan(
        self, now_ms: int, room: TransactionRoom, blocked: AbstractSet[str] = frozenset()
    ) -> Taken:
        """Returns what the next transaction can carry; nothing changes until it is committed.

        Topics in `blocked` cannot be forwarded to now.
        """
        term, around = self._term, self._around
        if term is None or around is None or around.state.progress is None:
            return NOTHING
        now_s = self._clock.monotonic()
        if not (self._is_changed or blocked or room != self._planned_for or now_s >= self._look_at):
            return self._planned
        moment = Moment(
            now_ms=now_ms,
            least_slot=around.least_slot,
            span_end_ms=now_ms + self._settings.span_ms,
            floor=around.state.progress.floor,
            blocked=blocked,
            most=self._handing.most,
            takes_halves=are_known(around.state.needs),
            halves_objection=around.halves_objection,
        )
        self._with_halves = (), ()
        is_waiting = not moment.takes_halves and moment.halves_objection is None
        if self._settings.rules.halves and is_waiting:
            without = nodes_behind(around.state, around.heartbeats)
            self._with_halves = term.come_to_halves(), without
        step = term.plan(moment, room=room)
        names = self._settings.names
        direct = [each for each in step.settled if isinstance(each, Forwarded)]
        goes = [each for each in direct if not each.message.is_half]
        questions = [asked(each, names) for each in direct if each.message.is_half]
        announces = any(each.announced or each.taken_back for each in step.steps.values())
        taken = Taken(
            step,
            direct_rows(goes, now_ms, self._settings.ttl_header),
            direct_rows(questions, now_ms),
            is_urgent=bool(step.settled or step.abandoned or announces)
            or not self._full.isdisjoint(step.steps),
            is_full=0 < room.messages <= len(step.settled),
        )
        self._planned, self._planned_for = taken, room
        self._look_at = now_s + LOOK_S
        self._is_changed = bool(blocked) or term.leaves_some_out
        return taken

    def written(self, taken: Taken) -> Iterable[Record]:
        """Yields the dead letters and outcomes of a transaction."""
        names = self._settings.names
        for each in taken.step.settled:
            if isinstance(each, Rejected):
                yield from letters.letter(names, each, self._settings.letter_bytes)
            elif isinstance(each, GroupAnswered):
                yield letters.answered(names, each)
        for at, step in taken.step.steps.items():
            for each in step.settled:
                if isinstance(each, Deleted):
                    yield letters.deleted(names, at, each)
        for at, record in taken.step.abandoned.items():
            if record.announced:
                yield letters.abandoned(names, at, record)

    def committed(self, taken: Taken, state: ControlState) -> Counter[str]:
        """Notes that a transaction led to this state, and hands over what it has announced.

        Returns counts of what its ingress part settled and announced.
        """
        counted: Counter[str] = Counter()
        term, around = self._term, self._around
        if term is None or around is None:
            return counted
        around.state = state
        if taken.step:
            counted = counted_of(term, taken.step)
            log_losses(taken.step)
            term.committed(taken.step)
            self._is_changed, self._is_bound_known = True, False
            self._is_group_behind = True
        self._hand()
        return counted

    def failed(self) -> None:
        """Notes that a transaction was not committed: its records are planned again."""
        self._is_changed = True

    def close(self) -> None:
        """Ends the term."""
        self._handing.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._term = None

    # --- inside

    @property
    def _cut_off(self) -> Mapping[IngressPartition, int]:
        if self._term is None:
            return {}
        found = self._term.offsets
        return {at: end for at, end in self._term.cut_off.items() if at in found}

    @property
    def _open(self) -> AbstractSet[IngressPartition]:
        return frozenset() if self._reader is None else self._reader.open_transactions

    def _begin(self, state: ControlState) -> None:
        self._term = IngressTerm(state.ingress, self._settings.rules)
        self._reader = self._kafka.ingress(self._on_news)
        self._is_changed, self._is_bound_known = True, False

    def _restart(self, state: ControlState) -> None:
        """Starts again as a new leader does, between two transactions."""
        self.close()
        self._handing = Handing(self._make_handover, self._clock)
        self._unread, self._unheard = _ReadFault(), _ReadFault()
        self._planned = NOTHING
        self._begin(state)
        self._search.look_at_once()

    def _take_found(self, found: IngressFound, state: ControlState) -> None:
        assert self._term is not None
        if any(self._term.is_another(name, topic.topic_id) for name, topic in found.topics.items()):
            log.warning("an ingress topic was recreated", topics=sorted(found.topics))
            self._restart(state)
        term, reader = self._term, self._reader
        assert reader is not None
        positions: dict[IngressPartition, int] = {}
        for name, topic in sorted(found.topics.items()):
            is_former = name not in self._settings.topics
            positions |= term.found(
                name, topic.topic_id, topic.partitions, only_announced=is_former
            )
        reader.assign(positions, term.least_ends, term.topic_ids)
        self._is_group_behind |= bool(positions)  # beside offsets stands what is taken here
        self._is_changed, self._is_bound_known = True, False

    def _take_answers(self) -> None:
        term = self._term
        assert term is not None
        for handed, answer in self._handing.answers():
            term.answered(handed, answer)
            self._is_changed = True

    def _read(self) -> None:
        term, reader = self._term, self._reader
        assert term is not None
        assert reader is not None
        self._pause_full(term, reader)
        own, now_s = self._settings.names.ingress, self._clock.monotonic()
        try:
            fetched = reader.poll()
        except KafkaAway as away:
            if self._unread.fault is None:
                log.warning("ingress cannot be read", cause=str(away))
            self._unread.note(str(away), now_s)
            refusals = away.refusals if isinstance(away, ReadsRefused) else {}
            if refusal := refusals.get(own) or refusals.get(""):
                self._unheard.note(refusal, now_s)
            return
        self._unread.drop(now_s, is_over=bool(fetched))
        self._unheard.drop(now_s, is_over=any(each.at[0] == own for each in fetched))
        for each in fetched:
            term.read(each.at, each.records, each.position, each.first_kept)
            self._is_changed, self._is_bound_known = True, False
        for at, end in reader.cut_off.items():
            if term.ends(at, end):
                self._is_changed, self._is_bound_known = True, False
                self._is_group_behind = True  # beside offsets stands which partitions are read
        if fetched:
            self._pause_full(term, reader)

    def _pause_full(self, term: IngressTerm, reader: IngressPort) -> None:
        self._full = term.full()
        reader.pause_only(self._full | term.done)

    def _hand(self) -> None:
        # Records handed over may be held from now on, so plans no longer contain them.
        if self._term is not None and self._handing.hand(self._term.to_hand):
            self._is_changed = True

    def _report_to_group(self, state: ControlState) -> None:
        now_s = self._clock.monotonic()
        if self._term is None or self._reader is None:
            return
        if now_s >= (self._report_group_at if self._is_group_behind else self._report_again_at):
            self._report_group_at = now_s + REPORT_GROUP_S
            self._report_again_at = now_s + REPORT_AGAIN_S
            self._is_group_behind = False
            unread = self._term.done | self._term.cut_off.keys()
            offsets, switched_off = self._term.offsets, self._switched_off(state)
            if switched_off:
                unread |= {at for at in offsets if at[0] == self._settings.names.ingress}
            self._reader.report_to_group(switched_off | offsets, unread | switched_off.keys())

    def _switched_off(self, state: ControlState) -> dict[IngressPartition, int]:
        """Returns where the note lies that consumers look for, if the own topic is read no more.

        It says so: else they would go on to write there.
        """
        own = self._settings.names.ingress
        if own in self._settings.topics or own not in {topic for topic, _ in state.ingress}:
            return {}
        first = state.ingress.get((own, 0))
        return {(own, 0): 0 if first is None else first.next_offset}
