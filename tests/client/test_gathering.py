"""Changes of named messages that clients gather."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, cast

import pytest

from delaywheel.client.changing import gathering
from delaywheel.client.changing.gathering import AioChanges, SyncChanges
from delaywheel.client.changing.named_changes import Again, Doubts
from delaywheel.errors import RefusedError, TimedOutError
from delaywheel.reasons import Reason

Tell = Callable[[int, Any], None]


class _Named:
    """A message that counts comparisons with others."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Named.compared += 1
        return self is other

    __hash__ = object.__hash__


async def test_while_many_calls_last_long_others_gather_longer_and_wait_for_none_to_end() -> None:
    """Sixteen calls of 0.7 s held whatever came meanwhile, at 200 reschedules a second."""
    calls: list[int] = []
    never = asyncio.Event()

    async def call(messages: Sequence[Any], *_: object) -> None:
        calls.append(len(messages))
        await never.wait()

    changes = AioChanges(cast("Any", call))
    waiting = []
    async with asyncio.timeout(60):
        while len(calls) < 20:
            waiting.append(asyncio.create_task(changes.change(cast("Any", 0), monotonic() + 60)))
            await asyncio.sleep(0.002)
    assert gathering._wait_s({1: gathering._One(cast("Any", 0), 0.0, monotonic())}, 24) > 0.055
    for each in (*waiting, *changes._tasks):
        each.cancel()


async def test_what_gathers_goes_sooner_once_fewer_calls_are_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[asyncio.Event] = []

    async def call(*_: object) -> None:
        begun.append(asyncio.Event())
        await begun[-1].wait()

    changes, waiting = AioChanges(cast("Any", call)), list[asyncio.Task[Any]]()

    async def begin(calls: int) -> None:
        waiting.append(asyncio.create_task(changes.change(cast("Any", 0), monotonic() + 60)))
        async with asyncio.timeout(60):
            while len(begun) < calls:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0)

    monkeypatch.setattr(gathering, "LINGER_S", 0)
    for calls in range(1, 25):
        await begin(calls)
    monkeypatch.setattr(gathering, "LINGER_S", 100)
    waiting.append(asyncio.create_task(changes.change(cast("Any", 0), monotonic() + 60)))
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    assert changes._timer is not None
    assert 250 < changes._timer.when() - loop.time() <= 300
    for end in begun[:16]:
        end.set()
    async with asyncio.timeout(60):
        while len(changes._tasks) > 8:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
    # It is set anew for what differs by over half of LINGER_S, which four calls make to a hair.
    assert 50 < changes._timer.when() - loop.time() < 151
    for each in (*waiting, *changes._tasks):
        each.cancel()
    changes._timer.cancel()


async def test_what_a_client_cannot_have_answered_it_refuses_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many may be asked for at one moment; and once some are answered, others may go on."""
    answered = asyncio.Event()

    async def call(messages: Sequence[Any], _: float, tell: Tell, _doubtful: object) -> None:
        await answered.wait()
        for number in range(len(messages)):
            tell(number, "done")

    monkeypatch.setattr(gathering, "UNANSWERED_AT_MOST", 4)
    changes = AioChanges(cast("Any", call))

    def ask() -> asyncio.Task[Any]:
        return asyncio.create_task(changes.change(cast("Any", 0), monotonic() + 60))

    waiting = [ask() for _ in range(8)]
    await asyncio.sleep(0)
    monkeypatch.setattr(gathering, "LATE_S", 0.0)
    with pytest.raises(RefusedError, match="waits for 8 already") as refused:
        await asyncio.wait_for(ask(), 60)
    assert refused.value.reason is Reason.BACKPRESSURE
    assert refused.value.outcome_known
    assert not any(task.done() for task in waiting)
    answered.set()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*waiting) == ["done"] * 8
        assert await ask() == "done"
    assert not changes._unanswered


async def test_where_the_first_wait_for_long_the_last_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise all are sent when their time is nearly over, for as long as more come."""
    calls: list[list[Any]] = []
    goes_on = asyncio.Event()

    async def call(messages: Sequence[Any], _: float, tell: Tell, _doubtful: object) -> None:
        calls.append(list(messages))
        await goes_on.wait()
        for number, message in enumerate(messages):
            tell(number, message)

    cancels = AioChanges(cast("Any", call), calls_at_once=1)
    waiting = [asyncio.create_task(cancels.change(n, monotonic() + 60)) for n in range(1_501)]
    await asyncio.sleep(0)
    monkeypatch.setattr(gathering, "LATE_S", 0.0)
    goes_on.set()
    assert await asyncio.gather(*waiting) == list(range(1_501))
    assert [sorted(each) for each in calls] == [[0], [*range(501, 1_501)], [*range(1, 501)]]


async def test_who_gives_up_is_not_searched_for_among_all_others() -> None:
    """40,000 that waited took their client 75 s to give up, during which it did nothing else."""

    async def hangs(*_: object) -> None:
        await asyncio.Event().wait()

    cancels = AioChanges(cast("Any", hangs), calls_at_once=1)
    deadline_s = monotonic() + 0.2
    callers = [cancels.change(cast("Any", _Named()), deadline_s) for _ in range(3_000)]
    results = await asyncio.gather(*callers, return_exceptions=True)
    errors = [each for each in results if isinstance(each, TimedOutError)]
    assert len(errors) == 3_000
    assert sum(error.outcome_known for error in errors) >= 1_000  # one call has the others
    assert _Named.compared == 0
    for task in cancels._tasks:
        task.cancel()


async def test_what_a_cancelled_task_asked_for_is_not_sent_later() -> None:
    calls: list[list[Any]] = []
    goes_on, is_refused = asyncio.Event(), asyncio.Event()

    async def call(messages: Sequence[Any], _: float, tell: Tell, _doubtful: object) -> None:
        calls.append(list(messages))
        await goes_on.wait()
        for number, message in enumerate(messages):
            tell(number, Again(0.0) if message == 2 else message)
        if 2 in messages:
            is_refused.set()

    changes = AioChanges(cast("Any", call), calls_at_once=1)
    deadline_s = monotonic() + 60
    first, second, refused = (
        asyncio.create_task(changes.change(cast("Any", n), deadline_s)) for n in (0, 1, 2)
    )
    await asyncio.sleep(0)
    second.cancel()
    goes_on.set()
    assert await first == cast("Any", 0)
    await is_refused.wait()
    refused.cancel()
    await asyncio.wait([second, refused])
    assert calls == [[0], [2]]
    assert not changes._gathered
    assert not changes._backing_off


def test_threads_that_wait_send_for_one_another() -> None:
    calls: list[list[int]] = []
    first_is_under_way, goes_on = threading.Event(), threading.Event()

    def call(messages: Sequence[Any], _: float, tell: Tell, _doubtful: object) -> None:
        calls.append(list(messages))
        if len(calls) == 1:
            first_is_under_way.set()
            assert goes_on.wait(60)
        for number, message in enumerate(messages):
            tell(number, -message)

    changes = SyncChanges(cast("Any", call), calls_at_once=1)
    with ThreadPoolExecutor(50) as pool:
        waiting = [pool.submit(changes.change, cast("Any", 0), monotonic() + 60)]
        assert first_is_under_way.wait(60)
        waiting += [
            pool.submit(changes.change, cast("Any", n), monotonic() + 60) for n in range(1, 50)
        ]
        while len(changes._gathered) < 49:
            threading.Event().wait(0.001)
        goes_on.set()
        assert [one.result(60) for one in waiting] == [-n for n in range(50)]
    assert [sorted(each) for each in calls] == [[0], [*range(1, 50)]]


@pytest.mark.parametrize("is_time_over", [True, False])
def test_no_thread_sends_for_others_beyond_its_own_time(
    monkeypatch: pytest.MonkeyPatch, *, is_time_over: bool
) -> None:
    """Otherwise a call with a short timeout lasts for as long as another one's.

    Given up before that, it tells all: each thread in turn would find out that nothing answers.
    """
    calls: list[tuple[list[Any], float, Any]] = []
    under_way, goes_on = threading.Event(), threading.Event()
    passed_s = 0.0
    monkeypatch.setattr(gathering, "monotonic", lambda: monotonic() + passed_s)

    def call(messages: Sequence[Any], deadline_s: float, tell: Tell, doubtful: Any) -> None:
        nonlocal passed_s
        calls.append((list(messages), deadline_s, doubtful))
        if len(calls) == 1:
            under_way.set()
            assert goes_on.wait(60)
        is_late = len(calls) == 2
        passed_s = 30.0 if is_late and is_time_over else passed_s
        for number, message in enumerate(messages):
            tell(number, TimedOutError("late", outcome_known=False) if is_late else message)

    changes = SyncChanges(cast("Any", call), calls_at_once=1)
    soon_s, late_s = monotonic() + 30, monotonic() + 60
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(changes.change, cast("Any", 0), late_s)
        assert under_way.wait(60)
        waiting = []
        for number, deadline_s in ((1, soon_s), (2, late_s)):
            waiting.append(pool.submit(changes.change, cast("Any", number), deadline_s))
            while len(changes._gathered) < number:
                threading.Event().wait(0.001)
        goes_on.set()
        with pytest.raises(TimedOutError):
            waiting[0].result(60)
        if is_time_over:
            assert [one.result(60) for one in (first, waiting[1])] == [0, 2]
        else:
            with pytest.raises(TimedOutError):
                waiting[1].result(60)
    again = [([2], late_s, {0: 0})] if is_time_over else []
    assert calls == [([0], late_s, {}), ([1, 2], soon_s, {}), *again]


async def test_who_gives_up_before_its_call_hears_what_is_known() -> None:
    """Coroutines were told that cancels may have an effect of which no node had ever heard."""
    goes_on, named = asyncio.Event(), []

    async def call(_: object, __: float, ___: Tell, doubts: Doubts) -> None:
        named.append(doubts.begin([0]))
        named.append(doubts.end([0], "UNAVAILABLE: nobody answers"))
        await goes_on.wait()
        named.append(doubts.begin([0]))

    changes = AioChanges(cast("Any", call))
    with pytest.raises(TimedOutError, match="nobody answers") as gave_up:
        await changes.change(cast("Any", 0), monotonic() + 0.5)
    assert gave_up.value.outcome_known
    goes_on.set()
    await asyncio.gather(*changes._tasks)
    assert named == [[0], [0], []]
    assert not changes._calls


def test_a_thread_that_gives_up_before_its_call_hears_what_is_known() -> None:
    under_way, goes_on = threading.Event(), threading.Event()
    gathered: list[Any] = []
    known: list[object] = []

    def call(messages: Sequence[Any], _: float, tell: Tell, doubts: Doubts) -> None:
        if messages == [0]:
            under_way.set()
            assert goes_on.wait(60)
        else:
            doubts.begin([0, 1])
            doubts.end([0, 1], "UNAVAILABLE: nobody answers")
            known.extend((changes._leave(gathered[1]), gathered[1].obstacle, doubts.begin([0, 1])))
        for number, message in enumerate(messages):
            tell(number, message)

    changes = SyncChanges(cast("Any", call), calls_at_once=1)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(changes.change, cast("Any", 0), monotonic() + 60)]
        assert under_way.wait(60)
        for number in (1, 2):
            waiting.append(pool.submit(changes.change, cast("Any", number), monotonic() + 60))
            while len(changes._gathered) < number:
                threading.Event().wait(0.001)
        gathered += changes._gathered
        goes_on.set()
        assert [one.result(60) for one in waiting] == [0, 1, 2]
    assert known == [True, "UNAVAILABLE: nobody answers", [0]]


def test_thread_that_gives_up_or_is_interrupted_leaves_nobody_behind() -> None:
    goes_on, under_way = threading.Event(), threading.Event()

    def call(messages: Sequence[Any], _: float, tell: Tell, _doubtful: object) -> None:
        under_way.set()
        assert goes_on.wait(60)
        if messages == [0]:
            raise KeyboardInterrupt
        for number, message in enumerate(messages):
            tell(number, message)

    changes = SyncChanges(cast("Any", call), calls_at_once=1)
    with ThreadPoolExecutor(3) as pool:
        interrupted = pool.submit(changes.change, cast("Any", 0), monotonic() + 60)
        assert under_way.wait(60)
        with pytest.raises(TimedOutError) as gave_up:
            changes.change(cast("Any", 1), monotonic() + 0.01)
        assert gave_up.value.outcome_known
        later = pool.submit(changes.change, cast("Any", 2), monotonic() + 60)
        goes_on.set()
        assert cast("Any", later.result(60)) == 2
        with pytest.raises(KeyboardInterrupt):
            interrupted.result(60)
    assert not changes._gathered


async def test_nobody_waits_for_what_another_one_named() -> None:
    """Who is decided hears of it, though the call goes on; who is not is asked for again."""
    calls: list[tuple[list[Any], Any]] = []
    never = asyncio.Event()

    async def call(messages: Sequence[Any], _: float, tell: Tell, doubtful: object) -> None:
        calls.append((list(messages), doubtful))
        if len(calls) > 2:
            tell(0, "late")
            return
        for number, message in enumerate(messages):
            tell(number, {1: "first"}.get(message, Again()))
        await never.wait()

    changes = AioChanges(cast("Any", call), calls_at_once=3)
    deadline_s = monotonic() + 60
    waiting = (asyncio.create_task(changes.change(cast("Any", n), deadline_s)) for n in (0, 1))
    assert await asyncio.gather(*waiting) == ["late", "first"]
    assert calls == [([0], {}), ([1, 0], {1: 0}), ([0], {0: 0})]
    never.set()
    await asyncio.gather(*changes._tasks)


def test_threads_are_told_one_by_one_and_ask_again_for_what_is_not_decided() -> None:
    calls: list[tuple[list[Any], Any]] = []
    under_way, goes_on = threading.Event(), threading.Event()

    def call(messages: Sequence[Any], _: float, tell: Tell, doubtful: Any) -> None:
        calls.append((list(messages), doubtful))
        if len(calls) == 1:
            under_way.set()
            assert goes_on.wait(60)
        for number, message in enumerate(messages):
            tell(number, Again() if message == 1 and not doubtful else message)

    changes = SyncChanges(cast("Any", call), calls_at_once=1)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(changes.change, cast("Any", 0), monotonic() + 60)]
        assert under_way.wait(60)
        waiting += [pool.submit(changes.change, cast("Any", n), monotonic() + 60) for n in (1, 2)]
        while len(changes._gathered) < 2:
            threading.Event().wait(0.001)
        goes_on.set()
        assert [one.result(60) for one in waiting] == [0, 1, 2]
    assert calls[-1] == ([1], {0: 0})


async def test_what_was_asked_for_once_is_not_known_to_be_unchanged() -> None:
    """Its error says what kept it from being settled, whatever it waits for in the end."""
    calls: list[object] = []

    async def undecided(messages: object, _: float, tell: Tell, _doubtful: object) -> None:
        calls.append(messages)
        tell(0, Again(why="busy") if len(calls) == 1 else Again())
        await asyncio.sleep(0.02)

    changes = AioChanges(cast("Any", undecided), calls_at_once=1)
    with pytest.raises(TimedOutError, match="last: busy") as caught:
        await changes.change(cast("Any", 0), monotonic() + 0.5)
    assert not caught.value.outcome_known
    assert not changes._obstacles


@pytest.mark.parametrize(("asked_s", "wait_s"), [(0.0, 0.1), (3.0, 3.0), (600.0, 10.0)])
def test_the_service_may_ask_for_a_delay_but_not_for_any(asked_s: float, wait_s: float) -> None:
    before_s = monotonic()
    one = gathering._One(cast("Any", 0), 0.0, 0.0).again(Again(asked_s))
    assert before_s + wait_s <= one.since_s <= monotonic() + wait_s


def test_a_thread_hears_what_kept_its_message_from_being_settled() -> None:
    changes = SyncChanges(cast("Any", lambda _m, _s, tell, _d: tell(0, Again(9.0, why="busy"))))
    with pytest.raises(TimedOutError, match="last: busy"):
        changes.change(cast("Any", 0), monotonic() + 0.5)


async def test_what_is_refused_holds_no_call_and_backs_off_before_it_is_named_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixteen that nobody could decide kept all others of their client waiting for 30 s."""
    monkeypatch.setattr(gathering, "BACKOFF_FIRST_S", 0.2)
    times_s: list[float] = []

    async def call(messages: Sequence[Any], _: float, tell: Tell, doubtful: Any) -> None:
        for number, message in enumerate(messages):
            if message == 0:
                times_s.append(monotonic())
                late = doubtful.get(number, 0)
                tell(number, late if late == 2 else Again(0.0, is_late=True))
            else:
                tell(number, message)

    changes = AioChanges(cast("Any", call), calls_at_once=1)
    refused = asyncio.create_task(changes.change(cast("Any", 0), monotonic() + 60))
    async with asyncio.timeout(60):
        while not times_s:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
    assert await changes.change(cast("Any", 7), monotonic() + 60) == 7
    assert not refused.done()
    assert cast("Any", await refused) == 2
    first_s, second_s, third_s = times_s
    assert second_s - first_s > 0.19
    assert third_s - second_s > 0.39


def test_a_thread_whose_message_was_refused_backs_off_and_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "BACKOFF_FIRST_S", 1.0)
    was_refused = threading.Event()

    def call(messages: Sequence[Any], _: float, tell: Tell, doubtful: Any) -> None:
        for number, message in enumerate(messages):
            if message == 0 and not doubtful:
                tell(number, Again(0.0))
                was_refused.set()
            else:
                tell(number, message)

    changes = SyncChanges(cast("Any", call), calls_at_once=1)
    began_s = monotonic()
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(changes.change, cast("Any", 0), monotonic() + 60)
        assert was_refused.wait(60)
        assert changes.change(cast("Any", 7), monotonic() + 60) == cast("Any", 7)
        assert not refused.done()
        assert refused.result(60) == cast("Any", 0)
    assert monotonic() - began_s > 0.99


def test_a_thread_that_sends_is_not_the_first_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last go first it stayed in front, and no other sent until its call ended."""
    monkeypatch.setattr(gathering, "LATE_S", 0.0)
    monkeypatch.setattr(gathering, "MESSAGES_AT_MOST", 2)
    calls: list[list[Any]] = []
    goes_on = threading.Event()

    def call(messages: Sequence[Any], _: float, tell: Tell, _doubtful: object) -> None:
        calls.append(list(messages))
        assert goes_on.wait(60)
        for number, message in enumerate(messages):
            tell(number, message)

    changes = SyncChanges(cast("Any", call), calls_at_once=4)
    with ThreadPoolExecutor(7) as pool:
        waiting = [pool.submit(changes.change, cast("Any", n), monotonic() + 60) for n in range(7)]
        deadline_s = monotonic() + 20
        while len(calls) < 4 and monotonic() < deadline_s:
            threading.Event().wait(0.001)
        under_way = len(calls)
        goes_on.set()
        assert [cast("Any", one.result(60)) for one in waiting] == [*range(7)]
    assert under_way == 4
