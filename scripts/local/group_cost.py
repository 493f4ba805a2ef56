"""The cost of a small group from its columns to the answer, at origin and mirror.

    python -m local.group_cost [--rounds N] [--messages N]

Three drivers in one process, each with a folder on a real disk, that send one another messages as
bytes: everything that nodes do for a group except gRPC, sockets and threads. Printed are the least
and the median of all rounds, in microseconds of CPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.bundle import WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.node.events import Acknowledge, Event, MemberConfig
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.messages import Frames, PeerMessage
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role
from delaywheel_replica.peers.encoding import decode, encode
from delaywheel_replica.server.commit.committer import Answers, Request, RequestOutcome
from delaywheel_replica.server.commit.driver import Driver
from delaywheel_replica.server.commit.outside import Job
from delaywheel_replica.server.ledger.rows import Ledger
from delaywheel_replica.server.store.store import Store, StoreLimits
from local.costs.bundle_cost import columns_of

NODES = ("a", "b", "c")
ORIGIN = "a"
AHEAD_MS = (3_000, 13_000)
LATE_WINDOW_S = 120
_TICK_EVERY = 12  # groups: as at 120 a second


class Node:
    """One driver with its environment (`outside.Outside`)."""

    pid = 1

    def __init__(self, name: str, folder: Path) -> None:
        """Begins with an empty folder."""
        self.name = name
        self.jobs: deque[Job] = deque()
        self.sent: list[tuple[str, bytes]] = []
        self._last: tuple[object, bytes] | None = None
        disk = PosixDisk()
        self.store = Store.open(
            disk, folder, node=name, cluster_id="c", boot_id=f"boot-{name}", limits=StoreLimits()
        )
        self._ledger = Ledger(disk, folder)
        self.driver = Driver(MemberConfig(name, NODES, 2, LATE_WINDOW_S), self.store, self)

    def work(self) -> None:
        """Carries out all jobs."""
        while self.jobs:
            self.driver.do(self.jobs.popleft())

    def now_ms(self) -> int:
        """The monotonic clock."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """The wall clock."""
        return time.time_ns() // 1_000_000

    def enqueue(self, job: Job) -> None:
        """Puts a job into the queue."""
        self.jobs.append(job)

    def do_jobs(self, *, may_wait: bool) -> None:
        """Does nothing: `work` carries out the jobs."""

    def happened(self, event: Event) -> None:
        """Ignores events."""

    def send(self, peer: str, message: PeerMessage) -> None:
        """Encodes a message; one for all peers is encoded only once, as in `PeerNetwork`."""
        same = message.frames if isinstance(message, Frames) else message
        if self._last is None or self._last[0] is not same:
            self._last = same, encode(message)
        self.sent.append((peer, self._last[1]))

    def write_status(self) -> None:
        """Ignores status changes."""

    def acknowledged(self, effect: Acknowledge, answers: Answers) -> None:
        """Answers callers."""
        del effect
        self.answer(answers)

    def answer(self, answers: Answers) -> None:
        """Answers callers."""
        for request, outcome in answers:
            request.on_answer(outcome)

    def enter(
        self, wheel: WheelId, columns: Columns | None, group: WrittenGroup, accepted_at_ms: int
    ) -> None:
        """Enters frames into the ledger."""
        self._ledger.enter(wheel, columns, group, accepted_at_ms)


class Trio:
    """Three nodes with open wheels."""

    def __init__(self, folder: Path) -> None:
        """Connects the nodes; each has a wheel and a spare."""
        self.nodes = {name: Node(name, folder / name) for name in NODES}
        self.cpu_us: dict[str, list[float]] = defaultdict(list)
        self._wheels: dict[WheelId, WheelRecord] = {}
        members = {name: node.store.state.storage for name, node in self.nodes.items()}
        for number in (1, 2):
            for name in NODES:
                self._wheels[WheelId(name, number)] = WheelRecord(members, 2, 0, None)
            for _ in range(4):
                self.tick()

    def tick(self) -> None:
        """Ticks all nodes, which exchange progress and heartbeats."""
        for name, node in self.nodes.items():
            node.driver.cleaner_reported(_cleaner(node, self._wheels, leads=name == NODES[-1]))
            node.driver.tick()
            node.work()
        self.exchange({})

    def group(self, columns: Columns) -> None:
        """Runs one group, from the request to its answer."""
        origin, answered, cpu_us = self.nodes[ORIGIN], list[RequestOutcome](), dict[str, float]()
        with _counted(cpu_us, "origin: written and pushed"):
            origin.driver.submit(Request(columns, Kind.MESSAGES, answered.append))
            origin.work()
        self.exchange(cpu_us)
        assert answered, "no node answered"
        for stage, took_us in cpu_us.items():
            self.cpu_us[stage].append(took_us)

    def exchange(self, cpu_us: dict[str, float]) -> None:
        """Delivers messages until no node sends more."""
        while any(node.sent for node in self.nodes.values()):
            for name, node in self.nodes.items():
                sent, node.sent = node.sent, []
                for peer, data in sent:
                    at_origin = peer == ORIGIN
                    stage = "origin: two answers" if at_origin else "two mirrors: read to answered"
                    with _counted(cpu_us, stage):
                        self.nodes[peer].driver.received(name, cast("PeerMessage", decode(data)))
                        self.nodes[peer].work()


@contextmanager
def _counted(cpu_us: dict[str, float], stage: str) -> Iterator[None]:
    began_ns = time.thread_time_ns()
    yield
    took_us = (time.thread_time_ns() - began_ns) / 1_000
    cpu_us[stage] = cpu_us.get(stage, 0.0) + took_us


def _cleaner(node: Node, wheels: Mapping[WheelId, WheelRecord], *, leads: bool) -> CleanerStatus:
    return CleanerStatus(
        node=node.name,
        boot=f"boot-{node.name}",
        pid=node.pid,
        monotonic_ms=node.now_ms(),
        wall_ms=node.wall_ms(),
        role=Role.LEADING if leads else Role.STANDBY,
        epoch=1 if leads else None,
        progress=Progress(node.wall_ms(), None, {}, 0),
        control_offset=1,
        wheels=wheels,
    )


def main() -> None:
    """Prints one line for each stage."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--messages", type=int, default=2, help="of a group, due 3 to 13 s ahead")
    options = parser.parse_args()
    chance = np.random.default_rng(1)
    made = columns_of(options.messages, 1)
    with tempfile.TemporaryDirectory() as folder:
        trio = Trio(Path(folder))
        for number in range(options.rounds):
            if number % _TICK_EVERY == 0:
                trio.tick()
            due_ms = time.time_ns() // 1_000_000 + chance.integers(*AHEAD_MS, options.messages)
            trio.group(replace(made, due_ms=due_ms.astype(np.int64)))
    print(f"a group of {options.messages} messages, us of CPU: least, median")
    for stage, took_us in trio.cpu_us.items():
        print(f"  {stage:<34}{min(took_us):7.0f}{statistics.median(took_us):7.0f}")


if __name__ == "__main__":
    main()
