"""The slow calls of a candidacy, in the background: checks, inits, marks, reads.

Meanwhile the main thread keeps its row fresh. Each call ends with one event for the election
machine (core/election/machine.py), which alone decides what comes next; at most one call runs at a
time. In a term, ids are inited again beside it (core/election/id_turns.py).
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial

from delaywheel.transactional import MAX_CALL_MS
from delaywheel_replica.cleaner.kafka.follower import ControlFollower, ControlTopicBroken
from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.cleaner.outside.ports import (
    IDS,
    ControlUnreadable,
    KafkaAway,
    KafkaCallEnd,
    KafkaPort,
    LeadingRefused,
    ProducersPort,
    Record,
)
from delaywheel_replica.cleaner.outside.runner import Runner, ThreadRunner
from delaywheel_replica.core.election.eligibility import BrokerClock
from delaywheel_replica.core.election.events import (
    ControlRead,
    Event,
    InitFailed,
    InitsDone,
    MarkReport,
    ReadFailed,
)
from delaywheel_replica.core.protocol.control import ControlState, leader_record
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.process.logs import get_logger

CALL_MS = 5_000
LEFT_OUT_MS = 1_000
"""How long an id may take that can be done without."""
MARK_MS = MAX_CALL_MS
"""How long a mark may take: on brokers slow enough to lead, a candidate must succeed."""

FOLLOW_S = 1.0
"""How long a candidacy waits at most for a reading that began before it."""

FOLLOW_AGAIN_S = 1.0

LOOK_AGAIN_S = 300.0
"""How often a leader checks brokers and topics again."""

LOOK_AT_REST_S = 10.0
"""The same while a broker is not checked, or no group can be asked about half messages."""

CHECKED_S = 3.0
"""A look that has ended so shortly before is the check of a candidacy."""

LOOK_SOON_S = 2.0
"""The same while its transactions fail."""

READ_AGAIN_S = 0.01

log = get_logger(__name__)


class Candidacy:
    """Carries out what the election machine requests before a node leads.

    Attributes:
        loose: The ids of its marks whose ends may have been sent twice.
        without: The ids that could not be inited.
        last_marks: What this process may do without, as it led last, if nobody has marked it since
            (core/election/id_turns.py).
        last_left_out: What was left out then, as it knew; counts until the topic is read again.
        is_answered: Kafka has answered since the newest candidacy began.
        broker_clock: The brokers' clock, as the last candidacy's marks showed it; None: unknown.
        warnings: What does not keep it from leading, as of the last check.
        halves_objection: Why no group can be asked about half messages, likewise; None: it can.
        objection: Why the next candidacy would be refused, as `look_again` found.
    """

    def __init__(
        self,
        kafka: KafkaPort,
        follower: ControlFollower,
        *,
        node: str,
        control_topic: str,
        on_event: Callable[[], None] = lambda: None,
        clock: Clock,
        runner: Runner | None = None,
        init_runner: Runner | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            follower: Follows the control topic; no other thread may use it while a call runs.
            on_event: Called in the background when `events` has something.
            init_runner: Runs the inits in a term; None: a thread for each id.
        """
        self.producers: ProducersPort | None = None
        self.is_answered = False
        self.broker_clock: BrokerClock | None = None
        # When the last mark was begun and reported, by the monotonic clock.
        self._mark_ms = (0, 0)
        self.warnings: tuple[str, ...] = ()
        self.halves_objection: str | None = None
        self.objection: str | None = None
        self._look_at = self._looked_at = 0.0
        # When all was last found to be well.
        self._checked_at = -CHECKED_S
        self._error: str | None = None
        self._is_refused = False
        self._follow_error: str | None = None
        self._marked: set[int] = set()
        self.loose: set[int] = set()
        self.without: frozenset[int] = frozenset()
        self.last_marks: Mapping[int, str] = {}
        self.last_left_out: AbstractSet[int] = frozenset()
        self._kafka = kafka
        self._follower = follower
        self._node = node
        self._control_topic = control_topic
        self._on_event = on_event
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        # Each is incremented by one thread only.
        self._started = 0
        self._ended = 0
        self._follow_at = 0.0
        self._clock = clock
        self._runner = runner or ThreadRunner(IDS, job="candidacy", call="init")
        # One each: an id that a broker keeps which is away holds up no other.
        self._init_runners = [
            init_runner or ThreadRunner(1, job="init", call="init") for _ in range(IDS)
        ]
        self._renewed: queue.SimpleQueue[tuple[ProducersPort, int, KafkaCallEnd]] = (
            queue.SimpleQueue()
        )

    def events(self) -> list[Event]:
        """Returns the results of the calls that ended since the previous call.

        What one raised unexpectedly is raised again: no event would ever follow, so the process has
        to end.
        """
        found = []
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            found.append(event)
        return found

    @property
    def error(self) -> str | None:
        """Why the last call failed, for people; None if it succeeded."""
        return self._error or self._follow_error

    def led_by_another(self) -> None:
        """Clears the error, since another node leads; an objection to this node itself stays."""
        self.last_marks = {}
        if not self._is_refused:
            self._error = None

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way, during which the follower must not be used."""
        return self._started > self._ended

    def follow(self) -> None:
        """Reads the control topic to its end for the first time, retrying now and then.

        A standby needs it as well: it shows which wheels are registered for its node.
        """
        if not self.is_busy and self._clock.monotonic() >= self._follow_at:
            self._follow_at = self._clock.monotonic() + FOLLOW_AGAIN_S
            self._start(self._follow)

    def look_again(self, *, has_wheels: bool) -> None:
        """Repeats the checks of a candidacy now and then: a leader may lead for months."""
        if not self.is_busy and self._clock.monotonic() >= self._look_at:
            self._start(partial(self._look_again, has_wheels=has_wheels))

    def look_soon(self) -> None:
        """Has the checks repeated sooner: a transaction has failed, perhaps for our own topics."""
        self._look_at = min(self._look_at, self._looked_at + LOOK_SOON_S)

    def init(self, token: str, *, has_wheels: bool) -> None:
        """Makes the producers and inits every id; ends with InitsDone or InitFailed."""
        self.is_answered = False
        self.producers = producers = self._kafka.producers()
        self._start(lambda: self._init(producers, token, has_wheels=has_wheels))

    def init_again(self, number: int, timeout_ms: int) -> None:
        """Inits one id of this term anew; `inited_again` returns how that ended."""
        assert self.producers is not None
        producers = self.producers
        producers.alone = None  # another one vouches for it

        def run() -> None:
            try:
                self._renewed.put((producers, number, producers.init(number, timeout_ms)))
            except BaseException as error:  # noqa: BLE001 - raised again where it is heard
                self._events.put(error)
            self._on_event()

        self._init_runners[number].start(run)

    def inited_again(self) -> list[tuple[int, KafkaCallEnd]]:
        """Returns the ids of this term whose new inits ended since the previous call."""
        found = []
        while not self._renewed.empty():
            producers, number, end = self._renewed.get()
            if producers is self.producers:
                found.append((number, end))
        return found

    def mark(self, token: str, index: int) -> None:
        """Commits the leader record of one id; ends with MarkReport."""
        assert self.producers is not None
        producers = self.producers
        self._start(lambda: self._mark(producers, token, index))

    def read(self, token: str) -> None:
        """Reads the control topic to its end; ends with ControlRead or ReadFailed."""
        self._start(lambda: self._read(token))

    def destroy(self) -> None:
        """Closes the producers."""
        if self.producers is not None:
            self.producers.destroy()
            self.producers = None

    def close(self) -> None:
        """Ends the background work, or leaves it to its timeouts."""
        self.destroy()
        self._runner.close()
        for runner in self._init_runners:
            runner.close()

    def _start(self, call: Callable[[], Event | None]) -> None:
        self._started += 1

        def run() -> None:
            try:
                event = call()
                self._ended += 1
                if event is not None:
                    self._events.put(event)
            except BaseException as error:  # noqa: BLE001 - raised again where it is heard
                self._events.put(error)
            self._on_event()

        self._runner.start(run)

    def _follow(self) -> None:
        try:
            self._follower.read_to_end(FOLLOW_S)
        except (ControlUnreadable, ControlTopicBroken) as error:
            self._follow_error = str(error)
        else:
            self._follow_error = None

    def _look_again(self, *, has_wheels: bool) -> None:
        with contextlib.suppress(KafkaAway):
            try:
                self._check(has_wheels=has_wheels)
            except LeadingRefused as refusal:
                if self.objection != str(refusal):
                    log.warning("kafka objection", objection=str(refusal))
                self.objection = str(refusal)
                self._look_at = self._looked_at + LOOK_SOON_S
                self._on_event()

    def _check(self, *, has_wheels: bool, on_answer: Callable[[], None] = lambda: None) -> None:
        self._looked_at = self._clock.monotonic()
        self._look_at = self._looked_at + LOOK_AGAIN_S
        self._checked_at = self._looked_at - CHECKED_S
        warnings, objection, are_wanted, are_all_checked = self._kafka.check(
            has_wheels=has_wheels, on_answer=on_answer
        )
        self._checked_at = self._clock.monotonic()
        if not are_all_checked:
            self._look_at = self._looked_at + LOOK_AT_REST_S
        if objection is not None and are_wanted:
            self._look_at = self._looked_at + LOOK_AT_REST_S
            warnings = (*warnings, f"half messages are refused: {objection}")
        for warning in warnings:
            if warning not in self.warnings:
                log.warning("kafka warning", warning=warning)
        self.warnings, self.objection = warnings, None
        self.halves_objection = objection

    def _init(self, producers: ProducersPort, token: str, *, has_wheels: bool) -> Event:
        self._marked.clear()
        self.loose.clear()
        self._follower.expect(token)
        try:
            # The look of the term that has just ended is not repeated: it may take seconds.
            if self._clock.monotonic() - self._checked_at >= CHECKED_S:
                self._check(has_wheels=has_wheels, on_answer=self._answered)
        except (KafkaAway, LeadingRefused) as refusal:
            self._error = str(refusal)
            self._is_refused = isinstance(refusal, LeadingRefused)
            return InitFailed(
                self._clock.monotonic_ms(), token, TransactionState.UNKNOWN, touched=False
            )
        self._is_refused = False
        self._answered()
        is_read, last_marks = self._follower.offset >= 0, self.last_marks
        known_out = self._follower.state.left_out.ids if is_read else self.last_left_out
        failed = self._init_all(producers, known_out)
        if failed:
            self._error = next(iter(failed.values())).cause
        # What is not known yet to be left out may be by now, where nothing was read.
        may_lead = not is_read or failed.keys() <= known_out | last_marks.keys()
        fenced = _is_fenced(failed)
        if not fenced and may_lead and len(failed.keys() | known_out) < IDS:  # one can vouch
            self.without = frozenset(failed)
            return InitsDone(self._clock.monotonic_ms(), token, self.without, last_marks)
        return InitFailed(
            self._clock.monotonic_ms(),
            token,
            TransactionState.FENCED if fenced else TransactionState.UNKNOWN,
        )

    def _answered(self) -> None:
        """Has others wait for this candidate: its check takes many answers of distant brokers."""
        self.is_answered = True
        self._on_event()

    def _init_all(
        self, producers: ProducersPort, known_out: AbstractSet[int]
    ) -> dict[int, KafkaCallEnd]:
        """Inits every id; returns how those ended that could not be.

        What may be done without has less time, unless no other one is left to vouch for it.
        """
        spared = known_out | self.last_marks.keys()
        producers.alone = _only(set(range(IDS)) - known_out)
        failed = self._init_ids(
            producers, {n: LEFT_OUT_MS if n in spared else CALL_MS for n in range(IDS)}
        )
        hasty = failed.keys() & spared - known_out
        if hasty and len(failed.keys() | known_out) == IDS and not _is_fenced(failed):
            others = {n: end for n, end in failed.items() if n not in hasty}
            failed = others | self._init_ids(producers, dict.fromkeys(hasty, CALL_MS))
        alone = _only(set(range(IDS)) - failed.keys())
        if alone not in {None, producers.alone} and not _is_fenced(failed):
            producers.alone = alone
            failed |= self._init_ids(producers, {alone: CALL_MS})
        return failed

    def _init_ids(
        self, producers: ProducersPort, times_ms: Mapping[int, int]
    ) -> dict[int, KafkaCallEnd]:
        """Inits ids, each within its time; returns how those ended that could not be."""
        calls = [partial(producers.init, number, ms) for number, ms in times_ms.items()]
        ends = zip(times_ms, self._runner.together(calls), strict=True)
        return {n: end for n, end in ends if end.verdict is not TransactionState.CONTINUE}

    def _mark(self, producers: ProducersPort, token: str, index: int) -> Event:
        key, value = leader_record(index, self._node, token)
        began_ms = self._clock.monotonic_ms()
        producers.begin(index)
        record = Record(self._control_topic, key.encode(), value, [], partition=0)
        ended = producers.commit(index, record, MARK_MS)
        self._mark_ms = began_ms, self._clock.monotonic_ms()
        if ended.verdict.is_committed:
            self._marked.add(index)
            if ended.verdict is TransactionState.COMMITTED_LOOSE:
                self.loose.add(index)
        else:
            self._error = ended.cause
        return MarkReport(self._clock.monotonic_ms(), token, index, ended.verdict)

    def _read(self, token: str) -> Event:
        try:
            state = self._read_marks()
        except (ControlUnreadable, ControlTopicBroken) as error:
            self._error = str(error)
            return ReadFailed(self._clock.monotonic_ms(), token)
        self._error = self._follow_error = None
        self.broker_clock = self._found_clock()
        return ControlRead(self._clock.monotonic_ms(), token, state)

    def _found_clock(self) -> BrokerClock | None:
        """Bounds the broker's clock: it took the last mark between its start and its report."""
        taken_ms = self._follower.marked_at_ms
        if taken_ms < 0:
            return None
        began_ms, ended_ms = self._mark_ms
        return BrokerClock(taken_ms - ended_ms, taken_ms - began_ms, ended_ms)

    def _read_marks(self) -> ControlState:
        """Reads to the end, until every committed mark has been seen.

        A commit is answered before its markers are written: for a moment the last stable offset may
        lie below the mark, and the newest visible mark is not the newest.
        """
        deadline = self._clock.monotonic() + CALL_MS / 1000
        while True:
            state = self._follower.read_to_end(max(0.0, deadline - self._clock.monotonic()))
            if self._follower.marks >= self._marked:
                return state
            if self._clock.monotonic() >= deadline:
                raise ControlUnreadable("the control topic does not show what was committed to it")
            self._runner.pause(READ_AGAIN_S)


def _only(ids: AbstractSet[int]) -> int | None:
    return next(iter(ids)) if len(ids) == 1 else None


def _is_fenced(failed: Mapping[int, KafkaCallEnd]) -> bool:
    return any(end.verdict is TransactionState.FENCED for end in failed.values())
