"""Decides which due messages can go to their topics, and how the others end.

Checked before anything is produced:

| seen | then |
|---|---|
| topic not asked for yet | wait for Kafka's answer, `PATIENCE_S` at most; then try |
| an answer that is not `FRESH_S` young, and would make dead letters | the same |
| topic missing, or its name illegal | dead letter |
| topic, or its partition, in trouble (troubles.py) | deferred (deferring.py), as long as its |
|   | patience lasts. Where that is not possible: wait as long as troubles.py allows; then dead |
|   | letters, until it is well |
| topic well, but not once any of its brokers leaves; and | deferred likewise; then it is tried |
|   | Kafka keeps ids, and that might cost one too many (id_turns.py) |   |
| a message that its topic would refuse (suitability.py) | dead letter |
| a message that has expired (expiring.py), whatever its topic is like | dead letter |
| found guilty by a search | dead letter |

If a transaction fails all the same, trial transactions (bisection.py) look for the reason; nothing
is forwarded meanwhile, but the leader continues with idle commits. What was overdue by `OVERDUE_S`
when a term began may be what the predecessor failed with, and one leader after another would: the
new leader searches the topics of such messages before it writes to them, in whichever of its steps,
which are small at first, they come.

All topics of a step, and of the seconds that are loaded ahead, are checked together, so their
troubles and questions run side by side: however many topics are in trouble, they delay the others
for 5 s at most, and a bad message only for as long as it takes to find it. Once `PATIENCE_S` has
passed without an answer about one topic, the next ones get `ANSWER_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from delaywheel.record_headers import TTL_HEADER
from delaywheel_replica.cleaner.delivery.bisection import Findings, MessageName, name_of
from delaywheel_replica.cleaner.delivery.deferring import Patience, partition_of
from delaywheel_replica.cleaner.delivery.expiring import find_expired
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason
from delaywheel_replica.cleaner.delivery.suitability import Unsuited, find_unsuited
from delaywheel_replica.cleaner.delivery.topics import Topic, TopicState
from delaywheel_replica.cleaner.delivery.troubles import (
    PATIENCE_S,
    RECENT_S,
    TAKES_NOTHING,
    Allowance,
    Troubles,
)
from delaywheel_replica.cleaner.due.rows import NO_DUE_ROWS, DueMessage, DueRows, join_rows
from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.cleaner.outside.ports import ANY_PARTITION
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import UnavailableTopic
from delaywheel_replica.kafka_settings import KafkaNames
from delaywheel_replica.process.logs import get_logger

FRESH_S = 2.0
ANSWER_S = 1.0
OVERDUE_S = 2.0
"""A transaction that is not answered does not fail sooner."""
SEARCH_PAUSE_S = 1.0
"""Between searches that could not be done."""
LOOK_AHEAD_S = 0.5
AHEAD_AT_MOST = 10_000
"""Topics that are checked before messages for them are due."""

log = get_logger(__name__)

_UNLIMITED = 1 << 62


class TopicsPort(Protocol):
    """The known answers of Kafka about topics."""

    def find(self, names: Iterable[str]) -> Mapping[str, Topic]:
        """Returns the topics that are known now, and requests the others."""

    def ask(self, names: Iterable[str]) -> None:
        """Asks Kafka again, immediately."""


class BisectionPort(Protocol):
    """Searches in the background."""

    def search(self, rows: DueRows, everywhere: Mapping[str, int]) -> Future[Findings]:
        """Finds which of these messages, or of their topics, make a transaction fail."""


@dataclass(frozen=True, slots=True)
class Condemned:
    """One message that becomes a dead letter."""

    message: DueMessage
    reason: DeadReason
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with the messages of a step: forward `rows`, dead-letter others, defer others.

    Attributes:
        deferred: Those that go to the ingress topic, as they are sent there.
        batch_limits: Topics whose largest batch is below the client's, in bytes.
        look_up: Topics whose metadata the clients may have outdated: one got more partitions, or a
            transaction failed although nothing is wrong with its messages.
        partitions: How many each topic has, where that is known.
        is_at_risk: A broker that leaves may keep the transactional id.
    """

    rows: DueRows
    dead: list[Condemned] = field(default_factory=list)
    deferred: DueRows = NO_DUE_ROWS
    batch_limits: Mapping[str, int] = field(default_factory=dict)
    look_up: frozenset[str] = frozenset()
    partitions: Mapping[str, int] = field(default_factory=dict)
    is_at_risk: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Why nothing can be forwarded now, and topics that are waited for, for a bounded time."""

    why: str
    topics: frozenset[str] = frozenset()


class _Questions:
    """Topics whose answers from Kafka are awaited for due messages, and since when."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def begin(self, name: str, now: float) -> bool:
        """Notes a question about a topic; returns whether it is new."""
        is_new = name not in self._since
        self._since.setdefault(name, now)
        return is_new

    def is_answered(self, name: str, asked_at: float, now: float) -> bool:
        """Whether an answer is recent enough to act on."""
        return asked_at >= min(self._since.get(name, now), now - FRESH_S)

    def end(self, name: str) -> None:
        self._since.pop(name, None)

    def waited_s(self, name: str, now: float) -> float | None:
        """Returns how long an answer has been awaited; None if none is."""
        since = self._since.get(name)
        return None if since is None else now - since

    def prune(self, names: set[str], now: float) -> None:
        kept = self._since.items()
        self._since = {n: since for n, since in kept if now - since <= RECENT_S or n in names}

    def clear(self) -> None:
        self._since.clear()


class DeadLetters:
    """Decides for each step; called only by the leader's main thread.

    Attributes:
        is_careful: Messages had better not go where a broker that leaves may keep the id.
        unread: Returns the partitions of the ingress topic that no leader reads any further; None:
            none of them is read. Called only where something might go there.
    """

    def __init__(
        self,
        topics: TopicsPort,
        trials: BisectionPort,
        names: KafkaNames,
        *,
        compresses: bool,
        batch_size_bytes: int,
        ttl_header: str = TTL_HEADER,
        patience: Patience | None = None,
        clock: Clock,
    ) -> None:
        """Begins without known troubles.

        Args:
            compresses: The producers compress, so sizes are not known beforehand.
            batch_size_bytes: The largest batch that the producers make of several messages.
            ttl_header: The header that states a message's time to live; empty: none.
            patience: How messages are deferred; None: they are not.
        """
        self.is_careful = False
        self.unread: Callable[[], AbstractSet[int] | None] = frozenset
        self._topics = topics
        self._bisection = trials
        self._names = names
        self._compresses = compresses
        self._batch_size_bytes = batch_size_bytes
        self._ttl_header = ttl_header
        self._patience = patience
        self._turn = 0
        self._deferring: Mapping[str, int] = {}  # how many of each topic, by the last plan
        self._monotonic = clock.monotonic
        self._wall_ms = clock.wall_ms
        self._troubles = Troubles()
        self._allowance = Allowance(clock.monotonic())
        self._unknown = _Questions()
        self._doubtful = _Questions()
        self._partitions: dict[str, int] = {}
        self._guilty: dict[MessageName, str] = {}
        self._batch_limits: dict[str, int] = {}
        self._search: tuple[set[str], Future[Findings]] | None = None
        self._probe: Future[Findings] | None = None
        self._suspects: set[str] = set()
        self._searched: set[str] = set()
        self._term_at = self._planned_at = float("-inf")
        self._lost_s = 0.0
        self._look_up: set[str] = set()
        self._search_after = 0.0
        self._ahead_at = 0.0

    @property
    def unavailable(self) -> tuple[UnavailableTopic, ...]:
        """The topics that take nothing, or whose partitions do: their messages go elsewhere."""
        return self._troubles.given_up(self._monotonic(), self._wall_ms())

    def begin_term(self, progress: Progress | None) -> None:
        """Begins a term: what this node learnt in an earlier one may no longer hold.

        Topics that a transaction failed with lately, by the committed progress, are searched first.
        """
        now = self._monotonic()
        self._allowance.pass_time(now)
        self._allowance.hold(holding=False)
        if now - self._planned_at >= RECENT_S:
            self._suspects.clear()
        self._suspects |= self._troubles.begin_term(now)
        self._searched.clear()
        self._term_at = self._planned_at = now
        behind_s = 0.0 if progress is None else (self._wall_ms() - progress.due_ms) / 1000
        self._lost_s = behind_s if 0 <= behind_s < PATIENCE_S else 0.0
        self._search = self._probe = None
        self._unknown.clear()
        self._doubtful.clear()
        self._partitions.clear()
        self._guilty.clear()
        self._batch_limits.clear()
        self._look_up.clear()

    def failed(self, rows: DueRows) -> None:
        """Notes that a transaction with these messages failed: culprits are searched for."""
        self._suspects |= rows.topic_names()
        self._lost_s = 0.0
        self._topics.ask(rows.topic_names())

    def are_untaken(self, rows: DueRows) -> bool:
        """Whether some of these messages went where nothing is taken now, by Kafka's word.

        Not where another broker can come to lead: that passes within the transaction's time. Asked
        while Kafka does not answer that: each time it is asked about the topics. Where a message
        that may go anywhere went is not known.
        """
        names, now = rows.topic_names(), self._monotonic()
        topics = self._look_at(names, now)
        self._topics.ask(names)
        routed, stuck = self._routed(rows, topics)
        untaken = rows.take(stuck | (routed.partitions != rows.partitions)).topic_names()
        untaken = {name for name in untaken if self._troubles.cause(name) is not None}
        known = self._topics.find(untaken)  # however old: a topic's copies hardly change
        untaken = {name for name in untaken if name not in known or not known[name].may_move}
        for name in untaken:
            self._troubles.doubt(name, now)
        return bool(untaken)

    def would_stick(self, rows: DueRows) -> bool:
        """Whether a transaction with these messages cannot come to its end now.

        It has touched a partition that takes nothing, by Kafka's word, and so takes no marker.
        """
        if not self._troubles.are_there:
            return False
        _, stuck = self._routed(rows, self._look_at(rows.topic_names(), self._monotonic()))
        names = rows.take(stuck).topic_names()
        return any(self._troubles.cause(name) is not None for name in names)

    def committed(self) -> None:
        """Notes that a step was committed; its condemned messages are dealt with."""
        self._guilty.clear()
        self._look_up.clear()
        self._troubles.defer(self._deferring)

    def plan(self, rows: DueRows, ahead: Callable[[], Iterable[str]] = tuple) -> Plan | Hold:
        """Decides what to do with these messages now.

        `ahead` returns topics of messages that will be due soon, to be asked about now and then.
        """
        now = self._monotonic()
        self._allowance.pass_time(now)
        alive, expired = self._without_expired(rows)
        self._deferring = {}
        plan = self._plan(alive, ahead, now)
        self._allowance.hold(holding=isinstance(plan, Hold) and bool(plan.topics))
        if isinstance(plan, Hold):
            return plan
        self._planned_at = now
        return replace(plan, dead=[*expired, *plan.dead]) if expired else plan

    def _without_expired(self, rows: DueRows) -> tuple[DueRows, list[Condemned]]:
        found = find_expired(rows, self._wall_ms(), self._ttl_header)
        if not found:
            return rows, []
        numbers = np.array(list(found))
        details = zip(rows.take(numbers), found.values(), strict=True)
        dead = [Condemned(message, DeadReason.EXPIRED, detail) for message, detail in details]
        alive = np.ones(len(rows), np.bool_)
        alive[numbers] = False
        return rows.take(alive), dead

    def _plan(self, rows: DueRows, ahead: Callable[[], Iterable[str]], now: float) -> Plan | Hold:
        names = rows.topic_names()
        held = self._look_for_guilty(rows, names, now) if names else None
        self._take_probe(now)
        if now >= self._ahead_at:
            self._ahead_at = now + LOOK_AHEAD_S
            self._look_at(names | set(islice(ahead(), AHEAD_AT_MOST)), now)
            self._prune(names, now)
        if not names:
            return Plan(rows)
        if held is not None:
            return held
        topics = self._look_at(names, now)
        rows, stuck = self._routed(rows, topics)
        taken_in = self._well_ingress(now) if stuck.any() or self.is_careful else ()
        if stuck.any() and self._patience is not None:
            names |= {self._patience.ingress}
        if asking := self._asking(names, now):
            return self._hold("asking Kafka for", asking)
        held = self._wait_for(rows.take(stuck).topic_names(), now, can_defer=bool(taken_in))
        if held is not None:
            return held
        if self.is_careful and taken_in:
            stuck |= self._spared(rows, topics)
        plan = self._divide(rows, topics, stuck, taken_in, now)
        if isinstance(plan, Plan) and self._needs_all_brokers(plan.rows, topics):
            return replace(plan, is_at_risk=True)
        return plan

    def _needs_all_brokers(self, rows: DueRows, topics: Mapping[str, Topic]) -> bool:
        """Whether some of these go where any broker's absence counts, unlike what we write."""
        used = (topics.get(name) for name in rows.topic_names())
        if not any(topic is not None and topic.needs_all_brokers for topic in used):
            return False
        return self._patience is not None and not self._ingress_needs_all_brokers

    @property
    def _ingress_needs_all_brokers(self) -> bool:
        """Whether our own topics go no safer way, as far as is known."""
        assert self._patience is not None
        ingress = self._topics.find({self._patience.ingress}).get(self._patience.ingress)
        return ingress is None or ingress.needs_all_brokers

    def _spared(self, rows: DueRows, topics: Mapping[str, Topic]) -> NDArray[np.bool_]:
        """Returns which messages had better be deferred, though their partitions are well."""
        assert self._patience is not None
        spared = np.zeros(len(rows), np.bool_)
        if self._ingress_needs_all_brokers:
            return spared
        for number in np.unique(rows.topic_numbers).tolist():
            name = rows.topics[number]
            topic = topics.get(name)
            if topic is None or not (topic.needs_all_brokers and self._defers(name)):
                continue
            mine = np.flatnonzero(rows.topic_numbers == number)
            left_ms = self._patience.left_ms(rows.take(mine), self._wall_ms())
            spared[mine] = left_ms > 0  # those whose patience has ended go all the same
        return spared

    def _prune(self, names: set[str], now: float) -> None:
        self._troubles.prune(now)
        self._unknown.prune(names, now)
        self._doubtful.prune(names, now)
        if len(self._partitions) > AHEAD_AT_MOST:
            self._partitions.clear()

    # --- searches and probes

    def _look_for_guilty(self, rows: DueRows, names: set[str], now: float) -> Hold | None:
        """Starts a search when one is due, and takes its findings."""
        may_search = self._search is None and now >= self._search_after
        suspects = self._suspected(rows, names, now) if may_search else None
        if suspects:
            topics = self._look_at(suspects, now)
            if self._asking(suspects, now):
                return Hold("asking Kafka for the partitions to search")
            self._suspects -= suspects
            self._searched |= suspects
            known_bad = {n for n, topic in topics.items() if topic.state is not TopicState.PRESENT}
            if any(self._troubles.cause(name) is not None for name in known_bad):
                since = self._lost_since(now)
                if now - since < PATIENCE_S:  # else Kafka was away: topics come back in turn
                    self._allowance.charge(since, now)
            self._begin_search(rows, suspects - known_bad)
        while self._search is not None:
            names, future = self._search
            if not future.done():
                return Hold("looking for what Kafka refused")
            findings, self._search = future.result(), None
            self._learn(findings, rows, now)
            if findings.complete:
                self._begin_search(rows, names - findings.tried)
        return None

    def _suspected(self, rows: DueRows, names: set[str], now: float) -> set[str]:
        """Returns the topics that a transaction may have failed with, unless they were searched."""
        suspected = self._suspects & names
        if now - self._term_at < RECENT_S:
            term_ms = self._wall_ms() - (now - self._term_at) * 1000
            overdue = rows.expected_ms < term_ms - OVERDUE_S * 1000
            numbers = np.unique(rows.topic_numbers[overdue]).tolist()
            suspected |= {rows.topics[number] for number in numbers} - self._searched
        return suspected

    def _lost_since(self, now: float) -> float:
        """Returns since when a failed transaction, an election and the search have cost time.

        Time in which others went through is no such cost, nor that before a failure in this term,
        or before a term that has gone well for so long. Nor is what took `PATIENCE_S` or more: one
        failure and an election take less, so Kafka was away, and topics answer late after that.
        """
        lost_s = self._lost_s if now - self._term_at < RECENT_S else 0.0
        return self._planned_at - lost_s

    def _begin_search(self, rows: DueRows, names: set[str]) -> None:
        """Searches these topics, except those known to be in trouble."""
        names = {name for name in names if self._troubles.cause(name) is None}
        untried = rows.of_topics(names)
        if len(untried):
            # Such messages go to any partition: to another one each time they are tried.
            goes_anywhere = (untried.partitions == ANY_PARTITION) & (
                untried.records["key_length"] < 0
            )
            self._search = names, self._tried(untried, untried.take(goes_anywhere).topic_names())

    def _tried(self, rows: DueRows, everywhere: set[str]) -> Future[Findings]:
        """Starts a search that also tries every partition of some topics."""
        partitions = {n: topic.partitions for n, topic in self._topics.find(everywhere).items()}
        return self._bisection.search(rows, partitions)

    def _learn(self, findings: Findings, rows: DueRows, now: float) -> None:
        if not findings.complete:
            self._search_after = now + SEARCH_PAUSE_S
            log.warning("search without result", cause=findings.obstacle or "Kafka does not answer")
        elif not findings:
            self._look_up |= findings.tried
        self._guilty |= findings.refused
        self._batch_limits |= findings.batch_bytes
        since = self._lost_since(now)
        if findings.unavailable:
            self._allowance.charge(since, now)
        for name, cause in findings.unavailable.items():
            sample = rows.of_topics({name})
            if len(sample):
                self._troubles.found(name, cause, sample, now, since=since)

    def _take_probe(self, now: float) -> None:
        """Restores topics whose probes succeeded, and sends the next probes."""
        if self._probe is not None:
            if not self._probe.done():
                return
            findings, self._probe = self._probe.result(), None
            failed = set(findings.unavailable)
            passed = findings.tried - failed if findings.complete else set[str]()
            self._troubles.probed(passed, failed, findings.tried - passed - failed, now)
        rows = self._troubles.probes(now)
        if rows is not None:
            self._probe = self._tried(rows, rows.topic_names())

    # --- topics

    def _look_at(self, names: set[str], now: float) -> Mapping[str, Topic]:
        """Returns known topics that may be acted on; asks Kafka about the others."""
        found = self._topics.find(names)
        usable = {
            name: topic
            for name, topic in found.items()
            if topic.state is TopicState.PRESENT
            or self._unknown.is_answered(name, topic.asked_at, now)
        }
        for name in usable:
            self._unknown.end(name)
        new = [name for name in names - usable.keys() if self._unknown.begin(name, now)]
        old = [name for name in new if name in found]
        if old:
            self._topics.ask(old)
        self._troubles.look(usable, now)
        return usable

    def _routed(
        self, rows: DueRows, topics: Mapping[str, Topic]
    ) -> tuple[DueRows, NDArray[np.bool_]]:
        """Returns these rows, and which of them go where nothing is taken.

        Of a topic that is well in part, messages that may go anywhere go to one partition of that
        part. On the ingress topic those with keys may, too.
        """
        stuck = np.zeros(len(rows), np.bool_)
        records = rows.records
        for number in np.unique(rows.topic_numbers).tolist():
            name = rows.topics[number]
            is_unread = name == self._names.ingress and self.unread() != frozenset()
            if self._troubles.cause(name) is None and not is_unread:
                continue
            mine = np.flatnonzero(rows.topic_numbers == number)
            well = self._well(name, topics.get(name))
            if not well:
                stuck[mine] = True
                continue
            partitions = rows.partitions[mine]
            is_free = (partitions == ANY_PARTITION) & (
                (records["key_length"][mine] < 0) | is_unread
            )
            partitions = self._chosen(rows.take(mine), partitions, topics[name].partitions)
            partitions[is_free] = well[self._turn % len(well)]
            self._turn += 1
            stuck[mine] = np.isin(partitions, [*topics[name].troubled])
            records = records.copy() if records is rows.records else records
            records["partition"][mine[is_free]] = partitions[is_free]
        return replace(rows, records=records), stuck

    @staticmethod
    def _chosen(rows: DueRows, partitions: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        """Returns the partition that each message of a topic goes to; ANY_PARTITION: to any."""
        chosen = zip(partitions.tolist(), rows.keys(), strict=True)
        return np.array(
            [p if p >= 0 or key is None else partition_of(key, count) for p, key in chosen],
            np.int32,
        )

    def _well(self, name: str, topic: Topic | None) -> Sequence[int]:
        """Returns the partitions that take messages, as far as is known."""
        if topic is None or topic.state not in (TopicState.PRESENT, *TAKES_NOTHING):
            return ()
        shut = self.unread() if name == self._names.ingress else frozenset[int]()
        if shut is None:
            return ()
        if self._troubles.cause(name) is not None:
            if not (topic.troubled and self._troubles.is_partial(name)):
                return ()
            shut |= topic.troubled
        return [number for number in range(topic.partitions) if number not in shut]

    def _well_ingress(self, now: float) -> Sequence[int]:
        """Returns the partitions of the ingress topic by which messages can be deferred."""
        if self._patience is None:
            return ()
        name = self._patience.ingress
        return self._well(name, self._look_at({name}, now).get(name))

    def _wait_for(self, names: set[str], now: float, *, can_defer: bool) -> Hold | None:
        """Whether any of these topics, which take nothing, must be waited for."""
        patient = [
            name
            for name in names
            if self._troubles.has_patience(name, now) and not (can_defer and self._defers(name))
        ]
        if patient and self._allowance.suffices:
            return self._hold("waiting, as they take nothing, for", patient)
        for name in names:
            self._troubles.give_up(name)
        return None

    def _defers(self, name: str) -> bool:
        """Whether messages for a topic are deferred when it takes nothing."""
        patience = self._patience
        return patience is not None and name != patience.ingress and patience.of(name) > 0

    def _asking(self, names: set[str], now: float) -> list[str]:
        """Returns the topics of which Kafka's first answer is waited for."""
        return [name for name in names if self._waits_for_answer(self._unknown, name, now)]

    def _waits_for_answer(self, questions: _Questions, name: str, now: float) -> bool:
        waited_s = questions.waited_s(name, now)
        limit_s = PATIENCE_S if self._allowance.suffices else ANSWER_S
        return waited_s is not None and waited_s < limit_s

    @staticmethod
    def _hold(why: str, names: Iterable[str]) -> Hold:
        first, *others = sorted(names)
        more = f" and {len(others)} more" if others else ""
        return Hold(f"{why} topic {first}{more}", frozenset([first, *others]))

    # --- messages

    def _divide(
        self,
        rows: DueRows,
        topics: Mapping[str, Topic],
        stuck: NDArray[np.bool_],
        taken_in: Sequence[int],
        now: float,
    ) -> Plan | Hold:
        """Divides messages into those that can be forwarded and those that cannot.

        Those that are `stuck` go where nothing is taken; they are deferred by partitions in
        `taken_in`.
        """
        unsuited = self._find_unsuited(rows, topics, now)
        if isinstance(unsuited, Hold):
            return unsuited
        good = ~stuck
        deferred, dead = self._put_off(rows.take(stuck), taken_in, now)
        batch_limits: dict[str, int] = {}
        for number in np.unique(rows.topic_numbers).tolist():
            name = rows.topics[number]
            topic = topics.get(name)
            reason = _verdict(topic)
            if reason is not None:
                mask = (rows.topic_numbers == number) & good
                good &= ~mask
                dead += [Condemned(message, reason) for message in rows.take(mask)]
                continue
            if topic is not None:
                self._note_partitions(name, topic.partitions)
            batch_limits |= self._batch_limits_of(name, topic)
        if self._guilty:
            # Kafka refuses what is unsuited without saying why.
            unsuited = self._found_guilty(rows) | unsuited
        for row, verdict in sorted(unsuited.items()):
            if good[row]:
                good[row] = False
                (message,) = rows.take(slice(row, row + 1))
                dead.append(Condemned(message, *verdict))
        sound = rows if good.all() else rows.take(good)
        for name in deferred.topic_names():
            batch_limits |= self._batch_limits_of(name, self._topics.find({name}).get(name))
        partitions = {name: topic.partitions for name, topic in topics.items() if topic.partitions}
        return Plan(sound, dead, deferred, batch_limits, frozenset(self._look_up), partitions)

    def _put_off(
        self, rows: DueRows, taken_in: Sequence[int], now: float
    ) -> tuple[DueRows, list[Condemned]]:
        """Defers messages that go where nothing is taken; the others are dead letters."""
        deferred: list[DueRows] = []
        dead: list[Condemned] = []
        counts: dict[str, int] = {}
        for number in np.unique(rows.topic_numbers).tolist():
            name = rows.topics[number]
            mine = rows.take(rows.topic_numbers == number)
            cause = self._troubles.cause(name) or "None of its partitions is read"
            if taken_in and self._defers(name):
                later, mine = self._deferred(mine, taken_in, now)
                deferred.append(later)
                counts[name] = len(later)
            dead += [Condemned(each, DeadReason.TOPIC_UNAVAILABLE, cause) for each in mine]
        self._deferring = counts
        return join_rows(deferred, rows.wheels) if deferred else NO_DUE_ROWS, dead

    def _deferred(
        self, rows: DueRows, taken_in: Sequence[int], now: float
    ) -> tuple[DueRows, DueRows]:
        """Returns those of a topic's messages that come back, as they are sent, and the others."""
        assert self._patience is not None
        (name,) = rows.topic_names()
        now_ms = self._wall_ms()
        waited_ms = self._troubles.waited_ms(name, now)
        left_ms = self._patience.left_ms(rows, now_ms)
        partition = taken_in[self._turn % len(taken_in)]
        self._turn += 1
        sent = self._patience.deferred(rows, left_ms, waited_ms, partition, now_ms)
        known = self._topics.find({self._patience.ingress})
        unsuited = find_unsuited(
            sent, known, self._names, compresses=self._compresses, now_ms=now_ms
        )
        fits = left_ms > 0
        fits[[*unsuited]] = False
        return sent.take(fits), rows.take(~fits)

    def _find_unsuited(
        self, rows: DueRows, topics: Mapping[str, Topic], now: float
    ) -> Unsuited | Hold:
        """Returns the rows that their topics would refuse, by Kafka's latest answer.

        A topic may have gained partitions, or higher limits: Kafka is asked again before a
        message becomes a dead letter. If it does not answer, the message is tried.
        """
        found = find_unsuited(
            rows, topics, self._names, compresses=self._compresses, now_ms=self._wall_ms()
        )
        names = {row: rows.topics[rows.topic_numbers[row]] for row in found}
        doubtful = set()
        for row, (reason, _) in found.items():
            topic = topics[names[row]]
            by_partitions = reason is DeadReason.PARTITION_UNKNOWN
            known_at = topic.asked_at if by_partitions else topic.limits_at
            if not self._doubtful.is_answered(names[row], known_at, now):
                doubtful.add(names[row])
        for name in set(names.values()) - doubtful:
            self._doubtful.end(name)
        new = [name for name in doubtful if self._doubtful.begin(name, now)]
        if new:
            self._topics.ask(new)
        asking = [name for name in doubtful if self._waits_for_answer(self._doubtful, name, now)]
        if asking:
            return self._hold("asking Kafka again for", asking)
        return {row: verdict for row, verdict in found.items() if names[row] not in doubtful}

    def _note_partitions(self, name: str, partitions: int) -> None:
        """Refreshes clients, which learn of new partitions late and would refuse messages."""
        if partitions > self._partitions.setdefault(name, partitions):
            self._look_up.add(name)
            self._partitions[name] = partitions

    def _batch_limits_of(self, name: str, topic: Topic | None) -> Mapping[str, int]:
        """Returns a topic's largest batch, if that is below the client's."""
        known = _UNLIMITED
        if topic is not None and topic.limits is not None:
            known = topic.limits.max_message_bytes
        limit = min(known, self._batch_limits.get(name, _UNLIMITED))
        return {name: limit} if limit < self._batch_size_bytes else {}

    def _found_guilty(self, rows: DueRows) -> Unsuited:
        found: Unsuited = {}
        for row, message in enumerate(rows):
            cause = self._guilty.get(name_of(message))
            if cause is not None:
                found[row] = _reason_of(cause), cause
        return found


def _verdict(topic: Topic | None) -> DeadReason | None:
    """Returns why all messages of a topic are dead letters; None if they are not."""
    if topic is None:
        return None
    return {
        TopicState.MISSING: DeadReason.TOPIC_MISSING,
        TopicState.ILLEGAL: DeadReason.TOPIC_ILLEGAL,
    }.get(topic.state)


def condemn(message: DueMessage, code: str) -> Condemned:
    """Condemns a message that the client refused with this code."""
    return Condemned(message, _reason_of(code), code)


def _reason_of(cause: str) -> DeadReason:
    code = cause.partition(":")[0]
    if code == "MSG_SIZE_TOO_LARGE":
        return DeadReason.MESSAGE_TOO_LARGE
    if code == "_UNKNOWN_PARTITION":
        return DeadReason.PARTITION_UNKNOWN
    return DeadReason.REFUSED
