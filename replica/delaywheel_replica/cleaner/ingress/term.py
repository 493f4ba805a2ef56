"""The ingress during one term: reads, joins the leader's transactions, hands over.

One thread, the leader's, calls all of it, and nothing here waits: topics are found, and records
fetched, on other threads. A turn is

take what was read and answered -> plan -> transaction -> hand over what it announced

so that nothing is handed over between a plan and the end of its transaction. What could go wrong
between any two of these, and why it does not:

| what happens | what follows |
|---|---|
| this node dies, or ends its term, before the transaction | nothing has changed: whoever leads next reads the same records from the same offsets |
| the transaction's end is unknown | the term ends with it. Committed: settled is settled, and what is announced may, to the next leader, lie in a wheel. Not committed: as above |
| the transaction is aborted | nothing of it has changed here: the next one is planned from what is so then |
| it dies after the commit, before or after handing over | announced: the next leader hands it to its own server, and the second, for which the floor waits, shows whether there is a copy |
| an old leader, fenced and unaware, hands over | only what was announced in a transaction before it was fenced: the new leader knows it as announced |
| an answer is lost, the server dies | UNKNOWN: it may be held, so it goes out through a wheel alone |
| an answer comes after the term ended | nobody hears it; the next leader hands the record over again |
| a direct message is in the transaction, and its partition's offset too | both or none of them are committed |
| its topic takes nothing | it stays where it is, with what follows it in its partition; others go on, and as for any message it becomes a dead letter once patience is at its end |
| records that are read twice | those below the position are left out |
| a partition ends before what was read or announced of it | it is read to that end, and no further, by whoever leads; what was announced behind it is told as accepted, or lost |
| a topic is made anew | nothing of the new one counts (`IngressPort.anew`), until all begins anew from what is committed, as with a new leader, and finds the other topic id |
| nobody leads who knows of ingress | nodes of a release that does not are waited for, and kept from leading afterwards (`needs`) |
"""  # noqa: E501 - rows of a table

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from delaywheel_replica.cleaner.ingress import letters
from delaywheel_replica.cleaner.ingress.direct import direct_rows
from delaywheel_replica.cleaner.ingress.handing import Handing
from delaywheel_replica.cleaner.ingress.searching import TopicSearch
from delaywheel_replica.cleaner.ingress.taken import NOTHING, Taken, counted_of, name_of, tell
from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.cleaner.outside.ports import (
    IngressFound,
    IngressKafkaPort,
    IngressPort,
    KafkaAway,
    MakeHandover,
    Record,
)
from delaywheel_replica.cleaner.outside.runner import Runner
from delaywheel_replica.core.ingress.moment import Moment, Room
from delaywheel_replica.core.ingress.partition import unread_bound
from delaywheel_replica.core.ingress.reading import Rules
from delaywheel_replica.core.ingress.term import Term
from delaywheel_replica.core.ingress.underway import Dies, Goes, Gone
from delaywheel_replica.core.leader.rescheduling import nodes_behind
from delaywheel_replica.core.protocol.control import (
    ControlState,
    IngressPartition,
)
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.status_files import IngressStatus
from delaywheel_replica.kafka_settings import KafkaNames
from delaywheel_replica.process.logs import get_logger

READ_MOST: Final = 2_000
"""Records that are taken in at once: less than 50 ms of work."""

LAGS_TOLD: Final = 200
"""Of the partitions with the greatest lags; and so many that are cut off."""

LOOK_S: Final = 0.05
"""What falls due while nothing else happens is looked for so often."""

TELL_GROUP_S: Final = 1.0

FAULT_KEPT_S: Final = 30.0
"""A reader that is still refused says so again within that."""

TELL_AGAIN_S: Final = 30.0
"""What did not arrive is made good by then, and offsets that nobody commits any more expire."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What a cluster takes in.

    Attributes:
        names: of our topics.
        topics: that records are taken from; none: nothing is, but what was announced before.
        rules: what is accepted.
        span_ms: how far ahead a due may lie.
        letter_bytes: so large a record the dead-letter topic takes.
    """

    names: KafkaNames
    topics: frozenset[str]
    rules: Rules
    span_ms: int
    letter_bytes: int


@dataclass(slots=True)
class _Surroundings:
    """What is known of this node and the others."""

    state: ControlState
    heartbeats: Mapping[str, Heartbeat]
    node: str

    @property
    def least_slot(self) -> int | None:
        """The first slot that this node's server takes; None: it takes nothing."""
        heartbeat = self.heartbeats.get(self.node)
        if heartbeat is None or heartbeat.draining or heartbeat.disk_out or heartbeat.open is None:
            return None
        told = heartbeat.wheels.get(heartbeat.open)
        # The seal may have moved on by one second since it was told.
        return None if told is None else told.seal_slot + 1


class Ingress:
    """Takes in records during one term. Made anew for each."""

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
        """Begins with nothing read.

        Args:
            kafka: Where the topics are.
            make_handover: Makes the way to this node's server.
            settings: What is taken in.
            runner: Runs what takes longer.
            clock: The clocks.
            on_news: Called on other threads when there is something for the next turn.
        """
        self._kafka = kafka
        self._settings = settings
        self._clock = clock
        self._on_news = on_news
        self._search = TopicSearch(kafka, runner=runner, clock=clock, on_found=on_news)
        self._handing = Handing(make_handover, clock)
        self._make_handover = make_handover
        self._around: _Surroundings | None = None
        self._term: Term | None = None
        self._reader: IngressPort | None = None
        self._full: AbstractSet[IngressPartition] = frozenset()
        self._reader_fault: str | None = None
        self._reader_fault_until = 0.0
        self._behind: tuple[str, ...] = ()
        self._is_changed = True
        self._bound: int | None = None
        self._is_bound_known = False
        self._planned = NOTHING
        self._planned_for = Room(0)
        self._look_at = 0.0
        self._tell_group_at = 0.0
        self._tell_again_at = 0.0
        self._is_group_behind = False

    # --- what is so

    @property
    def fileno(self) -> int | None:
        """To wait for the server's answers with poll; None: there are none to wait for."""
        return self._handing.fileno

    @property
    def faults(self) -> tuple[str, ...]:
        """Returns what keeps records from being taken in, and what to do, for people."""
        found = [*self._search.faults, *self._handing.faults]
        if self._reader_fault is not None:
            found.append(f"the ingress topics cannot be read: {self._reader_fault}")
        if self._behind:
            found.append(
                f"ingress waits until every node has told that its release knows it: node"
                f" {', '.join(self._behind)} has not"
            )
        cut_off = sorted(self._cut_off)
        if cut_off:
            more = f" and {len(cut_off) - 1} more" if cut_off[1:] else ""
            topic, partition = cut_off[0]
            found.append(
                f"ingress partition {topic}/{partition}{more} ends before what was read of it, and"
                " is not read on: delete the topic, and have it made anew"
            )
        return tuple(found)

    def status(self) -> IngressStatus | None:
        """Returns what others may know; None: there is nothing to be taken in."""
        term, reader = self._term, self._reader
        if term is None or reader is None:
            return None
        unread, positions = reader.lags(), term.positions
        unread = {at: count for at, count in unread.items() if at not in term.done}
        lags = {
            at: positions[at] - offset + unread.get(at, 0) for at, offset in term.offsets.items()
        }
        greatest = sorted(lags, key=lambda at: (-lags[at], at))[:LAGS_TOLD]
        return IngressStatus(
            partitions=term.partitions,
            lag=sum(lags.values()),
            lags={name_of(at): lags[at] for at in sorted(greatest)},
            held_bytes=term.held_bytes,
            cut_off=tuple(name_of(at) for at in sorted(self._cut_off))[:LAGS_TOLD],
            faults=self.faults,
        )

    @property
    def letter_bytes(self) -> int:
        """So much the dead-letter topic takes at once."""
        return self._settings.letter_bytes

    def bound(self, state: ControlState, taken: Taken | None = None) -> int | None:
        """Returns the slot that floor and own seals must not pass; None if there is none.

        Args:
            state: what is committed.
            taken: what the transaction carries; None: as it is committed.
        """
        if self._term is None:
            return unread_bound(state.ingress.values())
        if taken is not None and taken.step:
            return self._term.bound(taken.step)
        if not self._is_bound_known:  # asked for in each turn, and looks at all that is under way
            self._bound, self._is_bound_known = self._term.bound(), True
        return self._bound

    # --- what is done

    def turn(self, state: ControlState, node: str, heartbeats: Mapping[str, Heartbeat]) -> None:
        """Takes what came since the last turn: topics, records and answers.

        Args:
            state: what is committed.
            node: this one.
            heartbeats: the newest of each node, its own included.
        """
        self._around = _Surroundings(state, heartbeats, node)
        announced = {at[0] for at, record in state.ingress.items() if record.announced}
        if self._term is None and not (self._settings.topics or announced):
            return
        if self._term is None:
            self._begin(state)
        is_anew = self._reader is not None and bool(self._reader.anew)
        self._search.look(frozenset(announced), is_urgent=is_anew)
        found = self._search.found()
        if found is not None:
            self._take_found(found, state)
        self._take_answers()
        self._read()
        self._hand()
        self._tell_group()

    def take_levels(self, levels_ms: Mapping[str, int]) -> None:
        """Counts by other levels from now on."""
        rules = replace(self._settings.rules, levels_ms=dict(levels_ms))
        self._settings = replace(self._settings, rules=rules)
        if self._term is not None and self._around is not None:
            self._begin_anew(self._around.state)

    def plan(self, now_ms: int, room: Room, blocked: AbstractSet[str] = frozenset()) -> Taken:
        """Returns what the next transaction can carry; nothing changes until it is committed.

        Args:
            now_ms: the wall clock.
            room: so much may go with it.
            blocked: topics that no message can go to now.
        """
        term, around = self._term, self._around
        if term is None or around is None or around.state.progress is None:
            return NOTHING
        behind = tuple(nodes_behind(around.state, around.heartbeats))
        if behind != self._behind:
            self._behind, self._is_changed = behind, True
        if behind:
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
        )
        step = term.plan(moment, room=room)
        goes = [each for each in step.settled if isinstance(each, Goes)]
        announces = any(each.announced or each.taken_back for each in step.steps.values())
        taken = Taken(
            step,
            direct_rows(goes, now_ms),
            is_urgent=bool(step.settled or step.abandoned or announces)
            or not self._full.isdisjoint(step.steps),
            is_full=len(step.settled) >= room.messages,
        )
        self._planned, self._planned_for = taken, room
        self._look_at = now_s + LOOK_S
        self._is_changed = bool(blocked)
        return taken

    def written(self, taken: Taken) -> Iterable[Record]:
        """Yields what Kafka gets beside messages and control records."""
        names = self._settings.names
        for each in taken.step.settled:
            if isinstance(each, Dies):
                yield from letters.letter(names, each, self._settings.letter_bytes)
        for at, step in taken.step.steps.items():
            for each in step.settled:
                if isinstance(each, Gone):
                    yield letters.deleted(names, at, each)
        for at, record in taken.step.abandoned.items():
            if record.announced:
                yield letters.abandoned(names, at, record)

    def committed(self, taken: Taken, state: ControlState) -> Counter[str]:
        """Notes that a transaction is committed, and hands over what it has announced.

        Args:
            taken: what it carried.
            state: what is committed now.

        Returns:
            How much of what there was.
        """
        counted: Counter[str] = Counter()
        term, around = self._term, self._around
        if term is None or around is None:
            return counted
        around.state = state
        if taken.step:
            counted = counted_of(term, taken.step)
            tell(taken.step)
            term.committed(taken.step)
            self._is_changed, self._is_bound_known = True, False
            self._is_group_behind = True
        self._hand()
        return counted

    def failed(self) -> None:
        """Notes that a transaction is not committed: what it carried is planned anew."""
        self._is_changed = True

    def close(self) -> None:
        """Ends the term."""
        self._handing.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._term = None

    # --- behind it

    @property
    def _cut_off(self) -> frozenset[IngressPartition]:
        return frozenset() if self._term is None else self._term.cut_off

    def _begin(self, state: ControlState) -> None:
        self._term = Term(state.ingress, self._settings.rules)
        self._reader = self._kafka.ingress(self._on_news)
        self._is_changed, self._is_bound_known = True, False

    def _begin_anew(self, state: ControlState) -> None:
        """Begins as a new leader does, between two transactions."""
        self.close()
        self._handing = Handing(self._make_handover, self._clock)
        self._reader_fault = None
        self._planned = NOTHING
        self._begin(state)
        self._search.look_at_once()

    def _take_found(self, found: IngressFound, state: ControlState) -> None:
        term, reader = self._term, self._reader
        assert term is not None
        assert reader is not None
        if any(term.is_another(name, topic.topic_id) for name, topic in found.topics.items()):
            log.warning("an ingress topic was made anew", topics=sorted(found.topics))
            self._begin_anew(state)
            return self._take_found(found, state)
        positions: dict[IngressPartition, int] = {}
        for name, topic in sorted(found.topics.items()):
            is_former = name not in self._settings.topics
            positions |= term.found(
                name, topic.topic_id, topic.partitions, only_announced=is_former
            )
        reader.assign(positions, term.least_ends, term.topic_ids)
        self._is_changed, self._is_bound_known = True, False
        return None

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
        self._rest(term, reader)
        try:
            fetched = reader.poll(READ_MOST)
        except KafkaAway as away:
            if self._reader_fault is None:
                log.warning("ingress cannot be read", cause=str(away))
            self._reader_fault = str(away)
            self._reader_fault_until = self._clock.monotonic() + FAULT_KEPT_S
            return
        if self._clock.monotonic() >= self._reader_fault_until:
            self._reader_fault = None  # also where no records come
        for each in fetched:
            term.read(each.at, each.records, each.position, each.first_kept)
            self._is_changed, self._is_bound_known = True, False
            self._reader_fault = None
        for at, end in reader.cut_off.items():
            if term.ends(at, end):
                self._is_changed, self._is_bound_known = True, False
        if fetched:
            self._rest(term, reader)

    def _rest(self, term: Term, reader: IngressPort) -> None:
        self._full = term.full()
        reader.rest(self._full | term.done)

    def _hand(self) -> None:
        # What is handed over is in no plan any more: it may be held from now on.
        if self._term is not None and self._handing.hand(self._term.to_hand):
            self._is_changed = True

    def _tell_group(self) -> None:
        now_s = self._clock.monotonic()
        if self._term is None or self._reader is None:
            return
        if now_s >= (self._tell_group_at if self._is_group_behind else self._tell_again_at):
            self._tell_group_at, self._tell_again_at = now_s + TELL_GROUP_S, now_s + TELL_AGAIN_S
            self._is_group_behind = False
            self._reader.tell_group(self._term.offsets)
