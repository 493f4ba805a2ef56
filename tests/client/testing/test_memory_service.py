"""The clock of the service in memory, and the example that docs/TESTING.md gives for it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from delaywheel import CancelOutcome, Message, RefusedError, RescheduleOutcome
from delaywheel.message import clock_ns
from delaywheel.testing import MemoryService
from delaywheel.testing.rows import SentMessage
from delaywheel.testing.store import MemoryLimits, MemoryStore
from delaywheel_proto.v1 import delaywheel_pb2 as pb

DOC = Path(__file__).parents[3] / "docs" / "TESTING.md"


def test_the_example_of_the_document(tmp_path: Path) -> None:
    code = re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```$", DOC.read_text(), re.DOTALL | re.MULTILINE
    )
    for name, text in code:
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "3 passed" in done.stdout, done.stdout


def test_the_clock_is_the_tests_own() -> None:
    start = datetime(2031, 1, 1, tzinfo=UTC)
    before = clock_ns()
    with MemoryService(start=start) as service, service.client() as client:
        client.produce("b", b"2", delay="2s")
        client.produce("a", b"1", delay="1s")
        client.produce("a", b"at once", deliver_at=start)
        assert service.now == start
        (now,) = service.delivered()
        assert (now.value, now.offset) == (b"at once", 0)
        arrived = service.advance(timedelta(seconds=3))
        assert [(each.value, each.offset) for each in arrived] == [(b"1", 1), (b"2", 0)]
        assert [each.delivered_ms for each in arrived] == [each.due_ms for each in arrived]
        assert arrived[0].due_ms == start.timestamp() * 1000 + 1000
        assert service.now == start + timedelta(seconds=3)
        assert service.advance_to(start) == []
        assert service.now == start + timedelta(seconds=3), "time does not go back"
    assert before <= clock_ns() < before + 600 * 10**9


def test_what_is_due_in_a_tenth_of_a_second_is_too_late() -> None:
    with MemoryService() as service, service.client() as client:
        handle = client.produce("t", b"v", delay="99ms")
        assert client.cancel(handle).outcome is CancelOutcome.TOO_LATE
        moved = client.reschedule(handle, to=service.now + timedelta(hours=1))
        assert moved.outcome is RescheduleOutcome.TOO_LATE
        service.advance("10m")
        assert client.cancel(handle).outcome is CancelOutcome.TOO_LATE, "its second is deleted"
        assert client.get(handle) is None
        strict = service.client(past_due="reject")
        with strict, pytest.raises(RefusedError, match="DUE_PASSED"):
            strict.produce("t", b"v", deliver_at=service.now - timedelta(minutes=5))
        soon = client.produce("t", b"v", delay="5m")
        moved = client.reschedule(soon, to=service.now)
        assert moved.due_ms == service.now.timestamp() * 1000 + 500
        with pytest.raises(RefusedError, match="DUE_BEYOND_SPAN"):
            client.reschedule(moved.handle, to=service.now + timedelta(days=8))


def test_what_it_does_grows_with_its_messages_and_not_with_their_square() -> None:
    """Four thousand took five seconds to appear."""

    def steps_for(messages: int) -> int:
        limits = MemoryLimits(span_ms=10**9, late_window_ms=10**9, max_message_bytes=9, topics=None)
        store, steps = MemoryStore(limits, 0), 0

        def count(*_: object) -> None:
            nonlocal steps
            steps += 1

        sys.setprofile(count)
        try:
            for n in range(1, messages + 1):
                store.accept(SentMessage(b"%016d" % n, n, "orders", None, b"v", (), None, None))
            store.advance_to(messages)
            for n in range(1, messages + 1):
                handle = f"memory.1:{n // 1000}:{(b'%016d' % n).hex()}:orders"
                assert store.find(pb.MessageRef(handle=handle)) is not None
        finally:
            sys.setprofile(None)
        assert len(store.delivered) == messages
        return steps

    assert steps_for(400) < 3 * steps_for(200)


def test_two_services_at_once_have_their_own_time() -> None:
    with MemoryService() as outer, outer.client() as client:
        with MemoryService() as inner, inner.client() as other:
            outer.advance("10d")
            consumer = outer.consumer("a", group="g", retry=("1h",))
            client.produce("a", b"1", delay="1h")
            client.produce_many([Message("a", b"2", delay="1h"), Message("a", b"3", level="1h")])
            client.produce_async("a", b"4", delay="1h").result()
            half = client.begin("a", b"5", group="g", hold="3s", delay="1h")
            half.commit()
            moved = client.produce("a", b"6", delay="1m")
            client.reschedule(moved, delay="1h")
            other.produce("b", b"7", delay="1h")
            assert outer.advance("59m") == []
            appeared = sorted(one.value or b"" for one in outer.advance("1m"))
            assert appeared == [b"1", b"2", b"3", b"4", b"5", b"6"]
            for message in consumer:
                message.produce("c", b"8", after="1h")
                message.done()
                break
            assert [one.value for one in outer.advance("1h")] == [b"8"]
            assert [one.value for one in inner.advance("1h")] == [b"7"]
        client.produce("a", b"9", delay="1h")
        assert outer.advance("30m") == []
        assert [one.value for one in outer.advance("30m")] == [b"9"]
    assert abs(clock_ns() - time.time_ns()) < 10**9
