"""Anonymous memory of real processes under a steady load: it must stay flat.

    python -m local.costs.soak [--minutes N] [--nodes N] [--rate N] [--most-ahead SECONDS]

A broker, nodes as a user would run them, and one caller that sends messages with dues spread evenly
over the next seconds. Each minute prints the anonymous memory of each server and cleaner, Kafka's
client and gRPC included. Exit code 1 if a process was restarted, or grows: after `WARM_UP_MINUTES`,
the least that it had in a quarter of the time must not be more than in the quarter before by more
than `MARGIN_BYTES`. What is never given back shows in the least; the greatest depends on when a
minute's ledger was published.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from delaywheel import Client, Message
from local.costs.memory import anonymous_bytes
from local.loopback.child import interrupt_on_signals
from local.loopback.cluster import LocalCluster
from local.loopback.node import Node

TOPIC = "soak"
VALUE = bytes(200)
BATCHES_PER_S = 2
WARM_UP_MINUTES = 4
"""Caches of seconds are full by then, and Kafka's client has its buffers."""

LEAST_MINUTES = WARM_UP_MINUTES + 8
MARGIN_BYTES = 3 << 20
PROCESSES = ("server", "cleaner")


def pids_of(nodes: Sequence[Node]) -> dict[str, int]:
    """Returns the process ids by node and process."""
    return {
        f"{node.id} {name}": pid
        for node in nodes
        for name, pid in zip(PROCESSES, node.pids([f"{p}_pid" for p in PROCESSES]), strict=True)
    }


def send_for(client: Client, seconds: float, per_s: int, most_ahead_s: float) -> int:
    """Sends messages in even batches for a while; returns how many were accepted."""
    chance = random.Random(per_s)  # noqa: S311 - nothing is secret
    began_s, accepted = time.monotonic(), 0
    for number in range(int(seconds * BATCHES_PER_S)):
        time.sleep(max(0.0, began_s + number / BATCHES_PER_S - time.monotonic()))
        ahead_s = [chance.uniform(0, most_ahead_s) for _ in range(per_s // BATCHES_PER_S)]
        messages = [Message(TOPIC, VALUE, delay=timedelta(seconds=each)) for each in ahead_s]
        accepted += sum(result.handle is not None for result in client.produce_many(messages))
    return accepted


def soak(cluster: LocalCluster, options: argparse.Namespace) -> Iterator[Mapping[str, int]]:
    """Yields the memory of each process in bytes, once a minute under load.

    Raises:
        RuntimeError: A process was restarted.
    """
    cluster.create_topic(TOPIC, 3)
    cluster.wait_until_accepting()
    pids = pids_of(cluster.nodes)
    with Client([node.address for node in cluster.nodes]) as client:
        for _ in range(options.minutes):
            accepted = send_for(client, 60, options.rate, options.most_ahead)
            if pids_of(cluster.nodes) != pids:
                raise RuntimeError(f"a process was restarted: see {cluster.folder}/*.log")
            print(f"{accepted:8,}", end="", flush=True)
            yield {name: anonymous_bytes(pid) for name, pid in pids.items()}


def is_flat(samples: Sequence[int]) -> bool:
    """Whether the last quarter of the time needs no more than the one before."""
    quarter = max(1, len(samples) // 4)
    return min(samples[-quarter:]) <= min(samples[-2 * quarter : -quarter]) + MARGIN_BYTES


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m local.costs.soak")
    parser.add_argument("--minutes", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rate", type=int, default=200, help="messages a second")
    parser.add_argument("--most-ahead", type=float, default=20.0, help="greatest delay, seconds")
    options = parser.parse_args()
    if options.minutes < LEAST_MINUTES:
        parser.error(f"--minutes must be at least {LEAST_MINUTES}")
    interrupt_on_signals()
    samples: list[Mapping[str, int]] = []
    with LocalCluster(nodes=options.nodes, restart=False) as cluster:
        for sample in soak(cluster, options):
            samples.append(sample)
            sizes = "  ".join(f"{name} {size / (1 << 20):.1f}" for name, size in sample.items())
            print(f" accepted; MiB: {sizes}", flush=True)
        leader = cluster.leader()
        print(f"leader at the end: {leader and leader.id}")
    warm = samples[WARM_UP_MINUTES:]
    growing = [name for name in warm[0] if not is_flat([sample[name] for sample in warm])]
    print(f"grown: {', '.join(growing) or 'none'}")
    return 1 if growing else 0


if __name__ == "__main__":
    sys.exit(main())
