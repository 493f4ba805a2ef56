"""Nothing that callers send, repeat, or do not read ends a node, holds it up, or fills its memory.

Some seconds with the other tests. By hand, for some minutes: ``DELAYWHEEL_FUZZ_MINUTES=10``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from local.kafka import free_ports
from support.fuzzing import ATTACKS, Attack, Way, field
from support.server_process import ServerProcess, wait_until

MINUTES = float(os.environ.get("DELAYWHEEL_FUZZ_MINUTES", "0"))
# Beside the other tests, which share the machine, only what holds up a node's office is found.
LAG_S = 0.25 if MINUTES else 1.0
# With these bounds callers can hold some 200 MiB, by docs/OPERATIONS.md.
GROWTH_BYTES = 500 << 20
BOUNDS = {
    "max_message_bytes": "100000",
    "max_request_bytes": str(4 << 20),
    "max_caller_in_flight_bytes": str(8 << 20),
    "max_in_flight_bytes": str(16 << 20),
    "span_seconds": "600",
}
# Sleeps as the server's pulse does, and tells how late it woke: that is the machine's doing.
_CONTROL = """
import sys, threading, time
worst = 0.0
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.is_set():
    began = time.monotonic()
    time.sleep(0.1)
    worst = max(worst, time.monotonic() - began - 0.1)
print(worst)
"""


class Target:
    """A server process under attack, and a process beside it that does nothing."""

    def __init__(self, data: Path) -> None:
        self.http = f"127.0.0.1:{free_ports(1)[0]}"
        self.server = ServerProcess(data, metrics_listen=self.http, **BOUNDS)
        self.ends_at = time.monotonic() + MINUTES * 60 if MINUTES else None

    def start(self) -> None:
        self.server.start()
        self.server.wait_accepting()
        self._control = subprocess.Popen(
            [sys.executable, "-c", _CONTROL], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._bytes_before = self._memory_bytes()
        self._most_bytes = 0
        self._worst_lag_s = 0.0
        self._worst: list[Attack] = []

    def stop(self) -> None:
        self._control.kill()
        self._control.wait()
        assert self._control.stdin is not None
        assert self._control.stdout is not None
        self._control.stdin.close()
        self._control.stdout.close()
        self.server.kill()

    def bear(self, attacks: list[Attack]) -> None:
        """All of them at once; afterwards the node takes messages as before."""
        if self.ends_at is not None and time.monotonic() > self.ends_at:
            return
        ends = [attack.begin(str(self.server.address)) for attack in attacks]
        self._look(attacks)
        for end in ends:
            end()
        wait_until("it takes messages", self._takes)
        self._look(attacks)

    def assert_never_late(self) -> None:
        """No later than a process that does nothing, but for what is allowed."""
        told, _ = self._control.communicate(b"", timeout=30)
        machine_s = float(told)
        print(  # noqa: T201 - pytest shows it with -s
            f"lag {self._worst_lag_s * 1000:.0f} ms (machine {machine_s * 1000:.0f} ms),"
            f" memory +{(self._most_bytes - self._bytes_before) >> 20} MiB; worst: {self._worst}"
        )
        assert self._worst_lag_s <= LAG_S + 2 * machine_s

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
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        lag = re.search(r"^delaywheel_loop_lag_max_seconds (\S+)", text, re.MULTILINE)
        assert lag is not None
        if float(lag[1]) > self._worst_lag_s:
            self._worst_lag_s, self._worst = float(lag[1]), attacks

    def _memory_bytes(self) -> int:
        pages = Path(f"/proc/{self.server.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("fuzz") / "n1")
    made.start()
    yield made
    made.stop()


def test_answers_that_are_not_read_hold_a_bounded_number_of_bytes(target: Target) -> None:
    """Rows of nothing: the shortest request of which an answer is long."""
    requests = (field(1, b"") * 10_000,) * 300
    stream = "/delaywheel.v1.DelayWheel/DelayProduceStream"
    target.bear([Attack(stream, requests, Way.HOLD)] * 3)


@settings(
    max_examples=int(MINUTES * 120) or 12,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=not MINUTES,
)
@given(attacks=st.lists(ATTACKS, min_size=1, max_size=5))
def test_any_calls(target: Target, attacks: list[Attack]) -> None:
    target.bear(attacks)


def test_nobody_was_held_up(target: Target) -> None:
    """By all of the above."""
    target.assert_never_late()
