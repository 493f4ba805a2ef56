"""The cleaner's questions to Kafka about topics, their order, and which answers it forgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from delaywheel_replica.cleaner.delivery.topics import (
    CALLERS_AT_MOST,
    CALLERS_WAIT_S,
    CHUNK,
    CONFIRM_MISSING_S,
    FORGET_S,
    LIMITS_S,
    REFRESH_S,
    ROUTINE_MOST,
    SOON_S,
    CreateTopics,
    DestinationTopics,
    Limits,
    TopicDescription,
    TopicState,
)
from delaywheel_replica.cleaner.outside.ports import KafkaAway

CALL_S = 0.05
THERE = TopicDescription(TopicState.PRESENT, 3)


class Brokers:
    """Kafka, as `TopicAdmin`; each call takes `CALL_S` on its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.topics: dict[str, TopicDescription] = {}
        self.limits_of: dict[str, Limits] = {}
        self.is_away = False
        self.calls: list[list[str]] = []
        self.limit_calls: list[list[str]] = []

    def clock(self) -> float:
        return self.now

    def describe(self, names: Sequence[str]) -> Mapping[str, TopicDescription]:
        self.calls.append([*names])
        self.now += CALL_S
        if self.is_away:
            raise KafkaAway("describing topics")
        missing = TopicDescription(TopicState.MISSING)
        return {name: self.topics.get(name, missing) for name in names}

    def limits(self, names: Sequence[str]) -> Mapping[str, Limits | None]:
        self.limit_calls.append([*names])
        return {name: self.limits_of.get(name, Limits(1_000)) for name in names}

    def create(self, names: Sequence[str], how: CreateTopics) -> None:
        self.topics |= dict.fromkeys(names, TopicDescription(TopicState.PRESENT, how.partitions))


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def known(brokers: Brokers) -> DestinationTopics:
    return DestinationTopics(brokers, monotonic=brokers.clock)


def test_a_topic_is_asked_for_once_and_then_twice_a_second(
    brokers: Brokers, known: DestinationTopics
) -> None:
    brokers.topics["a"] = THERE
    assert known.find(["a"]) == {}
    pause_s = known.round()
    (topic,) = known.find(["a"]).values()
    assert (topic.state, topic.partitions, topic.limits) == (TopicState.PRESENT, 3, Limits(1_000))
    assert 0.3 < pause_s <= 0.5
    for _ in range(10):
        brokers.now += pause_s
        pause_s = known.round()
    assert brokers.calls == [["a"]] * 11
    assert brokers.limit_calls == [["a"]]


def test_what_is_used_no_more_is_asked_no_more_and_forgotten(
    brokers: Brokers, known: DestinationTopics
) -> None:
    brokers.topics["a"] = THERE
    known.find(["a"])
    for _ in range(round(FORGET_S)):
        brokers.now += 1
        known.round()
    assert len(brokers.calls) < 15
    brokers.now += 10
    known.round()
    assert known.find(["a"]) == {}


def test_a_missing_topic_is_believed_the_second_time(
    brokers: Brokers, known: DestinationTopics
) -> None:
    known.find(["a"])
    known.round()
    assert known.find(["a"]) == {}
    brokers.now += CONFIRM_MISSING_S
    known.round()
    assert known.find(["a"])["a"].state is TopicState.MISSING


def test_names_that_callers_invent_do_not_delay_those_of_messages(
    brokers: Brokers, known: DestinationTopics
) -> None:
    brokers.topics["needed"] = THERE
    for second in range(20):
        for number in range(CALLERS_AT_MOST):
            known.ask_for_caller(f"invented-{second}-{number}")
        known.find(["needed"])
        calls = len(brokers.calls)
        known.round()
        assert "needed" in known.find(["needed"])
        assert "needed" in brokers.calls[calls] or second
        assert all(len(call) <= CHUNK for call in brokers.calls[calls:])
        brokers.now += 0.5
    calls = len(brokers.calls)
    brokers.now += CALLERS_WAIT_S
    known.round()
    assert brokers.calls[calls:] == [["needed"]], "those that were invented are asked for no more"
    assert len(known.news()) <= CALLERS_AT_MOST * 20


def test_a_message_waits_for_one_call_about_callers_names_at_most(
    brokers: Brokers, known: DestinationTopics
) -> None:
    brokers.topics["needed"] = THERE
    for number in range(CALLERS_AT_MOST):
        known.ask_for_caller(f"invented-{number}")
    describe = brokers.describe

    def needed_meanwhile(names: Sequence[str]) -> Mapping[str, TopicDescription]:
        if len(brokers.calls) == 1:
            known.find(["needed"])
        return describe(names)

    brokers.describe = needed_meanwhile  # type: ignore[method-assign]
    known.round()
    assert brokers.calls[2] == ["needed"]


def test_so_many_names_of_callers_and_no_more_wait(
    brokers: Brokers, known: DestinationTopics
) -> None:
    for number in range(2 * CALLERS_AT_MOST):
        known.ask_for_caller(str(number))
    known.round()
    assert sum(map(len, brokers.calls)) == CALLERS_AT_MOST


def test_callers_are_answered_about_what_is_there_and_what_is_not(
    brokers: Brokers, known: DestinationTopics
) -> None:
    brokers.topics["there"] = THERE
    known.ask_for_caller("there")
    known.ask_for_caller("not")
    known.round()
    assert {name: topic.state for name, topic in known.news().items()} == {
        "there": TopicState.PRESENT
    }
    brokers.now += CONFIRM_MISSING_S
    known.round()
    assert {name: topic.state for name, topic in known.news().items()} == {
        "not": TopicState.MISSING
    }
    known.ask_for_caller("there")
    known.round()
    assert [*known.news()] == ["there"], "each question is answered, though nothing changed"


def test_asking_again_returns_the_present_limits(
    brokers: Brokers, known: DestinationTopics
) -> None:
    brokers.topics["a"] = THERE
    known.find(["a"])
    known.round()
    brokers.limits_of["a"] = Limits(5_000)
    brokers.topics["a"] = replace(THERE, partitions=4)
    known.ask(["a"])
    known.round()
    topic = known.find(["a"])["a"]
    assert (topic.partitions, topic.limits) == (4, Limits(5_000))
    assert topic.limits_at > 100 + CALL_S / 2


def test_an_answer_to_an_older_question_does_not_do(
    brokers: Brokers, known: DestinationTopics
) -> None:
    brokers.topics["a"] = THERE
    describe = brokers.describe

    def changed_meanwhile(names: Sequence[str]) -> Mapping[str, TopicDescription]:
        reported = describe(names)
        if len(brokers.calls) == 1:
            brokers.topics["a"] = replace(THERE, partitions=4)
            known.ask(["a"])
        return reported

    brokers.describe = changed_meanwhile  # type: ignore[method-assign]
    known.find(["a"])
    known.round()
    assert known.find(["a"])["a"].partitions == 4


@pytest.mark.parametrize(
    ("copies", "least", "state"),
    [
        ((2, 3), 2, TopicState.PRESENT),
        ((1, 3), 2, TopicState.SHRUNK),
        ((1, 2), 3, TopicState.SHRUNK),
        ((0, 1), 1, TopicState.SHRUNK),
    ],
)
def test_a_topic_with_too_few_replicas_in_sync_takes_nothing(
    brokers: Brokers,
    known: DestinationTopics,
    copies: tuple[int, int],
    least: int,
    state: TopicState,
) -> None:
    brokers.topics["a"] = replace(THERE, replicas={0: copies, 1: (2, 2)})
    brokers.limits_of["a"] = Limits(1_000, min_insync=least)
    known.find(["a"])
    known.round()
    assert known.find(["a"])["a"].state is state
    brokers.limits_of["a"] = Limits(1_000, min_insync=1)  # the operator gives way
    brokers.now += 0.5
    known.round()
    now = known.find(["a"])["a"]
    assert (now.state is TopicState.PRESENT) == (copies[0] >= 1), "not only after LIMITS_S"
    assert LIMITS_S > 1


def test_kafka_away_leaves_what_was_known(brokers: Brokers, known: DestinationTopics) -> None:
    brokers.topics["a"] = THERE
    known.find(["a"])
    known.round()
    brokers.is_away = True
    brokers.now += 1
    assert known.round() > 0
    assert known.find(["a"])["a"].state is TopicState.PRESENT
    known.ask(["a"])
    assert known.round() > 0
    calls = len(brokers.calls)
    assert known.round() > 0, "it is not asked again and again without a pause"
    assert len(brokers.calls) <= calls + 1


def test_missing_topics_are_made_where_the_operator_wants_that(brokers: Brokers) -> None:
    known = DestinationTopics(brokers, create=CreateTopics(7, None), monotonic=brokers.clock)
    known.find(["a"])
    known.ask_for_caller("never")
    known.round()
    assert known.find(["a"])["a"].partitions == 7
    assert "never" not in brokers.topics, "only for messages that are accepted"


def test_asking_about_topics_that_are_well_costs_the_same_however_many_there_are(
    brokers: Brokers, known: DestinationTopics
) -> None:
    names = [f"t{number}" for number in range(1_000)]
    brokers.topics = dict.fromkeys(names, THERE)
    known.find(names)
    known.round()
    brokers.topics["t7"] = TopicDescription(TopicState.LEADERLESS, 3)
    known.ask(["t7"])  # a transaction failed
    known.round()
    brokers.calls.clear()
    until = brokers.now + 12
    while brokers.now < until:
        known.find(names)
        pause_s = known.round()
        brokers.now += pause_s
    asked = [name for call in brokers.calls for name in call]
    rounds = 12 / REFRESH_S + 1
    assert len(asked) <= rounds * (ROUTINE_MOST + 1)
    assert set(asked) == set(names), "each in its turn"
    assert asked.count("t7") >= rounds / 2, "what is in trouble is asked about all the time"


def test_topics_of_messages_soon_due_are_known_before_anybody_asks(brokers: Brokers) -> None:
    soon = ["a", "b"]
    known = DestinationTopics(brokers, soon=lambda: soon, monotonic=brokers.clock)
    brokers.topics = dict.fromkeys("abc", THERE)
    known.round()
    assert known.find(["a", "b", "c"]).keys() == {"a", "b"}
    soon.append("d")
    brokers.topics["d"] = THERE
    for _ in range(20):
        pause_s = known.round()
        brokers.now += pause_s
    assert "d" in known.find(["d"])
    assert len(brokers.calls) < 20 * SOON_S


def test_topics_to_which_nothing_is_forwarded_here_are_asked_about_rarely(brokers: Brokers) -> None:
    wakes: list[float] = []
    known = DestinationTopics(
        brokers,
        soon=lambda: ["a"],
        monotonic=brokers.clock,
        on_wanted=lambda: wakes.append(brokers.now),
    )
    brokers.topics["a"] = THERE
    until = brokers.now + 6 * SOON_S
    while brokers.now < until:
        brokers.now += known.round()
    assert 5 <= len(brokers.calls) <= 7
    asked = len(brokers.calls)
    brokers.now += REFRESH_S
    for _ in range(3):
        known.find(["a"])
    assert wakes == [brokers.now], "it is to be asked about from now on, without waiting"
    known.round()
    assert len(brokers.calls) == asked + 1


@pytest.mark.parametrize("state", [TopicState.DENIED, TopicState.MISSING])
def test_what_takes_nothing_is_asked_about_on_every_node_all_the_time(
    brokers: Brokers, state: TopicState
) -> None:
    """A new leader judges messages by that answer."""
    known = DestinationTopics(brokers, soon=lambda: ["a"], monotonic=brokers.clock)
    brokers.topics["a"] = TopicDescription(state)
    for _ in range(4):
        brokers.now += known.round()
    known.round()
    brokers.topics["a"] = THERE
    until = brokers.now + 2 * REFRESH_S
    while brokers.now < until:
        brokers.now += CALL_S
        known.round()
    assert known.find(["a"])["a"].state is TopicState.PRESENT


def test_a_callers_question_is_repeated_if_kafka_was_away(brokers: Brokers) -> None:
    known = DestinationTopics(brokers, monotonic=brokers.clock)
    brokers.topics["a"] = THERE
    known.ask_for_caller("a")
    brokers.is_away = True
    known.round()
    brokers.is_away = False
    until = brokers.now + CALLERS_WAIT_S / 2
    while brokers.now < until:
        brokers.now += CALL_S
        known.round()
    assert "a" in known.news()
