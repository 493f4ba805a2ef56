"""A cluster with its load: four senders, one receiver, and their resource usage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Final, Self

from local.bench.consuming import Consumer, topic_names
from local.bench.figures import Second, by_second
from local.bench.jobs import Bulk, Job, Paced, Sent
from local.bench.sending import CLUSTER_ID, Sender
from local.bench.usage import Sampler, Usage, Watch
from local.bench.workloads import Topics
from local.loopback.beside import IndexJob
from local.loopback.cluster import LocalCluster
from local.stage.scraping import Cost, Meter, scrape
from local.stage.tally import Spread

OBSERVED: Final = {
    "ours": "delayed",
    "secure": "secured",
    "traced": "traced",
    "at_once": "instant",
    "halves": "halved",
    "ingress": "ingressed",
    "plain": "direct",
    "floor": "transacted",
}
SAME_SENDERS: Final = {"at_once": "ours", "halves": "ours"}
"""Kinds whose senders are those of another."""
SECURE: Final = "secure "
"""What the names of the second cluster's processes begin with."""
SHARED: Final = "many"
"""Where all send to if there are many partitions: topics for each kind, and a consumer of them,
would cost more than anything."""
_MANY_PARTITIONS: Final = 50
BULK: Final = "bulk"
ARRIVAL_TIMEOUT_S: Final = 30.0
_SETTLE_S: Final = 0.5
"""Status files and metrics are at most this old."""


@dataclass(slots=True)
class Part:
    """What one kind of sender did in a round, and what it cost.

    Attributes:
        sent: The result of the sending job.
        seconds: How long usage was measured; at a fixed rate only while as much is due as is sent.
        messages: How many messages were sent meanwhile.
        lateness: The lateness of what arrived; None: not measured.
        over_time: The same, second by second.
        last_ms: The last arrival, Unix milliseconds.
        used: Usage by process.
        cpu: CPU seconds by process, second by second, with the Unix second.
        groups: The groups that each node has written.
        cost: Costs as the nodes count them.
    """

    sent: Sent
    seconds: float = 0.0
    messages: float = 0.0
    lateness: Spread | None = None
    over_time: list[Second] = field(default_factory=list)
    last_ms: float = 0.0
    used: dict[str, Usage] = field(default_factory=dict)
    cpu: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)
    cost: Cost | None = None


class Stand:
    """The whole stand; a context manager.

    Attributes:
        cluster: Brokers and nodes.
        secured: Nodes with mutual TLS and grants on the same Kafka; None: there are none.
        beside: Process ids, by name, of what else is measured.
    """

    def __init__(  # noqa: PLR0913 - each is an option of the script
        self,
        nodes: int,
        span_s: int,
        cadence_s: float,
        say: Callable[[str], None],
        *,
        topics: Topics,
        programs: int,
        brokers: int = 1,
        is_secure: bool = False,
        has_halves: bool = False,
        is_traced: bool = False,
    ) -> None:
        self._settings = {
            "cluster_id": CLUSTER_ID,
            "span_seconds": span_s,
            "halves": has_halves,
            "trace": is_traced,
        }
        self.cluster = LocalCluster(nodes=nodes, brokers=brokers, settings=self._settings, say=say)
        self.secured: LocalCluster | None = None
        self.beside: dict[str, int] = {}
        self._is_secure, self._say = is_secure, say
        self._is_traced = is_traced
        self._index: IndexJob | None = None
        self._cadence_s = cadence_s
        self._topics = topics
        self._programs = programs
        is_shared = topics.count * topics.partitions > _MANY_PARTITIONS
        self._families = {kind: SHARED if is_shared else name for kind, name in OBSERVED.items()}
        self._senders: dict[str, list[Sender]] = {}
        self._ended = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            cluster = stack.enter_context(self.cluster)
            cluster.wait_until_accepting()
            if self._is_secure:
                self.secured = stack.enter_context(self._second_cluster())
                self.secured.wait_until_accepting()
            if self._is_traced:
                job = IndexJob(cluster.nodes[0].config, cluster.folder)
                self._index = stack.enter_context(job)
            families = dict.fromkeys(self._families.values())
            topics = [name for each in families for name in topic_names(each, self._topics.count)]
            partitions = self._topics.partitions
            cluster.create_topics(topics, partitions)
            cluster.create_topics([BULK], Topics().partitions)
            self._consumer = stack.enter_context(Consumer(cluster.kafka, topics, partitions))
            for kind in OBSERVED.keys() - SAME_SENDERS.keys():
                self._senders[kind] = [
                    stack.enter_context(each) for each in self._senders_for(kind)
                ]
            self._ended = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.__exit__(*error)  # type: ignore[arg-type]

    def _second_cluster(self) -> LocalCluster:
        return LocalCluster(
            nodes=len(self.cluster.nodes),
            kafka=self.cluster.kafka,
            settings={**self._settings, "cluster_id": f"{CLUSTER_ID}-secure"},
            is_secure=True,
            say=self._say,
        )

    def _senders_for(self, kind: str) -> Iterator[Sender]:
        if kind not in ("ours", "secure", "traced"):
            yield Sender(kind, self.cluster.kafka, self._cadence_s)
        elif kind == "ours" or (self.secured if kind == "secure" else self._is_traced):
            cluster = self._cluster_of(kind)
            traced_to = cluster.kafka if kind == "traced" else None
            for node in islice(cycle(cluster.nodes), self._programs):
                yield Sender("ours", node.address, self._cadence_s, cluster.secure, traced_to)

    def _cluster_of(self, kind: str) -> LocalCluster:
        """Returns the cluster that forwards what is sent in this way."""
        return self.secured if kind == "secure" and self.secured is not None else self.cluster

    def pids(self) -> dict[str, int]:
        """Returns all process ids by name: `n1 server`, `broker`, `sender ours`, `consumer`.

        Several brokers are `broker 1` and so on.
        """
        clusters = [("", self.cluster), *([(SECURE, self.secured)] if self.secured else [])]
        found = {
            f"{prefix}{node.id} {name}": pid
            for prefix, cluster in clusters
            for node in cluster.nodes
            for name, key in (("server", "server_pid"), ("cleaner", "cleaner_pid"), ("node", "pid"))
            if (pid := node.row()[key]) is not None
        }
        brokers = self.cluster.broker_pids
        for number, pid in brokers.items():
            found["broker" + f" {number}" * (len(brokers) > 1)] = pid
        senders = {
            _sender_name(kind) + f" {number + 1}" * (len(programs) > 1): sender.pid
            for kind, programs in self._senders.items()
            for number, sender in enumerate(programs)
        }
        if self._index is not None:
            found |= self._index.pids()
        return {**found, **senders, "consumer": self._consumer.pid, **self.beside}

    def do(self, kind: str, job: Job) -> Part:
        """Does a job, waits for its messages to arrive, and returns the costs.

        Raises:
            ClusterError: Something was not acknowledged, or did not arrive.
        """
        sender = self._senders_of(kind)[0]
        cluster = self._cluster_of(kind)
        with self._watched(cluster) as part:
            if isinstance(job, Bulk):
                with self._counted(part, cluster):
                    part.sent = sender.do(job, BULK)
                    part.messages = part.sent.messages
                return part
            if isinstance(job, Paced):
                programs = self._begin(kind, job)
                time.sleep(job.lead_s)
                with self._counted(part, cluster):
                    part.sent = Sent.of_all([each.end() for each in programs])
                part.messages = part.sent.per_s * part.seconds
                self._take(self._families[kind], part)
            else:
                sender.begin(job, self._families[kind])
                with self._counted(part, cluster):
                    part.sent = sender.end()
                    self._take(self._families[kind], part)
                part.messages = part.sent.messages
        return part

    def struck(self, job: Paced, strike: Callable[[], None], after_s: float) -> Part:
        """Does a job of ours, and something to the cluster meanwhile; measures lateness alone."""
        part, programs = Part(Sent(0, 0.0)), self._begin("ours", job)
        time.sleep(after_s)
        strike()
        part.sent = Sent.of_all([each.end() for each in programs])
        self._take(self._families["ours"], part)
        return part

    def send(self, job: Bulk) -> Sent:
        """Does a job of ours, and measures nothing: a node may be away."""
        return self._senders["ours"][0].do(job, BULK)

    def begin_beside(self, job: Paced) -> Callable[[], dict[str, Sent]]:
        """Starts a job of ours, a program for each node, whose messages nobody waits for.

        Returns:
            Waits for it; returns what each program did, by its node.
        """
        programs = self._senders["ours"][: job.senders.programs]
        for sender in programs:
            sender.begin(job, BULK)
        names = [node.id for node in self.cluster.nodes]
        return lambda: {name: each.end() for name, each in zip(names, programs, strict=False)}

    def _begin(self, kind: str, job: Paced) -> list[Sender]:
        """Starts a job in as many programs as it has; `Sender.end` waits for each."""
        programs = self._senders_of(kind)[: job.senders.programs]
        for sender in programs:
            sender.begin(job, self._families[kind])
        return programs

    def _senders_of(self, kind: str) -> list[Sender]:
        return self._senders[SAME_SENDERS.get(kind, kind)]

    def rest(self, seconds: float) -> Part:
        """Does nothing for a while, and returns the costs."""
        with self._watched(self.cluster) as part, self._counted(part, self.cluster):
            time.sleep(seconds)
        return part

    def _take(self, family: str, part: Part) -> None:
        """Waits until all sent messages have arrived."""
        dues_ms, arrived_ms = self._consumer.take(
            family, part.sent.messages - part.sent.cancelled, ARRIVAL_TIMEOUT_S, self.cluster.watch
        )
        late_ms = arrived_ms - dues_ms
        part.lateness = Spread.of(late_ms.tolist())
        part.over_time = by_second(dues_ms, late_ms)
        part.last_ms = float(arrived_ms.max())

    @contextmanager
    def _watched(self, cluster: LocalCluster) -> Iterator[Part]:
        """Measures a whole part: CPU by second, and the nodes' counts."""
        part = Part(Sent(0, 0.0))
        time.sleep(_SETTLE_S)
        meter = Meter(cluster.nodes)
        with Sampler(self.pids()) as sampler:
            yield part
        part.cpu = sampler.samples
        time.sleep(_SETTLE_S)
        part.cost = meter.read()

    @contextmanager
    def _counted(self, part: Part, cluster: LocalCluster) -> Iterator[None]:
        """Measures all processes' usage and the written groups for a while."""
        groups, watch, began = _groups(cluster), Watch(self.pids()), time.monotonic()
        yield
        part.seconds, part.used = time.monotonic() - began, watch.read()
        part.groups = {name: after - groups[name] for name, after in _groups(cluster).items()}


def _sender_name(kind: str) -> str:
    if kind == "traced":
        return "sender ours traced"
    return f"{SECURE}sender ours" if kind == "secure" else f"sender {kind}"


def _groups(cluster: LocalCluster) -> dict[str, int]:
    return {
        node.id: int(scrape(node.metrics_address).get(("written_groups_total", ""), 0))
        for node in cluster.nodes
    }
