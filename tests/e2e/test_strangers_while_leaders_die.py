"""Strangers' bytes at each port of three nodes, callers, probes, and a leader killed each minute.

By hand: ``DELAYWHEEL_FUZZ_MINUTES=60`` for an hour of strangers. A minute without them stands
before every four with them, so that what else the machine does is in both figures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from delaywheel import Client
from delaywheel.errors import DelaywheelError
from local.loopback.cluster import LocalCluster
from local.loopback.node import PROCESSES, Node
from local.viewing.memory import resident_bytes
from support.server import h2_frames

MINUTES = int(os.environ.get("DELAYWHEEL_FUZZ_MINUTES", "0"))
pytestmark = [
    pytest.mark.skipif(not MINUTES, reason="by hand: it lasts for minutes"),
    pytest.mark.timeout(600 + 100 * MINUTES),
]
CALLERS = 4
FUZZED_MINUTES = 4
MOST_RSS_MB = 400
"""Of a process; docs/SIZING.md has what strangers can hold."""


class Asked:
    """Latencies in ms, with and without strangers, and what failed."""

    def __init__(self) -> None:
        self.fuzzed = False
        self.took_ms: dict[bool, list[float]] = {False: [], True: []}
        self.failed: list[str] = []

    def repeat(self, what: Callable[[], object], every_s: float, stop: threading.Event) -> None:
        while not stop.wait(every_s):
            began, fuzzed = time.monotonic(), self.fuzzed
            try:
                asked = what()
            except (DelaywheelError, OSError) as error:
                self.failed.append(f"{time.strftime('%T')} {error}")
            else:
                if asked:
                    self.took_ms[fuzzed].append((time.monotonic() - began) * 1000)

    def p99_ms(self, *, fuzzed: bool) -> float:
        return float(np.percentile(self.took_ms[fuzzed], 99))


@contextmanager
def strangers(nodes: list[Node], dots: Path) -> Iterator[None]:
    addresses = [at for n in nodes for at in (n.address, n.peer_address, n.metrics_address)]
    program = [sys.executable, h2_frames.__file__, *addresses]
    with dots.open("ab") as out:
        process = subprocess.Popen(["nice", *program], stdout=out)  # they have machines too
        try:
            yield
        finally:
            process.kill()
            process.wait()


def probe(node: Node) -> bool:
    """Returns whether it is there to be asked: who was killed may not be."""
    if not node.is_up:
        return False
    with urlopen(f"http://{node.metrics_address}/healthz", timeout=10) as answer:
        return bool(answer.read())


class Watched:
    """The cluster's processes: who ended without being killed, and how large they were."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._pids: dict[str, dict[str, int]] = {}
        self.ended: list[str] = []
        self.kills = 0
        self.most_rss_mb = 0

    def minute(self) -> None:
        """Watches for a minute, and kills the leader in its middle, or as soon as there is one."""
        ends = time.monotonic() + 60
        kill_at = ends - 30
        while (now := time.monotonic()) < ends:
            self._cluster.watch()
            self._look()
            if now >= kill_at and (leader := self._cluster.leader()) is not None:
                leader.kill()
                self.kills, kill_at = self.kills + 1, ends
            time.sleep(0.2)

    def _look(self) -> None:
        for node in self._cluster.nodes:
            row = node.row()
            pids = {name: row[name] for name in PROCESSES if row[name]}
            before = self._pids.get(node.id, {})
            if before.get("pid") != pids.get("pid"):
                before = {}  # it was killed, and started again
            gone = [name for name, pid in before.items() if pids.get(name, pid) != pid]
            self.ended += [f"{time.strftime('%T')} {node.id} {name}" for name in gone]
            self._pids[node.id] = before | pids
            for pid in pids.values():
                with suppress(OSError):  # it may just have been killed
                    self.most_rss_mb = max(self.most_rss_mb, resident_bytes(pid) >> 20)


def test_callers_and_probes_are_answered_as_without_strangers(tmp_path: Path) -> None:
    dots = tmp_path / "connections"
    calls, probes, stop = Asked(), Asked(), threading.Event()
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(nodes=3, folder=tmp_path))
        cluster.create_topic("orders", 3)
        cluster.wait_until_accepting()
        cluster.wait_until_in_sync()
        addresses = [node.address for node in cluster.nodes]
        client = stack.enter_context(Client(addresses))
        asking = [
            *((calls, lambda: client.produce("orders", b"v", delay="5s"), 0.04),) * CALLERS,
            *((probes, partial(probe, node), 0.2) for node in cluster.nodes),
        ]
        threads = [
            threading.Thread(target=asked.repeat, args=(what, every_s, stop))
            for asked, what, every_s in asking
        ]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(stop.set)
        watched = Watched(cluster)
        for minute in range(MINUTES):
            if minute % FUZZED_MINUTES == 0:
                calls.fuzzed = probes.fuzzed = False
                watched.minute()
            calls.fuzzed = probes.fuzzed = True
            with strangers(cluster.nodes, dots):
                watched.minute()
    for name, asked in (("calls", calls), ("probes", probes)):
        calm, fuzzed = asked.p99_ms(fuzzed=False), asked.p99_ms(fuzzed=True)
        sys.stderr.write(
            f"{name}: {len(asked.took_ms[False]):,} p99 {calm:.0f} ms; with strangers"
            f" {len(asked.took_ms[True]):,} p99 {fuzzed:.0f} ms, {fuzzed / calm:.2f} x;"
            f" {len(asked.failed)} failed {asked.failed[:5]}\n"
        )
    sys.stderr.write(
        f"{dots.stat().st_size:,} connections of strangers, {watched.kills} leaders killed;"
        f" at most {watched.most_rss_mb} MB; {watched.ended}\n"
    )
    assert not watched.ended
    assert not calls.failed
    assert watched.most_rss_mb < MOST_RSS_MB
    for asked in (calls, probes):
        assert asked.p99_ms(fuzzed=True) <= 2 * asked.p99_ms(fuzzed=False)
