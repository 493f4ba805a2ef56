"""The cost of three nodes at rest and under small groups: CPU and context switches.

    python -m local.costs.node_cost [--rounds N] [--seconds S] [--groups-per-s N] [--messages N]

A broker, three nodes as a user would run them, and one caller that sends small requests to one of
them, the origin, so that each request is a group. Rest and traffic take turns. The CPU time and the
voluntary context switches of each process and its threads are the kernel's own (/proc); printed are
the least and the median of all rounds, per second at rest, and what each group adds to that.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from local.loopback.child import interrupt_on_signals
from local.loopback.cluster import LocalCluster
from local.loopback.node import Node

TOPIC = "node-cost"
VALUE_BYTES = 200
AHEAD_S = (3.0, 13.0)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WARM_UP_S = 8.0
_PROCESSES = ("server", "cleaner")
_FAILING_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of threads, as a total or a difference."""

    cpu_s: float = 0.0
    switches: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.cpu_s + other.cpu_s, self.switches + other.switches)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.cpu_s - other.cpu_s, self.switches - other.switches)

    def __mul__(self, factor: float) -> Usage:
        return Usage(self.cpu_s * factor, self.switches * factor)


Threads = Mapping[tuple[int, str], Usage]
"""By id and name."""


def threads_of(pid: int) -> Threads:
    """Returns each thread's usage; CPU in nanoseconds where available."""
    used: dict[tuple[int, str], Usage] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            status = dict(
                line.split(":\t", 1) for line in (task / "status").read_text().splitlines()
            )
            cpu_s = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended just now
        switches = int(status["voluntary_ctxt_switches"])
        used[int(task.name), status["Name"]] = Usage(cpu_s, switches)
    return used


@contextmanager
def used_in(nodes: Sequence[Node]) -> Iterator[dict[tuple[str, str], Usage]]:
    """Collects usage by node and process, and by ``process/thread``; filled in at the end."""
    pids = {
        (node.id, name): pid
        for node in nodes
        for name, pid in zip(
            _PROCESSES, node.pids([f"{name}_pid" for name in _PROCESSES]), strict=True
        )
    }
    before = {key: threads_of(pid) for key, pid in pids.items()}
    found: dict[tuple[str, str], Usage] = defaultdict(Usage)
    yield found
    for (node, process), pid in pids.items():
        for thread, usage in threads_of(pid).items():
            grown = usage - before[node, process].get(thread, Usage())
            found[node, process] += grown
            found[node, f"{process}/{thread[1]}"] += grown


def send(stub: object, groups: int, groups_per_s: float, messages: int) -> None:
    """Sends requests at even distances, and waits for all answers; some may fail."""
    from delaywheel_proto.v1 import delaywheel_pb2 as pb  # noqa: PLC0415

    chance = random.Random(1)  # noqa: S311 - nothing is secret
    began_s, calls = time.monotonic(), []
    for number in range(groups):
        now_ms = time.time() * 1000
        request = pb.DelayProduceRequest(
            messages=[
                pb.DelayedMessage(
                    topic=TOPIC,
                    value=bytes(VALUE_BYTES),
                    id=uuid.uuid4().bytes,
                    deliver_at_ms=int(now_ms + 1000 * chance.uniform(*AHEAD_S)),
                )
                for _ in range(messages)
            ]
        )
        time.sleep(max(0.0, began_s + number / groups_per_s - time.monotonic()))
        calls.append(stub.DelayProduce.future(request, timeout=30))  # type: ignore[attr-defined]
    failed = [call for call in calls if call.exception() or call.result().results[0].error.reason]
    if len(failed) > len(calls) * _FAILING_SHARE:
        raise RuntimeError(f"{len(failed)} of {len(calls)} requests failed: {failed[0]}")


class Table:
    """The usage of all rounds, divided by seconds or groups."""

    def __init__(self) -> None:
        self._rounds: list[dict[tuple[str, str], Usage]] = []

    def add(self, used: Mapping[tuple[str, str], Usage], units: float) -> None:
        """Adds a round."""
        self._rounds.append({key: usage * (1 / units) for key, usage in used.items()})

    def lines(self, roles: Mapping[str, str], *, cpu_scale: float, detail: bool) -> Iterator[str]:
        """Returns a line for each process or thread."""
        keys = sorted({key for found in self._rounds for key in found})
        for node, name in keys:
            if "/" in name and not detail:
                continue
            of = [found.get((node, name), Usage()) for found in self._rounds]
            cpu = [usage.cpu_s * cpu_scale for usage in of]
            switches = [usage.switches for usage in of]
            if "/" in name and max(switches) < 0.05 and max(cpu) * 100 < cpu_scale:
                continue
            yield (
                f"  {node + ' (' + roles[node] + ') ' + name:<46}"
                f"{min(cpu):9.2f}{statistics.median(cpu):9.2f}"
                f"{min(switches):9.1f}{statistics.median(switches):9.1f}"
            )
        total = [
            sum(u.cpu_s for key, u in found.items() if "/" not in key[1]) * cpu_scale
            for found in self._rounds
        ]
        yield f"  {'all':<46}{min(total):9.2f}{statistics.median(total):9.2f}"


def measure(cluster: LocalCluster, options: argparse.Namespace) -> None:
    """Measures and prints both tables."""
    import grpc  # noqa: PLC0415 - not for `--help`

    from delaywheel.client.exchange.channel import CHANNEL_OPTIONS  # noqa: PLC0415
    from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub  # noqa: PLC0415

    cluster.create_topic(TOPIC, 5)
    cluster.wait_until_accepting()
    rest, traffic = Table(), Table()
    origin = next(node for node in cluster.nodes if node is not cluster.leader())
    with grpc.insecure_channel(origin.address, options=CHANNEL_OPTIONS) as channel:
        stub = DelayWheelStub(channel)
        send(stub, 100, options.groups_per_s, options.messages)
        for _ in range(options.rounds):
            time.sleep(AHEAD_S[1] + 2)  # nothing is due any more
            with used_in(cluster.nodes) as used:
                time.sleep(options.seconds)
            at_rest = used
            rest.add(used, options.seconds)
            send(
                stub, int(_WARM_UP_S * options.groups_per_s), options.groups_per_s, options.messages
            )
            groups = int(options.seconds * options.groups_per_s)
            began_s = time.monotonic()
            with used_in(cluster.nodes) as used:
                send(stub, groups, options.groups_per_s, options.messages)
            as_long = (time.monotonic() - began_s) / options.seconds
            added = {
                key: usage - at_rest.get(key, Usage()) * as_long for key, usage in used.items()
            }
            traffic.add(added, groups)
    leader = cluster.leader()
    roles = {
        node.id: "+".join(
            itertools.compress(
                ("origin", "leader", "mirror"), (node is origin, node is leader, node is not origin)
            )
        )
        for node in cluster.nodes
    }
    head = f"{'':<48}{'least':>9}{'median':>9}{'least':>9}{'median':>9}"
    print(f"at rest, of a second: CPU in % of a core, switches\n{head}")
    print(*rest.lines(roles, cpu_scale=100, detail=options.threads), sep="\n")
    print(f"of a group of {options.messages}, beyond rest: CPU in us, switches\n{head}")
    print(*traffic.lines(roles, cpu_scale=1e6, detail=options.threads), sep="\n")


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m local.costs.node_cost")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of rest, and of traffic")
    parser.add_argument("--groups-per-s", type=float, default=127.0)
    parser.add_argument("--messages", type=int, default=2, help="of a group, due 3 to 13 s ahead")
    parser.add_argument("--kafka", metavar="ADDRESS", help="use this broker")
    parser.add_argument("--threads", action="store_true", help="show each thread")
    options = parser.parse_args()
    interrupt_on_signals()
    with LocalCluster(nodes=3, kafka=options.kafka) as cluster:
        measure(cluster, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
