"""No calls, repeated, malformed or unread, end a node, hold it up, or fill its memory.

Some seconds with the other tests. By hand, for some minutes: ``DELAYWHEEL_FUZZ_MINUTES=10``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from support.process.lateness import Late
from support.server import watched_server
from support.server.fuzzing import ATTACKS, Attack, Way, columns, field
from support.server.server_process import ServerProcess
from support.services.waiting import wait_until

MINUTES = float(os.environ.get("DELAYWHEEL_FUZZ_MINUTES", "0"))
pytestmark = pytest.mark.timeout(480 + 60 * MINUTES)
# By its own doing, whatever else the machine has to do (lateness.py).
LAG_S = 0.25
# With these bounds callers can hold some 200 MiB, by docs/SIZING.md.
GROWTH_BYTES = 500 << 20
BOUNDS = {
    "max_message_bytes": "100000",
    "max_request_bytes": str(4 << 20),
    "max_caller_in_flight_bytes": str(8 << 20),
    "max_in_flight_bytes": str(16 << 20),
    "span_seconds": "600",
}
_STREAM = "/delaywheel.v1.DelayWheel/DelayProduceStream"
_HEADER = b"\1\0\0\0\xff\xff\xff\xffa"
_TOPICS = [f"t{number}" for number in range(10_000)]


class Target:
    """A server process under attack."""

    def __init__(self, folder: Path) -> None:
        self._reported = folder / "lateness"
        self.server = ServerProcess(folder / "n1", **BOUNDS)
        self.server.program = watched_server.program(self._reported)
        self.ends_at = time.monotonic() + MINUTES * 60 if MINUTES else None

    def start(self) -> None:
        self.server.start()
        self.server.wait_accepting()
        self._bytes_before = self._memory_bytes()
        self._most_bytes = 0
        self._seen = 0
        self._worst: tuple[Late, list[Attack]] = (Late(0.0, 0.0, {}), [])

    def stop(self) -> None:
        self.server.kill()

    def bear(self, attacks: list[Attack]) -> None:
        """All of them at once; afterwards the node accepts messages as before."""
        if self.ends_at is not None and time.monotonic() > self.ends_at:
            return
        ends = [attack.begin(str(self.server.address)) for attack in attacks]
        self._look(attacks)
        for end in ends:
            end()
        wait_until("it takes messages", self._takes)
        self._look(attacks)

    def assert_never_late(self) -> None:
        """Checks that lateness stays within its limit."""
        late, attacks = self._worst
        print(  # noqa: T201 - pytest shows it with -s
            f"lag {late.own_s * 1000:.0f} ms of {late.lag_s * 1000:.0f} ms, {self._seen} of more"
            f" than {watched_server.REPORTED_S * 1000:.0f} ms; it ran {late.threads};"
            f" memory +{(self._most_bytes - self._bytes_before) >> 20} MiB; worst: {attacks}"
        )
        assert late.own_s <= LAG_S

    def _takes(self) -> bool:
        assert self.server.process.poll() is None, "the server ended"
        message = pb.DelayedMessage(topic="orders", value=b"v", delay_ms=60_000)
        try:
            (result,) = self.server.produce(message)
        except grpc.RpcError:
            return False
        assert not result.HasField("error"), result.error
        return True

    def _look(self, attacks: list[Attack]) -> None:
        assert self.server.process.poll() is None, "the server ended"
        self._most_bytes = max(self._most_bytes, self._memory_bytes())
        assert self._most_bytes - self._bytes_before < GROWTH_BYTES
        reported = watched_server.read(self._reported)
        for late in reported[self._seen :]:
            if late.own_s > self._worst[0].own_s:
                self._worst = late, attacks
        self._seen = len(reported)

    def _memory_bytes(self) -> int:
        pages = Path(f"/proc/{self.server.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("fuzz"))
    made.start()
    yield made
    made.stop()


def test_answers_that_are_not_read_hold_a_bounded_number_of_bytes(target: Target) -> None:
    """Empty rows: the shortest request with a long answer."""
    requests = (field(1, b"") * 10_000,) * 300
    target.bear([Attack(_STREAM, requests, Way.HOLD, callers=3)])


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(columns(256, ["orders"], 60_000, _HEADER, 50, 0), id="headers"),
        pytest.param(columns(10_000, _TOPICS, 60_000, b"", 0, 0), id="topics"),
        pytest.param(field(1, b"\x12\x06orders\x48\xe0\x80\x04") * 256, id="rows"),
    ],
)
def test_many_callers_of_requests_that_seem_small(target: Target, request_: bytes) -> None:
    """Each of them is small; all of them together are not."""
    target.bear([Attack(_STREAM, (request_,) * 2, Way.READ, callers=32)])


@settings(
    max_examples=int(MINUTES * 120) or 4,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=not MINUTES,
)
@given(attacks=st.lists(ATTACKS, min_size=1, max_size=5))
def test_any_calls(target: Target, attacks: list[Attack]) -> None:
    target.bear(attacks)


def test_nobody_was_held_up(target: Target) -> None:
    """None of the above held the node up."""
    target.assert_never_late()
