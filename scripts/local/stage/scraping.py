"""Reads the nodes' counts from their metrics, and computes the cost of a period."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from local.loopback.machine import CpuTime
from local.loopback.node import Node

TIMEOUT_S = 10.0
PROCESSES = ("server", "cleaner")
# Name without the prefix, and the process it belongs to, if any.
Sample: TypeAlias = tuple[str, str]
Samples: TypeAlias = dict[Sample, float]


def scrape(address: str) -> Samples:
    """Returns all samples of a node without labels, or with one for each process."""
    # `--help` must not need it.
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    return {
        (sample.name.removeprefix("delaywheel_"), sample.labels.get("process", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels.keys() - {"process"}
    }


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one node did in a period, and what it cost.

    Attributes:
        accepted: Messages that it took.
        forwarded: Messages that it committed to their topics.
        cpu_s: CPU time by process.
        elections: Times that it began to lead.
        in_sync_changes: Times that the members in sync with its wheel changed.
        restarts: Processes that were restarted; what they did before is not counted.
    """

    accepted: int
    forwarded: int
    cpu_s: dict[str, float]
    elections: int
    in_sync_changes: int
    restarts: int

    @classmethod
    def between(cls, before: Samples, after: Samples) -> NodeCost:
        """Returns the difference of two scrapes of a node."""
        restarted = {
            process
            for process in PROCESSES
            if _started(before, process) != _started(after, process)
        }

        def grown(name: str, counts: str, process: str = "") -> float:
            """Returns a counter's growth; `counts` is the process that keeps it."""
            since = 0.0 if counts in restarted else before.get((name, process), 0.0)
            return after.get((name, process), 0.0) - since

        return cls(
            accepted=int(grown("accepted_messages_total", "server")),
            forwarded=int(grown("forwarded_messages_total", "cleaner")),
            cpu_s={
                process: grown("process_cpu_seconds_total", process, process)
                for process in PROCESSES
            },
            elections=int(grown("elections_total", "cleaner")),
            in_sync_changes=int(grown("in_sync_changes_total", "server")),
            restarts=len(restarted),
        )


def _started(samples: Samples, process: str) -> float | None:
    return samples.get(("process_start_time_seconds", process))


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a period for all nodes.

    Attributes:
        nodes: By id.
        cpu_busy_share: How much of the machine's CPUs was used, by all processes.
    """

    nodes: dict[str, NodeCost]
    cpu_busy_share: float


class Meter:
    """Measures from its creation on."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._before = self._scrape()
        self._cpu = CpuTime()

    def read(self) -> Cost:
        """Returns the cost so far."""
        after, busy_share = self._scrape(), self._cpu.busy_share()
        costs = {
            name: NodeCost.between(before, after[name]) for name, before in self._before.items()
        }
        return Cost(costs, busy_share)

    def _scrape(self) -> dict[str, Samples]:
        return {node.id: scrape(node.metrics_address) for node in self._nodes}
