"""Changes of named messages that clients gather: callers and calls are stepped by hand."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from delaywheel.client.changing import gathering
from delaywheel.client.changing.gathering import GatheredChanges
from delaywheel.client.changing.named_changes import Again, Doubts
from delaywheel.client.transport.port import finished
from delaywheel.client.transport.threads import ThreadTransport
from delaywheel.errors import CallFailedError, RefusedError, TimedOutError
from delaywheel.reasons import Reason


def of(*params: tuple[bool, int]) -> pytest.MarkDecorator:
    """Has a test's `steps` block or not, and make so many calls at once."""
    return pytest.mark.parametrize("steps", params, indirect=True)


@types.coroutine
def until(condition: Callable[[], bool]) -> Generator[Callable[[], bool], None, None]:
    """Suspends a coroutine until `Steps.run` finds that the condition is true."""
    yield condition


@dataclass(eq=False)
class Stepped:
    """A coroutine that is stepped by hand."""

    work: Coroutine[Any, Any, Any]
    goes_on: Callable[[], bool] = lambda: True
    is_over: bool = False
    result: Any = None
    message: Any = None

    def step(self, thrown: BaseException | None = None) -> None:
        try:
            self.goes_on = self.work.throw(thrown) if thrown else self.work.send(None)
        except StopIteration as end:
            self.is_over, self.result = True, end.value
        except BaseException as error:  # noqa: BLE001 - it is what became of it
            self.is_over, self.result = True, error


@dataclass(eq=False)
class Call:
    """A call under way; `told` are the numbers that it has settled, or let go."""

    messages: list[Any]
    deadline_s: float
    tell: Callable[[int, Any], None]
    doubts: Doubts
    doubted: dict[int, int]
    told: set[int] = field(default_factory=set)
    ends: BaseException | bool = False

    def answer(self, number: int, result: Any) -> None:
        self.told.add(number)
        self.tell(number, result)

    def begin(self) -> None:
        """Leaves out whose callers have left before it is made."""
        numbers = [*range(len(self.messages))]
        self.told.update({*numbers} - {*self.doubts.begin(numbers)})
        self.ends = not self.left()

    def left(self) -> list[int]:
        return [number for number in range(len(self.messages)) if number not in self.told]

    def answer_all(self) -> None:
        for number in self.left():
            self.answer(number, self.messages[number])
        self.ends = True


class News:
    def __init__(self, steps: Steps) -> None:
        self.steps, self.is_told = steps, False

    def tell(self) -> None:
        self.is_told = True

    async def wait(self, most_s: float) -> None:
        end_s = self.steps.now_s + most_s
        await until(lambda: self.is_told or self.steps.now_s >= end_s)


class Steps:
    """A transport with a clock of its own; `blocks`: as threads do, where others await."""

    def __init__(self, *, blocks: bool, calls_at_once: int) -> None:
        self.blocks, self.now_s = blocks, 1000.0
        self.calls: list[Call] = []
        self.tasks: list[Stepped] = []
        self.changes = GatheredChanges[Any, Any](
            cast("Any", self), self.call, calls_at_once=calls_at_once
        )

    def news(self) -> News:
        return News(self)

    async def begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self.blocks:
            await work
        else:
            self.tasks.append(Stepped(work))

    async def call(
        self, messages: Sequence[Any], deadline_s: float, tell: Any, doubts: Doubts
    ) -> None:
        call = Call([*messages], deadline_s, tell, doubts, dict(doubts))
        call.begin()
        self.calls.append(call)
        await until(lambda: call.ends is not False)
        if isinstance(call.ends, BaseException):
            raise call.ends

    def ask(self, message: Any, within_s: float = 60, *, runs: bool = True) -> Stepped:
        task = Stepped(self.changes.change(message, self.now_s + within_s), message=message)
        self.tasks.append(task)
        task.step()
        if runs:
            self.run()
        return task

    def run(self, passed_s: float = 0.0) -> None:
        """Goes on until nothing does, and again once so much time has passed."""
        for now_s in (self.now_s, self.now_s + passed_s):
            self.now_s = now_s
            while any_goes := [each for each in self.tasks if not each.is_over and each.goes_on()]:
                for each in any_goes:
                    each.step()
        self.tasks = [each for each in self.tasks if not each.is_over]

    def named(self) -> list[list[Any]]:
        return [call.messages for call in self.calls]

    def is_empty(self) -> bool:
        changes = self.changes
        return not (changes._gathered or changes._unanswered or changes._under_way or self.tasks)


@pytest.fixture(params=[(False, 32), (True, 32)], ids=["loop", "threads"])
def steps(request: pytest.FixtureRequest) -> Iterator[Steps]:
    blocks, calls_at_once = request.param
    made = Steps(blocks=blocks, calls_at_once=calls_at_once)
    with patch.object(gathering, "monotonic", lambda: made.now_s):
        yield made


def test_a_lone_one_goes_at_once_and_others_gather_longer_while_many_are_under_way(
    steps: Steps,
) -> None:
    """Sixteen calls of 0.7 s held whatever came meanwhile, at 200 reschedules a second."""
    for number in range(24):
        steps.ask(number)
        steps.run(0.061)
    assert steps.named() == [[number] for number in range(24)]
    steps.ask("late")
    steps.ask("later")
    steps.run(0.055)
    for call in steps.calls[:16]:
        call.answer_all()
    assert len(steps.calls) == 24
    steps.run()  # of 20 ms, once eight are under way, 55 have passed
    assert steps.named()[24:] == [["late", "later"]]


def test_a_full_call_goes_at_once(steps: Steps) -> None:
    steps.ask(-1)
    for number in range(1_001):
        steps.ask(number, runs=False)
    steps.run()
    assert [len(each) for each in steps.named()] == [1, 1_001 - 1]


def test_what_a_client_cannot_have_answered_it_refuses_at_once(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many may be asked for at one moment; and once some are answered, others may go on."""
    monkeypatch.setattr(gathering, "UNANSWERED_AT_MOST", 4)
    waiting = [steps.ask(n, runs=False) for n in range(8)]
    steps.run(1.0)
    refused = steps.ask(8).result
    assert isinstance(refused, RefusedError)
    assert (refused.reason, refused.outcome_known) == (Reason.BACKPRESSURE, True)
    assert not any(each.is_over for each in waiting)
    for call in steps.calls:
        call.answer_all()
    steps.run()
    steps.ask(9)
    steps.calls[-1].answer_all()
    steps.run()
    assert [each.result for each in waiting] == [*range(8)]
    assert steps.is_empty()


@of((False, 1), (True, 1))
def test_where_the_first_wait_for_long_the_last_go_first(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all are sent when their time is nearly over, for as long as more come.

    The first is sent beside them: a thread that sends does not look, so it would keep all waiting.
    """
    monkeypatch.setattr(gathering, "MESSAGES_AT_MOST", 3)
    waiting = [steps.ask(n) for n in range(7)]
    for _ in range(3):
        steps.run(gathering.LATE_S)
        steps.calls[-1].answer_all()
    steps.run()
    assert steps.named() == [[0], [1, 6, 5], [2, 4, 3]]
    assert [each.result for each in waiting] == [*range(7)]


class _Named:
    """A message that counts comparisons with others."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Named.compared += 1
        return self is other

    __hash__ = object.__hash__


@of((False, 32))
def test_who_gives_up_is_not_searched_for_among_all_others(steps: Steps) -> None:
    """40,000 that waited took their client 75 s to give up, during which it did nothing else."""
    waiting = [steps.ask(_Named(), 5, runs=False) for _ in range(3_000)]
    steps.run(6)
    assert {type(each.result) for each in waiting} == {TimedOutError}
    assert _Named.compared == 0
    assert not steps.changes._gathered


@of((False, 32))
@pytest.mark.parametrize("is_interrupted", [False, True])
@pytest.mark.parametrize(
    ("state", "is_known", "obstacle"),
    [
        ("gathered", True, ""),
        ("under way", False, ""),
        ("not sent", True, "; last: nobody answers"),
        ("backing off", False, "; last: busy"),
        ("gathered again", False, "; last: busy"),
    ],
)
def test_who_gives_up_hears_what_is_known_and_is_not_named_again(
    steps: Steps, state: str, obstacle: str, *, is_known: bool, is_interrupted: bool
) -> None:
    """Coroutines were told that cancels may have an effect of which no node had ever heard."""
    first, mine = steps.ask("first", 90), steps.ask("mine", 30)
    if state != "gathered":
        steps.run(0.02)
        call = steps.calls[1]
        if state == "not sent":
            call.doubts.end([0], "nobody answers")
        elif state != "under way":
            call.answer(0, Again(90.0 if state == "backing off" else None, why="busy"))
    if is_interrupted:
        mine.step(KeyboardInterrupt())
        assert isinstance(mine.result, KeyboardInterrupt)
    else:
        with patch.object(gathering, "LINGER_S", 90):
            steps.run(40)
        assert str(mine.result).endswith(f"not answered in time{obstacle}")
        assert mine.result.outcome_known is is_known
    named = steps.named()
    if state in {"under way", "not sent"}:
        assert steps.calls[1].doubts.begin([0]) == [], "its call names it no more"
    for each in steps.calls:
        each.answer_all()
    steps.run(40)
    assert (first.result, steps.named()) == ("first", named)
    assert steps.is_empty()


@of((True, 1))
@pytest.mark.parametrize("is_time_over", [True, False])
def test_no_thread_sends_for_others_beyond_its_own_time(
    steps: Steps, *, is_time_over: bool
) -> None:
    """Otherwise a call with a short timeout lasts for as long as another one's.

    Given up before that, it tells all: each thread in turn would find out that nothing answers.
    """
    first, soon, late = steps.ask(0, 60), steps.ask(1, 30), steps.ask(2, 60)
    steps.calls[0].answer_all()
    steps.run(0.02)
    call = steps.calls[1]
    assert (call.messages, call.deadline_s) == ([1, 2], 1030)
    steps.now_s += 30 if is_time_over else 0
    for number in (0, 1):
        call.answer(number, TimedOutError("late", outcome_known=False))
    call.ends = True
    steps.run()
    assert isinstance(soon.result, TimedOutError)
    if is_time_over:
        again = steps.calls[2]
        assert (again.messages, again.deadline_s, again.doubted) == ([2], 1060, {0: 0})
        again.answer_all()
        steps.run()
        assert (first.result, late.result) == (0, 2)
    else:
        assert isinstance(late.result, TimedOutError)
    assert steps.is_empty()


@of((False, 32))
def test_in_a_loop_a_call_lasts_until_the_last_of_its_messages_is_given_up(steps: Steps) -> None:
    for message, within_s in ((0, 60), (1, 30), (2, 60)):
        steps.ask(message, within_s)
    steps.run(0.02)
    assert [call.deadline_s for call in steps.calls] == [1060, 1060]


def test_a_call_that_is_interrupted_leaves_nobody_behind(steps: Steps) -> None:
    """Who was told keeps that; in a thread the first makes the call, and is interrupted itself."""
    first, untold, told = (steps.ask(n) for n in range(3))
    steps.run(0.02)
    steps.calls[1].answer(1, "told")
    steps.calls[1].ends = KeyboardInterrupt()
    steps.calls[0].answer_all()
    steps.run()
    assert (first.result, told.result) == (0, "told")
    if steps.blocks:
        assert isinstance(untold.result, KeyboardInterrupt)
    else:
        assert isinstance(untold.result, CallFailedError)
        assert "KeyboardInterrupt" in str(untold.result)
    assert steps.is_empty()


@of((True, 32))
def test_who_is_interrupted_while_it_takes_a_call_leaves_nobody_behind(steps: Steps) -> None:
    first, second = steps.ask("first"), steps.ask("second")
    steps.calls[0].answer_all()
    with patch.object(
        steps.changes, "_tell_first", side_effect=[None, KeyboardInterrupt, None, None]
    ):
        steps.run(0.02)
    assert first.result == "first"
    assert isinstance(second.result, KeyboardInterrupt)
    assert steps.is_empty()


def test_who_is_interrupted_while_it_begins_is_not_waited_for(steps: Steps) -> None:
    """As the first of those gathered nobody would send it, or anything behind it."""
    first = steps.ask("first")
    with (
        patch.object(gathering, "MESSAGES_AT_MOST", 1),
        patch.object(steps.changes, "_tell_first", side_effect=[KeyboardInterrupt, None]),
    ):
        assert isinstance(steps.ask("mine").result, KeyboardInterrupt)
    later = steps.ask("later")
    steps.run(0.02)
    assert steps.named() == [["first"], ["later"]]
    for call in steps.calls:
        call.answer_all()
    steps.run()
    assert (first.result, later.result) == ("first", "later")
    assert steps.is_empty()


def test_nobody_waits_for_what_another_one_named(steps: Steps) -> None:
    """Who is decided hears of it, though the call goes on; who is not is asked for again."""
    steps.ask(-1)
    slow, quick = steps.ask(0), steps.ask(1)
    steps.run(0.02)
    steps.calls[1].answer(1, "first")
    steps.calls[1].answer(0, Again(is_late=True))
    steps.run()
    assert quick.result == "first"
    steps.calls[0].answer_all()
    steps.calls[1].ends = steps.blocks  # where a thread makes it, it has to end
    steps.run(0.02)
    assert (steps.calls[2].messages, steps.calls[2].doubted) == ([0], {0: 1})
    steps.calls[2].answer_all()
    steps.run()
    assert slow.result == 0


@pytest.mark.parametrize(("asked_s", "wait_s"), [(0.0, 0.1), (3.0, 3.0), (600.0, 10.0)])
def test_what_is_refused_holds_no_call_and_backs_off_for_longer_each_time(
    steps: Steps, asked_s: float, wait_s: float
) -> None:
    """Sixteen that nobody could decide kept all others of their client waiting for 30 s.

    The service may ask for a delay, but not for any.
    """
    refused = steps.ask(0)
    for each_s in (wait_s, max(wait_s, 0.2)):
        steps.calls[-1].answer(0, Again(asked_s, is_doubtful=False))
        steps.calls[-1].ends = True
        before = len(steps.calls)
        steps.run(each_s - 0.001)
        assert len(steps.calls) == before
        steps.run(0.0011)
        assert steps.named()[before:] == [[0]]
        assert not steps.calls[-1].doubted
    assert not refused.is_over
    steps.calls[-1].answer_all()
    steps.run()
    assert refused.result == 0


def test_threads_that_wait_send_for_one_another() -> None:
    calls: list[list[int]] = []
    first_is_under_way, goes_on = threading.Event(), threading.Event()

    async def call(messages: Sequence[Any], _: float, tell: Any, _doubts: object) -> None:
        calls.append(list(messages))
        if len(calls) == 1:
            first_is_under_way.set()
            assert goes_on.wait(60)
        for number, message in enumerate(messages):
            tell(number, -message)

    changes = GatheredChanges[Any, Any](ThreadTransport(), call, calls_at_once=1)

    def change(number: int) -> int:
        return cast("int", finished(changes.change(number, monotonic() + 60)))

    with ThreadPoolExecutor(50) as pool:
        waiting = [pool.submit(change, 0)]
        assert first_is_under_way.wait(60)
        waiting += [pool.submit(change, n) for n in range(1, 50)]
        while len(changes._gathered) < 49:
            threading.Event().wait(0.001)
        goes_on.set()
        assert [one.result(60) for one in waiting] == [-n for n in range(50)]
    assert [sorted(each) for each in calls] == [[0], [*range(1, 50)]]


class _Gathering(RuleBasedStateMachine):
    """Callers come and leave, calls answer, refuse, are undecided and end, in any order."""

    BLOCKS, AT_ONCE, MOST = False, 3, 4

    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps(blocks=self.BLOCKS, calls_at_once=self.AT_ONCE)
        self.patches = ExitStack()
        self.patches.enter_context(patch.object(gathering, "monotonic", lambda: self.steps.now_s))
        self.patches.enter_context(patch.object(gathering, "MESSAGES_AT_MOST", self.MOST))
        self.asked: list[Stepped] = []
        self.doubtful = set[int]()

    def teardown(self) -> None:
        with self.patches:  # whoever is left is answered, or its time is over
            for _ in range(100):
                for call in self.steps.calls:
                    call.answer_all()
                self.steps.run(1.0)
            assert self.steps.is_empty()
            assert all(each.is_over for each in self.asked)

    @property
    def under_way(self) -> list[Call]:
        return [call for call in self.steps.calls if call.ends is False]

    @rule(within_s=st.sampled_from([0.01, 0.5, 5.0, 60.0]))
    def ask(self, within_s: float) -> None:
        self.asked.append(self.steps.ask(len(self.asked), within_s))

    @rule(passed_s=st.sampled_from([0.005, 0.02, 0.3, 1.5]))
    def pass_time(self, passed_s: float) -> None:
        self.steps.run(passed_s)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), again=st.sampled_from([None, Again(), Again(0.0, is_doubtful=False)]))
    def answer(self, data: st.DataObject, again: Again | None) -> None:
        call = data.draw(st.sampled_from(self.under_way))
        left = call.left()
        # A call tells of all that it has together, so of its sender's just before it ends.
        number = data.draw(st.sampled_from((self.BLOCKS and left[1:]) or left))
        message = call.messages[number]
        if again is not None and again.is_doubtful:
            self.doubtful.add(message)
        call.answer(number, message if again is None else again)
        call.ends = not call.left()
        self.steps.run()

    @precondition(lambda self: not all(each.is_over for each in self.asked))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiting = [each for each in self.asked if not each.is_over]
        data.draw(st.sampled_from(waiting)).step(KeyboardInterrupt())
        for call in self.under_way:  # a thread's call ends with it
            call.ends = self.BLOCKS and self.asked[call.messages[0]].is_over
        self.steps.run()

    @invariant()
    def bounds_hold(self) -> None:
        changes = self.steps.changes
        assert changes._under_way <= self.AT_ONCE
        assert all(len(call.messages) <= self.MOST for call in self.steps.calls)
        assert len(changes._unanswered) == sum(not each.is_over for each in self.asked)

    @invariant()
    def each_is_in_one_place_and_hears_the_truth(self) -> None:
        places = [call.messages[number] for call in self.under_way for number in call.left()]
        places += [one.message for one in self.steps.changes._gathered]
        assert len(places) == len({*places})
        for each in self.asked:
            if isinstance(each.result, TimedOutError):
                assert not (each.result.outcome_known and each.message in self.doubtful)
            elif isinstance(each.result, int):
                assert each.result == each.message

    @invariant()
    def nothing_waits_for_longer_than_others_gather(self) -> None:
        changes = self.steps.changes
        if changes._gathered and changes._under_way < self.AT_ONCE:
            (first, *_) = changes._gathered
            assert changes._under_way
            assert self.steps.now_s - first.since_s < gathering.LINGER_S


class _OfThreads(_Gathering):
    BLOCKS = True


TestInALoop = _Gathering.TestCase
TestOfThreads = _OfThreads.TestCase
