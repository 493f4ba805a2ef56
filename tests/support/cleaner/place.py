"""A cleaner's leadership on a simulated Kafka, beside a fake server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel_replica.cleaner.candidacy import Candidacy
from delaywheel_replica.cleaner.delivery.forward import Forwarder
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.due.steps import Step
from delaywheel_replica.cleaner.kafka.follower import ControlFollower
from delaywheel_replica.cleaner.leadership import Leadership
from delaywheel_replica.cleaner.outside.ports import IDS, ProducersPort
from delaywheel_replica.cleaner.row_keeper import View
from delaywheel_replica.core.election.machine import ElectionConfig
from delaywheel_replica.core.leader.duties import Cluster
from delaywheel_replica.core.leader.pacing import CapLimits
from delaywheel_replica.core.protocol.control import ControlState
from delaywheel_replica.core.protocol.heartbeat import Heartbeat, Promise
from delaywheel_replica.core.protocol.status_files import KnownPeer, Role, ServerStatus
from delaywheel_replica.kafka_settings import KafkaNames
from sim.kafka.brokers import SimKafka
from sim.kafka.ports import SimKafkaClient
from sim.machine.clocks import SimClock
from sim.machine.scheduler import Scheduler
from sim.nodes.cleaner import Tasks
from support.cleaner.committing import AllGoes, no_ingress
from support.core.values import heartbeat

NAMES = KafkaNames("c")
NODES = ("a", "b", "c")
LEAST_PAUSE_S = 0.000_5
TERMS = {Role.RESTING, Role.LEADING}


class _SlowReader(DueReader):
    """A reader that is slow on request."""

    def __init__(self, place: Place, data: Path) -> None:
        super().__init__(PosixDisk(), data, preload_thread=False)
        self._place = place

    def next_step(self, now_ms: int, cap_messages: int, cap_bytes: int) -> Step:
        """See `DueReader`."""
        if self._place.reads_s:
            self._place.reading = True
            self._place.scheduler.sleep(self._place.reads_s)
            self._place.reading = False
        return super().next_step(now_ms, cap_messages, cap_bytes)


class Place:
    """Node a of three, and its server's report about the others.

    Attributes:
        heartbeats: the newest of each node; all drain, so that no node gets a wheel.
        heard: nodes that are heard; the others were when they were last in here.
        agrees: nodes that give their vote whenever asked.
        hears_leader: a leader is heard all the time.
        peers_ahead_ms: how far the clocks of the others are ahead.
        answers: to fences.
        iterations_us: how long the iterations took.
        reads_s: so long it takes to read what is due.
        reading: it is being read.
    """

    def __init__(self, data: Path, *, required: int) -> None:
        self.scheduler = Scheduler(1)
        self.kafka = SimKafka(self.scheduler, {"t": 1})
        self.clock = SimClock(self.scheduler)
        self.heartbeats: dict[str, Heartbeat] = {
            node: heartbeat(node, draining=True) for node in NODES
        }
        self.heard = {"b", "c"}
        self.agrees: set[str] = set()
        self.hears_leader = False
        self.peers_ahead_ms = 0
        self.answers: tuple[Promise, ...] = ()
        self.iterations_us: list[int] = []
        self.reads_s = 0.0
        self.reading = False
        self._heard_ms: dict[str, int] = {}
        self._reader = _SlowReader(self, data)
        self._required = required
        client = self.client("a")
        follower = ControlFollower(client, self.clock)
        candidacy = Candidacy(
            client,
            follower,
            node="a",
            control_topic=NAMES.control,
            clock=self.clock,
            runner=Tasks(self.scheduler, self.scheduler.process("a")),
            init_runner=Tasks(self.scheduler, self.scheduler.process("a")),
        )
        config = ElectionConfig(run="a-1", ids=IDS, nodes=len(NODES), required=required)
        self.leadership = Leadership(config, candidacy, follower, self._forwarder, clock=self.clock)
        self.scheduler.spawn("a", self._run)

    def client(self, node: str) -> SimKafkaClient:
        return SimKafkaClient(self.kafka, node, NAMES, self.clock)

    @property
    def view(self) -> View:
        return self.leadership.view()

    def until(self, holds: Callable[[], bool], *, within_s: float = 5) -> float:
        """Runs until it holds; returns how many seconds that took."""
        before_us = self.scheduler.now_us
        assert self.scheduler.run_for(within_s, holds), self.view
        return (self.scheduler.now_us - before_us) / 1e6

    def never(self, holds: Callable[[], bool], *, for_s: float) -> None:
        """Runs that long, checking that it never holds."""
        assert not self.scheduler.run_for(for_s, holds), self.view

    def in_term(self) -> bool:
        return self.view.role in TERMS

    def lead(self) -> None:
        """Makes it lead with a vote, and commit something."""
        self.agrees = {"b"}
        self.until(lambda: self.view.role is Role.LEADING)
        self.until(lambda: self.view.state.progress is not None)

    def give_wheel(self, node: str, *, hears: str = "") -> WheelId:
        """The leader registers a wheel for a node, which then drains again."""
        heard = dict.fromkeys(hears, 0)
        self.heartbeats[node] = heartbeat(node, heard=heard)
        wheel = WheelId(node, 1)
        self.until(lambda: wheel in self.view.state.wheels)
        self.heartbeats[node] = heartbeat(node, draining=True, open_=wheel, heard=heard)
        self.until(lambda: not self.view.fences)
        return wheel

    def _run(self) -> None:
        while True:
            before_us = self.scheduler.now_us
            wait_s = self.leadership.run_once(self._server())
            self.iterations_us.append(self.scheduler.now_us - before_us)
            self.scheduler.sleep(max(LEAST_PAUSE_S, wait_s))

    def _server(self) -> ServerStatus:
        now_ms, request = self.clock.monotonic_ms(), self.view.prevote_request
        self._heard_ms |= dict.fromkeys(self.heard, now_ms)
        wall_ms = self.clock.wall_ms() + self.peers_ahead_ms
        return ServerStatus(
            heartbeat=self.heartbeats["a"],
            pid=1,
            monotonic_ms=now_ms,
            peers={
                node: KnownPeer(replace(self.heartbeats[node], wall_ms=wall_ms), heard_ms)
                for node, heard_ms in sorted(self._heard_ms.items())
            },
            leader_heard_ms=now_ms if self.hears_leader else None,
            answers=self.answers,
            votes=frozenset() if request is None else frozenset(self.agrees),
            vote_round=0 if request is None else request.round,
        )

    def _forwarder(self, state: ControlState, producers: ProducersPort) -> Forwarder:
        return Forwarder(
            state,
            producers,
            self._reader,
            AllGoes(),
            no_ingress(),
            names=NAMES,
            cluster=Cluster(
                nodes=NODES, min_insync=len(NODES) + 1 - self._required, late_window_s=5
            ),
            caps=CapLimits(frame_messages=1, frame_bytes=1, max_messages=1, max_bytes=1),
            monotonic=self.clock.monotonic,
        )
