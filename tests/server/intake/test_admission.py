import asyncio

import pytest

from delaywheel_replica.server.access.callers import CallOrigin
from delaywheel_replica.server.intake import admission as admission_module
from delaywheel_replica.server.intake.admission import MESSAGE_COST_BYTES, Admission, cost_bytes
from delaywheel_replica.server.node.refusals import RequestRefusedError


def test_a_caller_has_a_bound_of_its_own() -> None:
    admission = Admission(max_bytes=100, max_caller_bytes=30)
    with admission.admit(CallOrigin("a"), 30):
        with pytest.raises(RequestRefusedError, match="BACKPRESSURE"):
            admission.admit(CallOrigin("a"), 1)
        with admission.admit(CallOrigin("b"), 30):
            assert admission.in_flight_bytes == 60
    assert admission.in_flight_bytes == 0
    with admission.admit(CallOrigin("a"), 30):
        pass


def test_all_callers_have_one_bound_together() -> None:
    admission = Admission(max_bytes=50, max_caller_bytes=30)
    with (
        admission.admit(CallOrigin("a"), 30),
        pytest.raises(RequestRefusedError, match="on this node"),
    ):
        admission.admit(CallOrigin("b"), 21)
    with admission.admit(CallOrigin("b"), 21):
        pass


def test_a_principal_leaves_room_for_others_however_many_connections_it_has() -> None:
    admission = Admission(max_bytes=100, max_caller_bytes=20)
    held = 0
    for number in range(100):
        try:
            admission.admit(CallOrigin(f"one:{number}", "one"), 10)
            held += 1
        except RequestRefusedError:
            break
    assert held == 7  # the eighth would be more than twice the 30 that are left
    for _ in range(2):
        admission.admit(CallOrigin("two", "two"), 10)
    with pytest.raises(RequestRefusedError, match="of this principal"):
        admission.admit(CallOrigin("two:1", "two"), 10)
    admission.admit(CallOrigin("three", "three"), 10)


def test_a_principals_quota_bounds_its_bytes_on_all_connections() -> None:
    admission = Admission(max_bytes=1_000, max_caller_bytes=500, quota_of={"one": 30}.get)
    with admission.admit(CallOrigin("a", "one"), 40):  # alone any request is taken
        with pytest.raises(RequestRefusedError, match="QUOTA_EXCEEDED"):
            admission.admit(CallOrigin("b", "one"), 1)
        admission.admit(CallOrigin("c", "two"), 100)
    admission.admit(CallOrigin("b", "one"), 1)


async def test_what_the_writer_has_is_counted_until_it_is_written() -> None:
    admission = Admission(max_bytes=50, max_caller_bytes=50)
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with admission.admit(CallOrigin("a"), 10) as ticket:
        ticket.hand_on(answer)
    assert admission.in_flight_bytes == 10
    idle = asyncio.ensure_future(admission.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    answer.set_result(None)
    await idle
    assert admission.in_flight_bytes == 0


def test_a_failure_gives_the_room_back() -> None:
    admission = Admission(max_bytes=50, max_caller_bytes=50)
    with pytest.raises(ZeroDivisionError), admission.admit(CallOrigin("a"), 10):
        raise ZeroDivisionError
    assert admission.in_flight_bytes == 0


async def test_an_answer_is_counted_until_its_caller_has_it() -> None:
    admission = Admission(max_bytes=50, max_caller_bytes=30)
    with admission.admit(CallOrigin("a"), 30):
        end = admission.hold_answer(CallOrigin("a"), 20)
    # The end does not wait for clients that do not read.
    await admission.wait_idle()
    assert admission.in_flight_bytes == 20
    with pytest.raises(RequestRefusedError, match="BACKPRESSURE"):
        admission.admit(CallOrigin("a"), 11)
    waiting = asyncio.ensure_future(admission.wait_for_room(CallOrigin("a"), 11))
    await asyncio.sleep(0)
    assert not waiting.done()
    end()
    await waiting
    assert admission.in_flight_bytes == 0


async def test_an_empty_answer_costs_nothing() -> None:
    admission = Admission(max_bytes=50, max_caller_bytes=30)
    admission.hold_answer(CallOrigin("a"), 0)()
    assert admission.in_flight_bytes == 0


def test_short_messages_cost_what_is_made_of_them() -> None:
    assert cost_bytes(bytes(20_000), 10_000) == 20_000 + 10_000 * MESSAGE_COST_BYTES


def test_a_request_above_the_bound_of_all_has_room_when_nothing_is_in_flight() -> None:
    admission = Admission(max_bytes=50, max_caller_bytes=50)
    with (
        admission.admit(CallOrigin("a"), 60),
        pytest.raises(RequestRefusedError, match="on this node"),
    ):
        admission.admit(CallOrigin("b"), 1)


async def test_only_a_caller_that_reads_nothing_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "_LOOK_S", 0.01)
    closed: list[str] = []
    admission = Admission(max_bytes=100, max_caller_bytes=100, close=closed.extend)
    admission.hold_answer(CallOrigin("silent"), 10)
    end = admission.hold_answer(CallOrigin("slow"), 10)
    async with asyncio.timeout(30):
        while not closed:
            next_end = admission.hold_answer(
                CallOrigin("slow"), 10
            )  # never without an unread answer
            end()
            end = next_end
            await asyncio.sleep(0)
    assert set(closed) == {"silent"}
