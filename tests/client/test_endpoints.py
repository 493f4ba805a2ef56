"""Which address is next, and when: no network, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
from grpc import StatusCode
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel import Queue, Reason, TimedOutError
from delaywheel.client.exchange.endpoints import (
    ASK_LEAST_S,
    BACKOFF_MOST_S,
    REFRESH_S,
    RETRY_DELAY_MOST_S,
    STAY_S,
    Endpoints,
    NextAddress,
    NodeDescription,
    Report,
)
from delaywheel.client.exchange.question import get_question
from delaywheel.client.exchange.retry import AttemptFailure
from delaywheel.client.exchange.route import Attempts
from delaywheel.client.exchange.settings import ExchangeSettings
from delaywheel_proto.v1 import delaywheel_pb2 as pb

WELL = Report(healthy=True)
ILL = Report(healthy=False)
LATER = 1e6
ANYWHERE: dict[str, float] = {}


def endpoints(*given_addresses: str, seed: int = 1) -> Endpoints:
    return Endpoints(given_addresses, Random(seed))


def address_at(of: Endpoints, now_s: float) -> str | None:
    return of.next_address(now_s, 5.0, ANYWHERE).address


def fail(of: Endpoints, address: str, *, started_s: float = 0.0, now_s: float = 0.0) -> None:
    of.report(address, started_s=started_s, now_s=now_s, report=ILL)


def said(
    node: str, *, accepting: bool = True, cluster: str = "c1", **members: str
) -> NodeDescription:
    return NodeDescription(cluster, node, accepting, members)


class TestStaying:
    def test_requests_stay_with_an_address_and_change_it_after_a_while(self) -> None:
        of = endpoints("a", "b", "c")
        stays = {address_at(of, second * 0.1) for second in range(int(STAY_S * 7))}
        assert len(stays) == 1
        assert {address_at(of, turn * STAY_S * 1.3) for turn in range(50)} == {"a", "b", "c"}

    def test_clients_start_at_different_addresses(self) -> None:
        first = {address_at(endpoints("a", "b", "c", seed=seed), 0.0) for seed in range(50)}
        assert first == {"a", "b", "c"}

    def test_one_that_has_answered_is_chosen_before_one_that_has_not(self) -> None:
        for seed in range(20):
            of = endpoints("a", "b", "c", seed=seed)
            of.described("b", said("n2"), 0.0)
            assert address_at(of, 0.0) == "b"

    def test_one_where_a_call_lost_time_is_chosen_last_for_a_while(self) -> None:
        chosen = set()
        for seed in range(20):
            of = endpoints("a", "b", seed=seed)
            of.described("a", said("n1"), 0.0)
            of.described("b", said("n2"), 0.0)
            fail(of, "a", now_s=5.0)
            of.described("a", said("n1"), 20.0)
            assert address_at(of, 20.0) == "b"
            chosen.add(address_at(of, 100.0))
        assert chosen == {"a", "b"}

    def test_the_one_stayed_with_is_left_when_a_call_loses_time_there(self) -> None:
        of = endpoints("a", "b")
        stayed = address_at(of, 0.0)
        assert stayed is not None
        fail(of, stayed, now_s=5.0)
        of.described(stayed, said("n1"), 6.0)
        assert {address_at(of, 6.0), stayed} == {"a", "b"}

    def test_after_a_failure_requests_stay_with_one_of_the_others(self) -> None:
        of = endpoints("a", "b", "c", "d")
        stayed = address_at(of, 0.0)
        assert stayed is not None
        fail(of, stayed)
        assert len({address_at(of, second * 0.1) for second in range(100)}) == 1


class TestFailing:
    def test_another_one_is_taken_at_once(self) -> None:
        of = endpoints("a", "b")
        bad = address_at(of, 0.0)
        assert bad is not None
        fail(of, bad)
        other = "b" if bad == "a" else "a"
        assert [of.next_address(0.0, 5.0, ANYWHERE)] * 3 == [NextAddress(other)] * 3

    def test_a_failed_one_gets_no_call_until_it_describes_itself(self) -> None:
        of = endpoints("a", "b")
        fail(of, "a")
        assert {address_at(of, turn * STAY_S * 1.3) for turn in range(20)} == {"b"}
        of.described("a", said("n1", accepting=False), LATER)
        assert {address_at(of, LATER + turn * STAY_S * 1.3) for turn in range(20)} == {"b"}
        of.described("a", said("n1"), 2 * LATER)
        after = {address_at(of, 2 * LATER + turn * STAY_S * 1.3) for turn in range(40)}
        assert "a" in after

    def test_when_all_have_failed_only_one_call_tries_one_that_may_be_tried(self) -> None:
        of = endpoints("a", "b")
        fail(of, "a")
        fail(of, "b", now_s=0.001)
        tried = [address_at(of, 2.0) for _ in range(2)]
        assert sorted(map(str, tried)) == ["a", "b"]

    def test_one_that_hung_for_long_is_tried_after_one_that_refused(self) -> None:
        of = endpoints("a", "b")
        fail(of, "a", now_s=5.0)
        fail(of, "b", started_s=5.0, now_s=5.0)
        waits = of.next_address(5.0, 5.0, ANYWHERE)
        assert waits.address is None
        assert address_at(of, 5.0 + waits.wait_s) == "b"

    def test_the_only_one_is_waited_for_longer_each_time_up_to_a_bound(self) -> None:
        of = endpoints("a")
        now_s, waits = 0.0, []
        for _ in range(20):
            fail(of, "a", started_s=now_s, now_s=now_s)
            waits.append(of.next_address(now_s, 5.0, ANYWHERE).wait_s)
            now_s += waits[-1]
        assert waits[0] < 0.03
        assert BACKOFF_MOST_S / 2 <= waits[-1] <= BACKOFF_MOST_S

    def test_calls_that_fail_together_count_once(self) -> None:
        of = endpoints("a")
        for _ in range(16):
            fail(of, "a", now_s=1.0)
        assert of.next_address(1.0, 5.0, ANYWHERE).wait_s < 0.03

    def test_what_the_service_asks_for_is_waited_but_not_any_time(self) -> None:
        of = endpoints("a")
        of.report("a", started_s=0.0, now_s=0.0, report=Report(healthy=False, retry_delay_s=0.7))
        assert 0.7 <= of.next_address(0.0, 5.0, ANYWHERE).wait_s < 0.7 * 1.25
        of.report("a", started_s=1.0, now_s=1.0, report=Report(healthy=False, retry_delay_s=1e6))
        most_s = of.next_address(1.0, 5.0, ANYWHERE).wait_s
        assert RETRY_DELAY_MOST_S <= most_s < RETRY_DELAY_MOST_S * 1.25

    def test_what_says_nothing_of_a_node_leaves_it_as_it_is(self) -> None:
        of = endpoints("a", "b")
        fail(of, "a")
        for address in "ab":
            of.report(address, started_s=0.0, now_s=0.0, report=Report(healthy=None))
        assert {address_at(of, turn * STAY_S * 1.3) for turn in range(20)} == {"b"}

    def test_those_who_are_asked_to_wait_do_not_come_back_at_once(self) -> None:
        of = endpoints("a")
        waits = {of.backoff_s(1, 0.7) for _ in range(20)}
        assert len(waits) == 20
        assert max(waits) - min(waits) > 0.05

    def test_waiting_callers_hear_of_a_recovery(self) -> None:
        of = endpoints("a")
        fail(of, "a")
        assert of.report("a", started_s=1.0, now_s=1.0, report=WELL)
        assert not of.report("a", started_s=2.0, now_s=2.0, report=WELL)


class TestFinding:
    def test_a_found_one_is_used_once_it_has_answered_as_who_it_is(self) -> None:
        of = endpoints("a")
        assert of.ask(0.0) == ["a"]
        of.described("a", said("n1", n1="a", n2="b"), 0.0)
        fail(of, "a")
        assert address_at(of, 0.0) is None
        assert of.ask(0.0) == ["b"]
        of.described("b", said("n2", n1="a", n2="b"), 0.0)
        assert address_at(of, 0.0) == "b"

    @pytest.mark.parametrize("liar", [said("n3"), said("n2", cluster="c2")])
    def test_one_that_is_somebody_else_is_never_used(self, liar: NodeDescription) -> None:
        of = endpoints("a")
        of.described("a", said("n1", n2="b"), 0.0)
        assert not of.described("b", liar, 0.0)
        fail(of, "a")
        assert {address_at(of, turn * 1.0) for turn in range(100)} <= {"a", None}

    def test_a_given_one_stays_whatever_is_said(self) -> None:
        of = endpoints("a", "b")
        of.described("a", said("n1", n7="z"), 0.0)
        assert of.addresses == {"a", "b", "z"}
        of.described("a", said("n1", n1="a"), 0.0)
        assert of.addresses == {"a", "b"}
        of.described("a", said("n1"), 0.0)  # one that says nothing of members
        assert of.addresses == {"a", "b"}

    def test_a_node_that_a_given_address_reaches_needs_no_other_until_that_fails(self) -> None:
        of = endpoints("front")
        of.described("front", said("n1", n1="a", n2="b"), 0.0)
        assert of.addresses == {"front", "b"}
        of.described("b", said("n2", n1="a", n2="b"), 0.0)
        fail(of, "front")
        of.described("b", said("n2", n1="a", n2="b"), 1.0)
        assert of.addresses == {"front", "a", "b"}

    def test_one_whose_address_is_not_known_there_stays_as_it_was_found(self) -> None:
        of = endpoints("a")
        of.described("a", said("n1", n1="a", n2="b", n3="c"), 0.0)
        of.described("b", said("n2"), 0.0)
        of.described("a", said("n1", n1="a", n2=""), 1.0)
        assert of.addresses == {"a", "b"}, "n3 is gone, and no address was made of nothing"
        fail(of, "a", started_s=1.0, now_s=1.0)
        assert address_at(of, 1.0) == "b", "it stayed proven"
        of.described("a", said("n1", n1="a", n2="b2"), 2.0)
        assert of.addresses == {"a", "b2"}

    def test_an_address_that_changed_hands_has_to_answer_again(self) -> None:
        of = endpoints("a")
        of.described("a", said("n1", n2="b"), 0.0)
        of.described("b", said("n2"), 0.0)
        of.described("a", said("n1", n3="b"), 1.0)
        fail(of, "a", started_s=1.0, now_s=1.0)
        assert address_at(of, 1.0) is None

    def test_what_is_said_is_believed_for_a_while_and_less_after_a_failure(self) -> None:
        of = endpoints("a", "b")
        assert of.ask(0.0) == ["a", "b"]
        assert of.ask(0.0) == []
        of.described("a", said("n1"), 0.0)
        of.described("b", said("n2"), 0.0)
        assert of.ask(REFRESH_S * 0.7) == []
        now_s = REFRESH_S * 1.3
        [asked] = of.ask(now_s)
        of.described(asked, said("n1" if asked == "a" else "n2"), now_s)
        fail(of, asked, started_s=now_s, now_s=now_s)
        assert of.ask(now_s + ASK_LEAST_S * 0.9) == []
        assert sorted(of.ask(now_s + ASK_LEAST_S * 1.1)) == ["a", "b"]

    def test_a_failed_one_is_asked_about_once_a_second_and_not_twice_at_once(self) -> None:
        of = endpoints("a")
        asked = 0
        for tick in range(1000):
            for address in of.ask(tick * 0.01):
                asked += 1
                of.not_described(address, started_s=tick * 0.01, now_s=tick * 0.01, reached=False)
        assert 5 <= asked <= 11

    def test_one_that_takes_long_to_answer_is_not_asked_again_meanwhile(self) -> None:
        of = endpoints("a")
        assert of.ask(0.0) == ["a"]
        assert of.ask(5 * ASK_LEAST_S) == []

    def test_a_given_one_that_does_not_describe_itself_is_used_all_the_same(self) -> None:
        of = endpoints("a")
        of.ask(0.0)
        of.not_described("a", started_s=0.0, now_s=0.0, reached=True)
        assert address_at(of, 0.0) == "a"
        assert of.ask(REFRESH_S * 0.7) == []

    def test_an_answer_for_one_that_was_dropped_is_passed_over(self) -> None:
        of = endpoints("a")
        of.described("a", said("n1", n2="b"), 0.0)
        of.described("a", said("n1", n3="c"), 0.0)
        assert not of.described("b", said("n2"), 0.0)
        of.not_described("b", started_s=0.0, now_s=0.0, reached=False)
        assert not of.report("b", started_s=0.0, now_s=0.0, report=WELL)


SETTINGS = ExchangeSettings("deliver", 30.0, 5.0, Queue(), None)


class TestRoute:
    def test_no_attempt_goes_back_before_its_own_backoff_whatever_others_find(self) -> None:
        of = endpoints("a")
        route = Attempts(of, SETTINGS, 30.0)
        refused = Report(healthy=True, retry_delay_s=0.2, elsewhere=True)
        route.report("a", started_s=0.0, now_s=0.0, report=refused)
        of.report("a", started_s=0.0, now_s=0.0, report=WELL)
        step = route.step(0.0)
        assert step is not None
        assert 0.2 <= step.seconds < 0.25
        other = Attempts(of, SETTINGS, 30.0).step(0.0)
        assert other is not None
        assert other.address == "a"

    def test_a_wait_ends_with_the_deadline(self) -> None:
        of = endpoints("a")
        route = Attempts(of, SETTINGS, 1.0)
        route.report("a", started_s=0.0, now_s=0.0, report=Report(False, 60.0))  # noqa: FBT003  healthy
        assert route.step(0.0) == (None, 1.0)
        assert route.step(1.0) is None

    def test_a_wait_ends_when_it_is_known_that_nothing_listens(self) -> None:
        of = endpoints("a")
        route = Attempts(of, SETTINGS, 30.0)
        assert route.step(0.0) is not None
        of.reached("a", connected=False)
        route.report("a", started_s=0.0, now_s=0.0, report=Report(False, 60.0))  # noqa: FBT003  healthy
        assert route.step(0.5) == (None, 1.5)
        assert route.hopeless(1.9) is None
        hopeless = route.hopeless(2.0)
        assert hopeless is not None
        assert hopeless.startswith("no node was ever reached at a, tried for 2 s: ")

    def test_all_of_the_time_is_for_one_node_only_when_it_is_known_to_be_alone(self) -> None:
        of = endpoints("a")
        assert Attempts(of, SETTINGS, 4.0).step(0.0) == ("a", 2.0)
        of.described("a", said("n1", n1="a"), 0.0)
        assert Attempts(of, SETTINGS, 4.0).step(0.0) == ("a", 4.0)

    def test_a_service_with_too_much_to_do_gets_rest_at_all_addresses(self) -> None:
        of = endpoints("a", "b")
        route = Attempts(of, SETTINGS, 20.0)
        step = route.step(0.0)
        assert step is not None
        assert step.address is not None
        refused = Report(healthy=True, retry_delay_s=0.7, elsewhere=True, everywhere=True)
        route.report(step.address, started_s=0.0, now_s=0.0, report=refused)
        rest = route.step(0.1)
        assert rest is not None
        assert rest.address is None
        assert 0.6 <= rest.seconds < 0.6 + 0.7 * 0.25
        later = route.step(0.7 * 1.25)
        assert later is not None
        assert later.address is not None

    def test_no_leader_in_time_is_known_to_have_done_nothing(self) -> None:
        of = endpoints("a", "b")
        route = Attempts(of, SETTINGS, 2.0)
        question = get_question(pb.MessageRef(), find_place=False)
        now_s, asked = 0.0, []
        failure = AttemptFailure(StatusCode.UNAVAILABLE, "", Reason.NO_LEADER, 0.2)
        while (step := route.step(now_s)) is not None:
            if step.address is None:
                now_s += step.seconds
                continue
            asked.append(step.address)
            report = question.failed(failure)
            route.report(step.address, started_s=now_s, now_s=now_s, report=report)
        question.give_up("over")
        with pytest.raises(TimedOutError, match="NO_LEADER") as caught:
            question.answer()
        assert caught.value.outcome_known
        assert asked[0] != asked[1]
        assert len(asked) > 4
        assert address_at(of, now_s) is not None  # messages are taken there all the same


@dataclass(frozen=True)
class Node:
    """How a node of the next test treats every call.

    Attributes:
        takes: It accepts.
        takes_s: How long it lets a call wait; beyond the attempt's time it is a hang.
        describes: It answers DescribeCluster.
    """

    takes: bool
    takes_s: float
    describes: bool


GOOD = Node(takes=True, takes_s=0.001, describes=True)
BAD = st.sampled_from(
    [
        Node(takes=False, takes_s=0.001, describes=False),  # dead
        Node(takes=False, takes_s=0.001, describes=True),  # draining
        Node(takes=False, takes_s=99.0, describes=False),  # swallows everything
        Node(takes=False, takes_s=99.0, describes=True),  # its disk hangs
    ]
)


@given(
    bad=st.lists(BAD, max_size=4),
    given_count=st.integers(1, 5),
    good_at=st.integers(0, 4),
    describing=st.booleans(),
    seed=st.integers(0, 999),
)
def test_whoever_can_take_it_gets_it_in_time(
    bad: Sequence[Node], given_count: int, good_at: int, describing: bool, seed: int
) -> None:
    """One good node, given or discovered, among bad ones is reached before the deadline.

    Looking around ends at once here, or, with `describing` off, only after 2 s.
    """
    nodes = [*bad]
    nodes.insert(min(good_at, len(bad)), GOOD)
    names = {f"n{number}": str(number) for number in range(len(nodes))}
    given_addresses = [str(number) for number in range(min(given_count, len(nodes)))]
    if not any(nodes[int(address)].describes for address in given_addresses):
        given_addresses.append(str(nodes.index(GOOD)))
    of = Endpoints(tuple(dict.fromkeys(given_addresses)), Random(seed))
    route = Attempts(of, SETTINGS, 30.0)
    now_s, taken, looking = 0.0, False, list[tuple[float, float, str]]()
    while not taken and (step := route.step(now_s)) is not None:
        for address in of.ask(now_s):
            looking.append((now_s + (0.0 if describing else 2.0), now_s, address))
        if step.address is None:
            # News end a wait; else it lasts as long as it was to.
            ends_s = min([now_s + step.seconds, *(end_s for end_s, _, _ in looking)])
            now_s = max(now_s, ends_s)
        else:
            node, started_s = nodes[int(step.address)], now_s
            now_s += min(node.takes_s, step.seconds)
            taken = node.takes
            report = Report(healthy=taken)
            route.report(step.address, started_s=started_s, now_s=now_s, report=report)
        for look in [look for look in looking if look[0] <= now_s]:
            looking.remove(look)
            _, started_s, address = look
            node = nodes[int(address)]
            if node.describes:
                accepting = node.takes or node.takes_s > 1
                of.described(address, NodeDescription("c1", f"n{address}", accepting, names), now_s)
            else:
                of.not_described(address, started_s=started_s, now_s=now_s, reached=False)
    assert taken


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["turn", "well", "ill", "described", "not described", "changed", "ask"]
            ),
            st.sampled_from("abcd"),
            st.floats(0, 3),
        ),
        max_size=60,
    ),
    st.integers(0, 99),
)
@settings(deadline=None)
def test_no_order_of_events_breaks_a_rule(
    events: Sequence[tuple[str, str, float]], seed: int
) -> None:
    of = endpoints("a", "b", seed=seed)
    now_s, proven = 0.0, {"a", "b"}
    failed = dict[str, float]()
    for event, address, after_s in events:
        now_s += after_s
        known = of.addresses
        if event == "turn":
            attempt = of.next_address(now_s, 5.0, ANYWHERE)
            assert 0 <= attempt.wait_s <= RETRY_DELAY_MOST_S
            healthy = (proven & known) - set(failed)
            if healthy:
                assert attempt.address in healthy
            else:
                assert attempt.address is None or attempt.address in proven & known
        elif event in {"well", "ill"} and address in proven & known:
            report = WELL if event == "well" else ILL
            of.report(address, started_s=now_s, now_s=now_s, report=report)
            failed.pop(address, None)
            if event == "ill":
                failed[address] = now_s
        elif event == "described" and of.described(
            address, said(f"n{address}", nc="c", nd="d"), now_s
        ):
            proven.add(address)
            failed.pop(address, None)
        elif event == "not described" and address in failed:
            of.not_described(address, started_s=now_s, now_s=now_s, reached=False)
        elif (
            event == "changed"
            and address in "ab"
            and of.described(address, said(f"n{address}", nc="c"), now_s)
        ):
            failed.pop(address, None)
            failed.pop("d", None)
            proven.discard("d")
        elif event == "ask":
            asked = of.ask(now_s)
            assert len(asked) == len(set(asked))
            assert set(asked) <= known
        assert {"a", "b"} <= of.addresses <= set("abcd")
