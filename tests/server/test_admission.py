import asyncio

import pytest

from delaywheel_replica.server.admission import Admission
from delaywheel_replica.server.refusals import RefusedError


def test_a_caller_has_a_bound_of_its_own() -> None:
    admission = Admission(max_bytes=100, max_caller_bytes=30)
    with admission.admit("a", 30):
        assert not admission.caller_has_room("a", 1)
        with pytest.raises(RefusedError, match="BACKPRESSURE"):
            admission.admit("a", 1)
        with admission.admit("b", 30):
            assert admission.in_flight_bytes == 60
    assert admission.in_flight_bytes == 0
    assert admission.caller_has_room("a", 30)


def test_all_callers_have_one_bound_together() -> None:
    admission = Admission(max_bytes=50, max_caller_bytes=30)
    with admission.admit("a", 30), pytest.raises(RefusedError, match="on this node"):
        admission.admit("b", 21)
    with admission.admit("b", 21):
        pass


async def test_what_the_writer_has_is_counted_until_it_is_written() -> None:
    admission = Admission(max_bytes=50, max_caller_bytes=50)
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with admission.admit("a", 10) as ticket:
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
    with pytest.raises(ZeroDivisionError), admission.admit("a", 10):
        raise ZeroDivisionError
    assert admission.in_flight_bytes == 0
