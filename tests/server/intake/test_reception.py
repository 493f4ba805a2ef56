"""Calls, incoming messages and streams are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from delaywheel.reasons import Reason
from delaywheel_replica.server.access.callers import CallOrigin
from delaywheel_replica.server.intake import arrivals as arrivals_module
from delaywheel_replica.server.intake.arrivals import ArrivalBounds
from delaywheel_replica.server.intake.reception import CALLS, CallBounds, OpenStream, Reception
from delaywheel_replica.server.node.refusals import RequestRefusedError


class Arriving:
    """Messages that arrive when the test says so."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self.begun: list[str] = []
        self._arrived: dict[str, asyncio.Event] = {}

    def of(self, caller: str, name: str) -> asyncio.Task[str]:
        return asyncio.create_task(self._reception.receive(CallOrigin(caller), self._reading(name)))

    def come(self, name: str) -> None:
        self._arrived[name].set()

    def _reading(self, name: str) -> Callable[[], Awaitable[str]]:
        self._arrived[name] = asyncio.Event()

        async def read() -> str:
            self.begun.append(name)
            await self._arrived[name].wait()
            return name

        return read


def bounds(*, most: int, of_caller: int = 4) -> CallBounds:
    return CALLS._replace(arrivals=ArrivalBounds(most, of_caller, most))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def reason_of(error: BaseException | None) -> Reason:
    assert isinstance(error, RequestRefusedError)
    return error.refusal.reason


async def test_messages_of_one_caller_come_a_few_at_a_time() -> None:
    arriving = Arriving(Reception(bounds(most=3, of_caller=2)))
    tasks = {name: arriving.of(name[0], name) for name in ("a1", "a2", "a3", "b1", "b2")}
    await settle()
    assert arriving.begun == ["a1", "a2", "b1"]
    arriving.come("b1")
    assert await tasks["b1"] == "b1"
    await settle()
    assert arriving.begun[3:] == ["b2"]
    arriving.come("a2")
    await settle()
    assert arriving.begun[4:] == ["a3"]
    for name in ("a1", "a3", "b2"):
        arriving.come(name)
    assert [await tasks[name] for name in ("a1", "a3", "b2")] == ["a1", "a3", "b2"]


async def test_who_goes_away_takes_nobodys_turn() -> None:
    arriving = Arriving(Reception(bounds(most=1)))
    first, second, third = (arriving.of(name, name) for name in "abc")
    await settle()
    second.cancel()
    await settle()
    first.cancel()
    await settle()
    assert arriving.begun == ["a", "c"]
    arriving.come("c")
    assert await third == "c"


async def test_a_turn_that_is_given_to_one_who_goes_away_goes_to_the_next() -> None:
    arriving = Arriving(Reception(bounds(most=1)))
    first, second, third = (arriving.of(name, name) for name in "abc")
    await settle()
    first.cancel()
    await asyncio.sleep(0)  # it ends, and gives its turn to the second
    second.cancel()
    await settle()
    arriving.come("c")
    assert await third == "c"


async def test_a_message_that_does_not_come_is_refused_sooner_while_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrivals_module, "ARRIVAL_S", 3_600)
    monkeypatch.setattr(arrivals_module, "PATIENCE_S", 0.01)
    arriving = Arriving(Reception(bounds(most=1)))
    slow = arriving.of("a", "slow")
    await settle()
    assert not slow.done()
    quick = arriving.of("b", "quick")
    await asyncio.wait([slow])
    assert reason_of(slow.exception()) is Reason.BACKPRESSURE
    arriving.come("quick")
    assert await quick == "quick"


async def test_a_call_that_waits_makes_room_for_one_of_a_caller_with_fewer() -> None:
    reception = Reception(bounds(most=1)._replace(calls=3))
    arriving = Arriving(reception)
    for _ in range(3):
        reception.begin_call(CallOrigin("many"))
    tasks = [arriving.of("many", name) for name in ("read", "older", "newest")]
    await settle()
    reception.begin_call(CallOrigin("few"))
    few = arriving.of("few", "few")
    await asyncio.wait([tasks[2]])
    assert reason_of(tasks[2].exception()) is Reason.BACKPRESSURE
    with pytest.raises(RequestRefusedError, match="BACKPRESSURE"):
        reception.begin_call(CallOrigin("few"))  # which has as many that wait, by now
    for name in ("read", "older", "few"):
        arriving.come(name)
    assert [await task for task in (*tasks[:2], few)] == ["read", "older", "few"]


def test_calls_beyond_their_bound_are_refused() -> None:
    reception = Reception(CALLS._replace(calls=2))
    ends = [reception.begin_call(CallOrigin("a")) for _ in range(2)]
    with pytest.raises(RequestRefusedError, match="BACKPRESSURE"):
        reception.begin_call(CallOrigin("b"))
    ends[0]()
    reception.begin_call(CallOrigin("b"))


async def test_a_principal_leaves_others_calls_however_many_connections_it_has() -> None:
    """4,096 that wait for their turns had everybody's refused."""
    reception = Reception(CALLS._replace(calls=4))
    for number in range(2):
        end = reception.begin_call(CallOrigin(f"m{number}", "many"))
    with pytest.raises(RequestRefusedError) as refused:
        reception.begin_call(CallOrigin("m2", "many"))
    assert reason_of(refused.value) is Reason.BACKPRESSURE
    reception.begin_call(CallOrigin("a", "another"))
    end()
    reception.begin_call(CallOrigin("m3", "many"))


STREAMS = CALLS._replace(streams=4, streams_of_caller=2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def opened(reception: Reception, clock: Clock, callers: str) -> list[OpenStream]:
    return [reception.begin_stream(CallOrigin(caller), clock) for caller in callers]


def test_streams_beyond_their_bounds_are_refused() -> None:
    reception, clock = Reception(STREAMS), Clock()
    streams = opened(reception, clock, "aabb")
    with pytest.raises(RequestRefusedError, match="BACKPRESSURE"):
        reception.begin_stream(CallOrigin("c"), clock)
    reception.end_stream(streams[0])
    with pytest.raises(RequestRefusedError, match="BACKPRESSURE"):
        reception.begin_stream(CallOrigin("b"), clock)
    reception.begin_stream(CallOrigin("c"), clock)


def test_a_principal_has_a_part_of_the_streams_and_ends_its_own_idle_ones() -> None:
    reception, clock = Reception(STREAMS._replace(streams=6)), Clock()
    streams = [reception.begin_stream(CallOrigin(str(n), "many"), clock) for n in range(3)]
    with pytest.raises(RequestRefusedError, match="3 of one principal"):
        reception.begin_stream(CallOrigin("3", "many"), clock)
    opened(reception, clock, "a")
    clock.now_s = 2.0
    reception.begin_stream(CallOrigin("3", "many"), clock)
    assert sum(stream.is_ended for stream in streams) == 1


def test_an_idle_stream_makes_room_for_another() -> None:
    reception, clock = Reception(STREAMS), Clock()
    sent, waits, silent, many = opened(reception, clock, "abcc")
    sent.received()
    sent.answered()
    waits.received()
    clock.now_s = 0.9
    many.received()
    many.answered()
    with pytest.raises(RequestRefusedError, match="BACKPRESSURE"):
        reception.begin_stream(CallOrigin("d"), clock)
    clock.now_s = 2.0
    opened(reception, clock, "dde")  # each ends one: silent, then the caller's with two, sent
    assert [stream.is_ended for stream in (silent, many, sent, waits)] == [True, True, True, False]
    with pytest.raises(RequestRefusedError, match="BACKPRESSURE"):
        reception.begin_stream(CallOrigin("f"), clock)  # the one that waits for its answer stays


def test_which_idle_stream_is_ended_first() -> None:
    reception, clock = Reception(STREAMS), Clock()
    older, one, other, silent = opened(reception, clock, "abbc")
    for stream in (older, one, other):
        clock.now_s += 0.1
        stream.received()
        stream.answered()
    ended: list[str] = []
    for name, stream in {"older": older, "one": one, "other": other, "silent": silent}.items():
        stream.on_ended = partial(ended.append, name)
    clock.now_s = 3.0
    opened(reception, clock, "defg")
    assert ended == ["silent", "one", "older", "other"]
