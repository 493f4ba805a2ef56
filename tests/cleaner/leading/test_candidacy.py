"""A candidacy's slow calls on a Kafka that misbehaves: each ends, and nothing is read twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from delaywheel_replica.cleaner.candidacy import CALL_MS, CHECKED_S, LEFT_OUT_MS, Candidacy
from delaywheel_replica.cleaner.kafka.follower import ControlFollower
from delaywheel_replica.cleaner.outside.clocks import SystemClock
from delaywheel_replica.cleaner.outside.ports import (
    IDS,
    Checked,
    ControlNotReadInTime,
    ControlUnreadable,
    KafkaAway,
    KafkaCallEnd,
    LeadingRefused,
    Record,
    StoredRecord,
)
from delaywheel_replica.core.election.events import (
    ControlRead,
    Event,
    InitFailed,
    InitsDone,
    ReadFailed,
)
from delaywheel_replica.core.protocol.control import NodeRecord, leader_record, node_record
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from support.cleaner.committing import AtOnce
from support.services.waiting import wait_until


class LongTopic:
    """A control topic of which a limited number of records can be read in one call."""

    def __init__(self, records: int, at_once: int) -> None:
        self._records = [_record(number) for number in range(records)]
        self._at_once = at_once
        self._unread: list[StoredRecord] = []
        self.position = 0
        self.fails = False

    def poll(self) -> list[StoredRecord]:
        unread, self._unread = self._unread, []
        return unread

    def read_to_end(self, timeout_s: float) -> list[StoredRecord]:
        del timeout_s
        if self.fails:
            raise ControlUnreadable("it was recreated")
        end = self.position + self._at_once
        self._unread += self._records[self.position : end]
        self.position = min(end, len(self._records))
        if self.position < len(self._records):
            raise ControlNotReadInTime(f"read {self.position}")
        return self.poll()

    def close(self) -> None: ...


class FakeKafka:
    """Hands out control topics."""

    def __init__(self, *topics: LongTopic) -> None:
        self._topics = list(topics)

    def check(self, **_: object) -> Checked:
        return Checked()

    def producers(self) -> None:
        raise AssertionError

    def control(self) -> LongTopic:
        return self._topics.pop(0)


def _record(number: int) -> StoredRecord:
    key, value = node_record("a", NodeRecord("disk-a", number))
    return StoredRecord(key.encode(), value, number)


def _candidacy(kafka: FakeKafka) -> tuple[Candidacy, ControlFollower]:
    follower = ControlFollower(kafka)  # type: ignore[arg-type]  # it gives no producers
    made = Candidacy(
        kafka,  # type: ignore[arg-type]
        follower,
        node="a",
        control_topic="control",
        clock=SystemClock(),
    )
    return made, follower


def _next_event(candidacy: Candidacy) -> Event:
    return wait_until("the call ended", candidacy.events)[0]


def test_a_topic_too_long_for_one_call_is_read_by_several() -> None:
    candidacy, follower = _candidacy(FakeKafka(LongTopic(25, at_once=10)))
    for _ in range(2):
        candidacy.read("t")
        assert isinstance(_next_event(candidacy), ReadFailed)
        # What was read so far is not the state of anything.
        assert (follower.offset, follower.state.nodes) == (-1, {})
    candidacy.read("t")
    read = _next_event(candidacy)
    assert isinstance(read, ControlRead)
    assert read.state.nodes == {"a": NodeRecord("disk-a", 24)}
    assert follower.state is read.state
    assert follower.offset == 25
    candidacy.close()


def test_after_an_error_nothing_that_was_read_is_believed() -> None:
    broken, whole = LongTopic(25, at_once=10), LongTopic(5, at_once=10)
    candidacy, follower = _candidacy(FakeKafka(broken, whole))
    candidacy.read("t")
    assert isinstance(_next_event(candidacy), ReadFailed)
    broken.fails = True
    candidacy.read("t")
    assert isinstance(_next_event(candidacy), ReadFailed)
    candidacy.read("t")
    assert isinstance(_next_event(candidacy), ControlRead)
    assert follower.state.nodes["a"].last_number == 4
    candidacy.close()


def test_what_a_call_was_not_prepared_for_is_raised_where_it_is_heard() -> None:
    """Without an event the election would wait for ever."""
    candidacy, _ = _candidacy(FakeKafka())  # it has no topic to give: IndexError
    candidacy.read("t")
    with pytest.raises(IndexError):
        wait_until("the call ended", candidacy.events)
    candidacy.close()


class Clock:
    """A clock that moves when a caller pauses."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def wall_ms(self) -> int:
        return 1_900_000_000_000 + self.monotonic_ms()

    def monotonic_ms(self) -> int:
        return round(self.now_s * 1000)

    def monotonic(self) -> float:
        return self.now_s


class Pausing(AtOnce):
    """A pause moves the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.pauses = 0

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        self.clock.now_s += seconds


def candidate(
    kafka: Any,
    clock: Clock,
    *,
    follower: ControlFollower | None = None,
    runner: Pausing | None = None,
) -> Candidacy:
    """A candidacy of node a; `kafka` is as much of Kafka as is used."""
    return Candidacy(
        kafka,
        follower or ControlFollower(kafka),
        node="a",
        control_topic="control",
        clock=clock,
        runner=runner or Pausing(clock),
    )


class Producers:
    """Commits all records to the topic, which shows them later."""

    is_untaken: Callable[[], bool]
    alone: int | None = None
    answered_ms: int | None = None

    def __init__(self, topic: LateTopic) -> None:
        self._topic = topic

    def init(self, number: int, timeout_ms: int) -> KafkaCallEnd:
        del number, timeout_ms
        return KafkaCallEnd(TransactionState.CONTINUE)

    def begin(self, number: int) -> None: ...

    def commit(self, number: int, last: Record, timeout_ms: int) -> KafkaCallEnd:
        del number, timeout_ms
        assert last.key is not None
        self._topic.add(last.key, last.value)
        return KafkaCallEnd(TransactionState.COMMITTED)

    def destroy(self) -> None: ...


class LateTopic:
    """A control topic that shows a record only after its end was asked for often enough."""

    def __init__(self, late: int) -> None:
        self._late = late
        self._records: list[tuple[int, StoredRecord]] = []
        self.asked = 0
        self.position = 0

    def add(self, key: bytes, value: bytes | None) -> None:
        record = StoredRecord(key, value, len(self._records))
        self._records.append((self.asked + self._late, record))

    def mark(self, index: int, token: str) -> None:
        key, value = leader_record(index, "b", token)
        self.add(key.encode(), value)

    def poll(self) -> list[StoredRecord]:
        return []

    def read_to_end(self, timeout_s: float) -> list[StoredRecord]:
        assert timeout_s >= 0
        shown = [record for at, record in self._records if at <= self.asked]
        self.asked += 1
        unread, self.position = shown[self.position :], len(shown)
        return unread

    def close(self) -> None: ...


class LateKafka:
    """A Kafka with one late topic."""

    def __init__(self, topic: LateTopic) -> None:
        self._topic = topic

    def check(self, **_: object) -> Checked:
        return Checked()

    def producers(self) -> Producers:
        return Producers(self._topic)

    def control(self) -> LateTopic:
        return self._topic


def marked(topic: LateTopic, token: str) -> tuple[Candidacy, Pausing]:
    """A candidacy that has committed its marks."""
    kafka, clock = LateKafka(topic), Clock()
    runner = Pausing(clock)
    candidacy = candidate(kafka, clock, runner=runner)
    candidacy.init(token, has_wheels=False)
    for index in range(IDS):
        candidacy.mark(token, index)
    candidacy.events()
    return candidacy, runner


@pytest.mark.parametrize("late", [0, 1, 5])
def test_marks_that_show_late_are_waited_for(late: int) -> None:
    """Otherwise an older leader's marks would be taken for newer ones."""
    topic = LateTopic(0)
    for index in range(IDS):
        topic.mark(index, "old")
    topic._late = late
    candidacy, runner = marked(topic, "mine")
    candidacy.read("mine")
    (read,) = candidacy.events()
    assert isinstance(read, ControlRead)
    assert [mark.token for mark in read.state.leaders.values()] == ["mine"] * IDS
    assert runner.pauses == late


@pytest.mark.parametrize("overwritten", [[0], [1], [0, 1]])
def test_marks_that_were_overwritten_are_not_waited_for(overwritten: list[int]) -> None:
    topic = LateTopic(2)
    candidacy, runner = marked(topic, "mine")
    for index in overwritten:
        topic.mark(index, "newer")
    candidacy.read("mine")
    (read,) = candidacy.events()
    assert isinstance(read, ControlRead)
    assert {i for i, mark in read.state.leaders.items() if mark.token == "newer"} == set(
        overwritten
    )
    assert runner.pauses == 2


def test_marks_that_never_show_are_given_up() -> None:
    candidacy, runner = marked(LateTopic(1_000_000), "mine")
    candidacy.read("mine")
    (failed,) = candidacy.events()
    assert isinstance(failed, ReadFailed)
    assert candidacy.error is not None
    assert 100 < runner.pauses < 1_000


def test_who_stands_by_reads_the_topic_now_and_then_until_it_was_read() -> None:
    topic = LongTopic(25, at_once=10)
    kafka, clock = FakeKafka(topic), Clock()
    follower = ControlFollower(kafka)  # type: ignore[arg-type]
    candidacy = candidate(kafka, clock, follower=follower)
    positions = []
    for _ in range(5):
        candidacy.follow()
        candidacy.follow()
        positions.append((topic.position, follower.offset, candidacy.error is None))
        clock.now_s += 1
    assert positions == [(10, -1, False), (20, -1, False), *[(25, 25, True)] * 3]
    assert candidacy.events() == []


class RefusingKafka(LateKafka):
    """A Kafka that is refused, or away."""

    def __init__(self, why: Exception) -> None:
        super().__init__(LateTopic(0))
        self._why = why

    def check(self, **_: object) -> Checked:
        raise self._why


@pytest.mark.parametrize(
    ("why", "stays"), [(LeadingRefused("RF 1"), True), (KafkaAway("away"), False)]
)
def test_what_a_node_is_refused_for_is_reported_though_another_leads(
    why: Exception, *, stays: bool
) -> None:
    kafka, clock = RefusingKafka(why), Clock()
    candidacy = candidate(kafka, clock)
    candidacy.init("t", has_wheels=False)
    assert candidacy.error == str(why)
    candidacy.led_by_another()
    assert candidacy.error == (str(why) if stays else None)


def test_a_candidate_is_waited_for_from_the_first_answer_of_its_check_on() -> None:
    """The whole check takes seconds where brokers are far: others would stand meanwhile."""
    kafka = LateKafka(LateTopic(0))
    candidacy, seen = candidate(kafka, Clock()), list[bool]()

    def check(*, has_wheels: bool, on_answer: Callable[[], None]) -> Checked:
        seen.append(candidacy.is_answered)
        on_answer()
        seen.append(candidacy.is_answered)
        raise KafkaAway(f"lost on the way: {has_wheels}")

    kafka.check = check  # type: ignore[method-assign,assignment]
    candidacy.init("t", has_wheels=False)
    assert seen == [False, True]
    candidacy.init("u", has_wheels=False)
    assert seen == [False, True, False, True]


class CountingKafka(LateKafka):
    """Counts how often it was checked."""

    def __init__(self) -> None:
        super().__init__(LateTopic(0))
        self.checks = 0

    def check(self, **known: object) -> Checked:
        self.checks += 1
        return super().check(**known)


def test_what_a_term_has_just_checked_is_not_checked_again() -> None:
    """A broker that is away costs each check its time, and a term may end while it looks."""
    kafka, clock = CountingKafka(), Clock()
    clock.now_s = 100.0
    candidacy = candidate(kafka, clock)
    candidacy.look_again(has_wheels=False)
    candidacy.init("t", has_wheels=False)
    assert isinstance(candidacy.events()[-1], InitsDone)
    assert kafka.checks == 1
    clock.now_s += CHECKED_S
    candidacy.init("u", has_wheels=False)
    assert kafka.checks == 2


class Held(Producers):
    """Some ids are not inited; `asked` has each id and its time."""

    def __init__(self, topic: LateTopic, held: set[int]) -> None:
        super().__init__(topic)
        self._held = held
        self.asked: list[tuple[int, int]] = []

    def init(self, number: int, timeout_ms: int) -> KafkaCallEnd:
        self.asked.append((number, timeout_ms))
        is_held = number in self._held
        return KafkaCallEnd(TransactionState.UNKNOWN if is_held else TransactionState.CONTINUE)


class HoldingKafka(LateKafka):
    """Hands out these producers."""

    def __init__(self, held: set[int]) -> None:
        super().__init__(LateTopic(0))
        self.made = Held(self._topic, held)

    def producers(self) -> Held:
        return self.made


ALL = set(range(IDS))


def test_one_that_is_not_left_out_is_waited_for_though_nothing_was_read_since() -> None:
    """The others were left out: none would vouch for any, and the term would end at once."""
    kafka, clock = HoldingKafka({0}), Clock()
    candidacy = candidate(kafka, clock)
    candidacy.last_marks, candidacy.last_left_out = {0: "t"}, ALL - {0}
    candidacy.init("u", has_wheels=False)
    (event,) = candidacy.events()
    assert isinstance(event, InitFailed)
    assert kafka.made.asked[-1] == (0, CALL_MS)


@pytest.mark.parametrize(("left_out", "alone"), [(ALL - {1}, 1), ({1}, None), (set[int](), None)])
def test_the_id_beside_which_no_other_is_left_is_inited_with_care(
    left_out: set[int], alone: int | None
) -> None:
    """An end of it that is in doubt leaves none that could vouch for it."""
    kafka, clock = HoldingKafka(set()), Clock()
    candidacy = candidate(kafka, clock)
    candidacy.last_left_out = left_out
    candidacy.init("u", has_wheels=False)
    assert kafka.made.alone == alone
    candidacy.init_again(0, CALL_MS)
    assert kafka.made.alone is None


@pytest.mark.parametrize(
    ("held", "own", "without"),
    [({1}, ALL, {1}), ({1}, ALL - {1}, None), (ALL - {0}, ALL, ALL - {0}), (ALL, ALL, None)],
)
def test_who_led_last_asks_shortly_for_what_it_can_do_without(
    held: set[int], own: set[int], without: set[int] | None
) -> None:
    """But for one that has to vouch for the others."""
    kafka, clock = HoldingKafka(held), Clock()
    topic = LateTopic(0)
    topic.mark(0, "t")
    follower = ControlFollower(LateKafka(topic))  # type: ignore[arg-type]
    follower.read_to_end(1)
    candidacy = candidate(kafka, clock, follower=follower)
    candidacy.last_marks = dict.fromkeys(own, "t")
    candidacy.init("u", has_wheels=False)
    (event,) = candidacy.events()
    assert (event.without if isinstance(event, InitsDone) else None) == without
    asked = [(each, LEFT_OUT_MS if each in own else CALL_MS) for each in range(IDS)]
    # One that turns out to be the only one is inited once more, with care.
    again = [(each, CALL_MS) for each in range(IDS) if held == ALL or held == ALL - {each}]
    assert sorted(kafka.made.asked) == sorted(asked + again)
