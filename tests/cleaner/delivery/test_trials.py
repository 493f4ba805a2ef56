"""What a search concludes from how trial transactions end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.bisection import LANES, TOGETHER, Bisection, Findings
from delaywheel_replica.cleaner.due.rows import RECORD, DueRows
from delaywheel_replica.cleaner.outside.clocks import SystemClock
from delaywheel_replica.cleaner.outside.ports import KafkaCallEnd, Record, RefusedRecord
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames
from support.cleaner.committing import AtOnce

NAMES = KafkaNames("c")
FENCED = "_FENCED: another producer"
NOWHERE: Mapping[str, int] = MappingProxyType({})
DENIED = "TOPIC_AUTHORIZATION_FAILED: not allowed"


class Still(SystemClock):
    """Searches take the time of their answers, however busy the machine is."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Brokers:
    """How topics answer, and which ids were inited.

    Attributes:
        causes: of topics: why the brokers refuse a transaction with them.
        silent: topics that do not answer.
        lost_answers: how many answers of each topic are lost.
        aborts: whether aborts get an answer.
        keeping: topics that keep the ids that have written to them.
        kept: these ids: they cannot be inited.
        takes_ms: how long answers take, by how many topics they are about.
        inited: the ids that were inited, in order.
        begun: how many trials began.
        closed: those whose producers were closed, in order.
        written: what producers wrote.
    """

    def __init__(self) -> None:
        self.causes: dict[str, str] = {}
        self.silent: set[str] = set()
        self.lost_answers: dict[str, int] = {}
        self.aborts = True
        self.keeping: set[str] = set()
        self.kept: set[int] = set()
        self.inited: list[int] = []
        self.begun = 0
        self.closed: list[int] = []
        self.written: list[Record] = []
        self.takes_ms: dict[int, int] = {}
        self.clock = Still()
        self._trials = Bisection(self.producer, NAMES, runner=AtOnce(), clock=self.clock)

    def producer(self, number: int) -> Producer:
        return Producer(self, number)

    def search(
        self, *topics: str, partition: int = -1, everywhere: Mapping[str, int] = NOWHERE
    ) -> Findings:
        records = np.zeros(len(topics), RECORD)
        records["topic"] = np.arange(len(topics))
        records["key_length"] = records["value_length"] = records["timestamp_ms"] = -1
        records["partition"] = partition
        rows = DueRows(records, topics, [WheelId("a", 1)], [memoryview(b"")])
        return self._trials.search(rows, everywhere).result(0)


class Producer:
    """One transactional id: `TrialProducer`."""

    def __init__(self, brokers: Brokers, number: int) -> None:
        self._brokers = brokers
        self._number = number
        self._topics: set[str] = set()

    @property
    def abortable(self) -> bool:
        return self.cause() is not None

    def init(self, timeout_ms: int) -> KafkaCallEnd:
        assert timeout_ms > 0
        self._brokers.inited.append(self._number)
        is_kept = self._number in self._brokers.kept
        return KafkaCallEnd(TransactionState.UNKNOWN if is_kept else TransactionState.CONTINUE)

    def begin(self) -> None:
        self._topics = set()
        self._brokers.begun += 1

    def write(self, records: Iterable[Record]) -> list[RefusedRecord]:
        written = [*records]
        self._brokers.written += written
        self._topics |= {record.topic for record in written}
        if self._topics & self._brokers.keeping:
            self._brokers.kept.add(self._number)
        return []

    def flush(self, timeout_ms: int) -> bool:
        takes_ms = self._brokers.takes_ms.get(len(self._topics), 0)
        self._brokers.clock.now_s += min(takes_ms, timeout_ms) / 1000
        if takes_ms > timeout_ms:
            return False
        lost = [name for name in self._topics if self._brokers.lost_answers.get(name)]
        for name in lost:
            self._brokers.lost_answers[name] -= 1
        # A refusal is an answer, too.
        return not lost and self._topics.isdisjoint(self._brokers.silent)

    def cause(self) -> str | None:
        causes = [cause for name, cause in self._brokers.causes.items() if name in self._topics]
        return causes[0] if causes else None

    def abort(self) -> KafkaCallEnd:
        return KafkaCallEnd(
            TransactionState.ABORTED if self._brokers.aborts else TransactionState.UNKNOWN
        )

    def warm(self, topics: Iterable[str], timeout_ms: int) -> bool:
        return bool(topics) and timeout_ms > 0

    def close(self) -> None:
        self._brokers.closed.append(self._number)


def test_all_topics_that_do_not_answer_are_found_in_one_search() -> None:
    brokers = Brokers()
    brokers.silent = {f"bad{number}" for number in range(10)}
    findings = brokers.search("good", *sorted(brokers.silent))
    assert findings.complete
    assert findings.unavailable.keys() == brokers.silent
    assert findings.tried == brokers.silent | {"good"}
    assert not findings.refused


def test_many_topics_that_are_well_are_tried_together() -> None:
    """One by one they would take longer than a search may last, and nothing is forwarded then."""
    brokers = Brokers()
    topics = [f"topic{number:03}" for number in range(1_000)]
    everywhere = dict.fromkeys(topics, 1) | {"topic500": 3}
    findings = brokers.search(*topics, everywhere=everywhere)
    assert findings.complete
    assert not findings
    assert findings.tried == set(topics)
    assert brokers.begun <= 1_000 / TOGETHER + LANES
    spread = {record.partition for record in brokers.written if record.topic == "topic500"}
    assert {0, 1, 2} <= spread


def test_what_is_wrong_is_found_among_many_topics() -> None:
    brokers = Brokers()
    topics = [f"topic{number:03}" for number in range(200)]
    brokers.silent, brokers.causes = {"topic020"}, {"topic100": DENIED}
    findings = brokers.search(*topics)
    assert findings.unavailable.keys() == {"topic020", "topic100"}
    assert findings.tried == set(topics)
    assert not findings.refused


def test_what_a_stuck_trial_wrote_is_let_go_at_once() -> None:
    brokers = Brokers()
    brokers.silent = {"bad"}
    brokers.search("bad")
    assert brokers.inited == [0, 4, 0, 4], "the next init of an id ends its transaction"
    assert brokers.closed == [0, 4], "no client goes with records that have no answer"


def test_ids_that_kafka_keeps_hold_up_no_other_search() -> None:
    """A trial has written to a partition whose broker is away: no init of its id succeeds."""
    brokers = Brokers()
    brokers.silent = brokers.keeping = {"bad"}
    assert brokers.search("bad").unavailable.keys() == {"bad"}
    assert brokers.kept == {0, 4}
    brokers.inited = []
    assert brokers.search("good").complete
    assert brokers.inited == [1, 0, 4], "a lane with free ids comes first"
    assert brokers.search(*"abcd").tried == set("abcd")
    brokers.kept.clear()
    brokers.search("good")
    brokers.inited = []
    assert brokers.search("good").complete
    assert brokers.inited == [0]


@pytest.mark.parametrize(("guard_ms", "is_silent"), [(100, True), (500, False)])
def test_a_topic_may_be_as_slow_as_its_brokers_are(guard_ms: int, *, is_silent: bool) -> None:
    """Else one that is well is deferred for as long as brokers take to get over a death."""
    brokers = Brokers()
    brokers.takes_ms = {1: guard_ms, 2: 2_000}
    findings = brokers.search("good")
    assert findings.complete
    assert bool(findings.unavailable) == is_silent


def test_one_lost_answer_does_not_make_a_topic_silent() -> None:
    brokers = Brokers()
    brokers.lost_answers = {"good": 1}
    findings = brokers.search("good")
    assert findings.complete
    assert not findings
    brokers.lost_answers = {"bad": 2}
    assert brokers.search("bad").unavailable.keys() == {"bad"}


def test_every_partition_is_tried_if_messages_may_go_to_any() -> None:
    brokers = Brokers()
    brokers.search("good", everywhere={"good": 3})
    tried = [record.partition for record in brokers.written if record.topic == "good"]
    assert tried == [-1, 0, 1, 2]
    brokers.search("good", partition=1, everywhere={"good": 3})
    tried = [record.partition for record in brokers.written if record.topic == "good"]
    assert tried[4:] == [1, 1], "its caller has named it"


def test_a_sample_that_is_refused_is_one_of_the_messages() -> None:
    brokers = Brokers()
    brokers.causes["bad"] = "INVALID_RECORD: no"
    findings = brokers.search("bad", everywhere={"bad": 3})
    assert [*findings.refused.values()] == ["INVALID_RECORD: no"]


def test_a_message_that_is_refused_is_found() -> None:
    brokers = Brokers()
    brokers.causes["bad"] = "INVALID_RECORD: no"
    findings = brokers.search("bad", "good")
    assert [*findings.refused.values()] == ["INVALID_RECORD: no"]
    assert not findings.unavailable


@pytest.mark.parametrize("cause", [DENIED, "INVALID_RECORD: it has no key"])
def test_a_guard_that_is_refused_blames_nobody(cause: str) -> None:
    brokers = Brokers()
    brokers.causes[NAMES.outcomes] = cause
    findings = brokers.search("good", "bad")
    assert not findings
    assert not findings.complete
    assert findings.obstacle == cause
    assert brokers.inited == [0, 1], "what was refused is aborted: nobody waits for it"


def test_a_guard_has_a_key_in_case_its_topic_is_compacted() -> None:
    brokers = Brokers()
    brokers.search("good")
    guards = [record for record in brokers.written if record.topic == NAMES.outcomes]
    assert guards
    assert all(record.key for record in guards)


def test_the_trials_of_another_leader_say_nothing_of_a_message() -> None:
    """Ids of trials belong to the cluster: the previous leader may still search, and fence us."""
    brokers = Brokers()
    brokers.causes["good"] = FENCED
    findings = brokers.search("good")
    assert not findings
    assert not findings.complete


def test_an_abort_without_an_answer_says_nothing_of_a_message() -> None:
    brokers = Brokers()
    brokers.aborts = False
    findings = brokers.search("good")
    assert not findings
    assert not findings.complete
