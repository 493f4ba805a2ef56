"""A simulated cleaner process: the real cleaner on simulated clocks and Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar, cast

from delaywheel_replica.cleaner.candidacy import Candidacy
from delaywheel_replica.cleaner.delivery.bisection import Bisection
from delaywheel_replica.cleaner.delivery.dead_letters import DeadLetters
from delaywheel_replica.cleaner.delivery.deferring import Patience
from delaywheel_replica.cleaner.delivery.forward import Forwarder
from delaywheel_replica.cleaner.delivery.topics import DestinationTopics
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.cleaner.ingress.term import Ingress, IngressSettings
from delaywheel_replica.cleaner.kafka.follower import ControlFollower
from delaywheel_replica.cleaner.leadership import Leadership
from delaywheel_replica.cleaner.outside.ports import IDS, ProducersPort, Record, RefusedRecord
from delaywheel_replica.cleaner.row_keeper import STAMP_S, RowKeeper, RowNews
from delaywheel_replica.cleaner.server_row import ServerRow
from delaywheel_replica.core.election.machine import ElectionConfig
from delaywheel_replica.core.election.repeating import EndTimes
from delaywheel_replica.core.ingress.reading import IngressRules
from delaywheel_replica.core.leader.duties import Cluster
from delaywheel_replica.core.leader.pacing import CapLimits
from delaywheel_replica.core.protocol.codec import from_json, to_json
from delaywheel_replica.core.protocol.control import REMOVED, ControlState, required_answers
from delaywheel_replica.core.protocol.reschedules import RescheduleProposal, RescheduleWritten
from delaywheel_replica.core.protocol.status_files import Role, ServerStatus
from delaywheel_replica.kafka_settings import KafkaNames
from sim.checking.held_up import WatchedDeadLetters
from sim.checking.ingress_book import LEVELS_MS, MOST_BYTES
from sim.checking.truth import key_in
from sim.kafka.line import KafkaLine
from sim.kafka.ports import SimKafkaClient
from sim.kafka.producers import SimProducers
from sim.kafka.topics import SimTopicAdmin, SimTrialProducer
from sim.machine.disk import Crash
from sim.machine.scheduler import US_PER_S, Process, Scheduler, Signal, Task
from sim.nodes.handover import SimHandover

if TYPE_CHECKING:
    from sim.nodes.node import SimNode

T = TypeVar("T")

RESTART_AFTER_S = 10.0
"""Well below the time for which the simulated Kafka keeps tombstones."""

LETTER_BYTES = 1_048_588

LEAST_PAUSE_S = 0.000_5
"""The duration of an iteration."""


class Tasks:
    """Background calls as tasks of one process: the cleaner's `Runner`."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler = scheduler
        self._process = process
        self._last: Task | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Runs a job after those that were started before."""
        before = self._last

        def run() -> None:
            if before is not None:
                before.join()
            job()

        self._last = self._process.spawn("candidacy", run)

    def together(self, calls: Iterable[Callable[[], T]]) -> list[T]:
        """Runs calls at the same time; returns their results in order when all have ended."""
        tasks = [self._process.spawn("init", call) for call in calls]
        for task in tasks:
            task.join()
        return [cast("T", task.result) for task in tasks]

    def pause(self, seconds: float) -> None:
        """Waits, within a job."""
        self._scheduler.sleep(seconds)

    def close(self) -> None:
        """Leaves running jobs alone."""


class _OldRow:
    """The status file, as the last server left it."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def read(self) -> ServerStatus | None:
        """The server's status."""
        row = self._node.old_row
        return None if row is None else from_json(ServerStatus, to_json(row))


class SimCleaner:
    """One life of a node's cleaner process.

    Attributes:
        node: the node of the cleaner.
        process: what lives and dies with it.
        leadership: the real main object.
        handover: its latest connection to the server.
    """

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self._world = node.world
        self._settings = node.world.settings
        self._members, self._min_insync = node.world.configured(node.name)
        self.process = node.scheduler.process(f"{node.name}-cleaner")
        self.handover: SimHandover | None = None
        self._pid = node.world.next_pid()
        self._signal = Signal(node.scheduler)
        self._row_news = RowNews()
        self._turn_wall_ms = 0
        self._reader = DueReader(
            node.disk,
            node.data,
            ttl_header=self._settings.ttl_header,
            preload_thread=False,
        )
        self._topics_wanted = Signal(node.scheduler)
        self._topics, self._dead_letters = self._made_dead_letters()
        self._old_row = ServerRow(
            node.data / "server.row", boot=node.boot, since_ms=node.clock.monotonic_ms()
        )
        self._old_row._row = _OldRow(node)  # type: ignore[assignment]
        self.leadership = self._made_leadership()
        self._row_keeper = RowKeeper(node.cleaner_reported, lambda: self.leadership.waiting, self)

    def start(self) -> None:
        """Starts to run."""
        task = self.process.spawn(f"{self.node.name}-cleaner", self._run)
        task.on_error = self._failed
        self.process.spawn(f"{self.node.name}-topics", self._ask_for_topics)
        self.process.spawn(f"{self.node.name}-stamper", self._stamp)

    def end(self) -> None:
        """Notes that the process is dead."""
        self.process.kill()

    def wake(self) -> None:
        """Ends the wait between two iterations."""
        self._signal.set()

    def hear_news(self) -> None:
        """Called when the server's status has news; see `Wakeups`."""
        pause_s = self.leadership.pause_s
        if pause_s > 0:
            self.process.call_later(round(pause_s * US_PER_S), self.wake)
        else:
            self.wake()

    def row_stamped(self) -> None:
        """Called when the server has written its status without news.

        That wakes no real cleaner. Before any leader is heard it does here, so that candidates
        stand in the order of the ticks: node a first, on which drills count.
        """
        row = self.node.server_row()
        if row is not None and row.leader_heard_ms is None and self.leadership.role is Role.STANDBY:
            self.wake()

    def commit_soon(self) -> None:
        """Called when a caller waits for a commit."""
        self.leadership.commit_soon()
        self._signal.set()

    def hear(self, word: RescheduleProposal | RescheduleWritten) -> None:
        """Called when the server reports a message that gets another due."""
        if isinstance(word, RescheduleProposal):
            self.leadership.reschedule(word)
        else:
            self.leadership.rescheduled(word)
        self._signal.set()

    # --- the clock that the cleaner sees

    def wall_ms(self) -> int:
        """The wall clock; the time it shows within an iteration bounds what may be delivered."""
        now_ms = self.node.clock.wall_ms()
        self._turn_wall_ms = max(now_ms, self._turn_wall_ms)
        return now_ms

    def monotonic_ms(self) -> int:
        """The monotonic clock."""
        return self.node.clock.monotonic_ms()

    def monotonic(self) -> float:
        """The same in seconds."""
        return self.node.clock.monotonic()

    # --- inside

    def _run(self) -> None:
        while True:
            self._turn_wall_ms = 0
            for node, storage in self._world.replacements.items():
                self.leadership.replace(node, storage)
            for node in sorted(self._world.removals):
                self.leadership.replace(node, REMOVED)
            if self._world.set_back_from is not None:
                self.leadership.set_back(self._world.set_back_from)
            wait_s = self.leadership.run_once(self._server_row())
            self._world.checks.iterated(self.node, self.leadership, wait_s)
            self._write_row()
            self._signal.clear()
            wait_s = min(wait_s, self._row_news.wait_s(self.monotonic()))
            self._signal.wait(max(LEAST_PAUSE_S, wait_s))

    def _stamp(self) -> None:
        while True:
            self.node.scheduler.sleep(STAMP_S)
            self._row_keeper.stamp()

    def _ask_for_topics(self) -> None:
        while True:
            pause_s = self._topics.round()
            self._topics_wanted.clear()
            self._topics_wanted.wait(max(LEAST_PAUSE_S, pause_s))

    def _server_row(self) -> ServerStatus | None:
        """The living server's status; that of an earlier server goes through the real reader."""
        row = self.node.server_row()
        return self._old_row.read() if row is None else row

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, Crash):
            raise error
        self.node.cleaner_died(error)

    def _write_row(self) -> None:
        """Sends the server the cleaner's current status."""
        view, now_ms = self.leadership.view(), self.monotonic_ms()
        is_time, _ = self._row_news.look(view, self.monotonic(), asked_s=self.leadership.asked_s)
        if not is_time:
            return
        self._world.checks.reports(self.node, view)
        status = view.status(
            node=self.node.name,
            boot=self.node.boot,
            pid=self._pid,
            monotonic_ms=now_ms,
            wall_ms=self.node.clock.wall_ms(),
            counters=self.leadership.counters,
        )
        self._row_keeper.report(status)

    def _made_leadership(self) -> Leadership:
        node, names = self.node, self._world.names
        client = _WatchedClient(self)
        follower = ControlFollower(client, self, restart_after_s=RESTART_AFTER_S)
        candidacy = Candidacy(
            client,
            follower,
            node=node.name,
            control_topic=names.control,
            on_event=self.wake,
            clock=self,
            runner=Tasks(node.scheduler, self.process),
            init_runner=Tasks(node.scheduler, self.process),
        )
        config = ElectionConfig(
            run=f"{node.name}-{self._pid}",
            ids=IDS,
            nodes=len(self._members),
            required=required_answers(len(self._members), self._min_insync),
            rank=sorted(self._members).index(node.name) if node.name in self._members else 0,
        )
        return Leadership(config, candidacy, follower, self._forwarder, clock=self)

    def _made_dead_letters(self) -> tuple[DestinationTopics, DeadLetters]:
        node, world = self.node, self._world
        line = KafkaLine(world.kafka, f"{node.name}", world.names, node.clock)
        topics = DestinationTopics(
            SimTopicAdmin(line),
            on_news=self.wake,
            on_wanted=self._topics_wanted.set,
            monotonic=self.monotonic,
        )
        trials = Bisection(
            lambda number: SimTrialProducer(line, world.names.trial_id(number)),
            world.names,
            runner=Tasks(node.scheduler, self.process),
            clock=node.clock,
            on_found=self.wake,
        )
        letters = WatchedDeadLetters(
            world,
            topics,
            trials,
            world.names,
            compresses=False,
            batch_size_bytes=1_000_000,
            ttl_header=self._settings.ttl_header,
            patience=Patience(
                world.names.ingress,
                self._settings.patience_s,
                span_ms=self._settings.span_s * 1000,
            ),
            clock=node.clock,
        )
        return topics, letters

    def _forwarder(self, state: ControlState, producers: ProducersPort) -> Forwarder:
        settings = self._settings
        self._dead_letters.begin_term(state.progress)
        return Forwarder(
            state,
            producers,
            self._reader,
            self._dead_letters,
            self._made_ingress(),
            names=self._world.names,
            cluster=Cluster(
                nodes=self._members,
                min_insync=self._min_insync,
                late_window_s=settings.late_window_s,
                halves=settings.halves,
            ),
            caps=CapLimits(
                frame_messages=settings.first_cap_messages,
                frame_bytes=settings.max_frame_bytes,
                max_messages=settings.cap_messages,
                max_bytes=settings.cap_messages * 400,
            ),
            monotonic=self.monotonic,
        )

    def _made_ingress(self) -> Ingress:
        node, names, settings = self.node, self._world.names, self._settings
        return Ingress(
            SimKafkaClient(self._world.kafka, node.name, names, node.clock),
            self._made_handover,
            IngressSettings(
                names=names,
                topics=frozenset({names.ingress}),
                rules=IngressRules(
                    LEVELS_MS, MOST_BYTES, _own_topics(names), halves=settings.halves
                ),
                span_ms=settings.span_s * 1000,
                letter_bytes=LETTER_BYTES,
                ttl_header=settings.ttl_header,
            ),
            runner=Tasks(node.scheduler, self.process),
            clock=self,
            on_news=self.wake,
        )

    def _made_handover(self) -> SimHandover | None:
        server = self.node.server
        return None if server is None else SimHandover(self, server)

    def produces(self, records: Iterable[Record]) -> Iterable[Record]:
        """Checks what is delivered."""
        for record in records:
            headers = dict(record.headers)
            self._world.checks.produces(
                self.node, key_in(headers, record.topic), self._turn_wall_ms
            )
            yield record


def _own_topics(names: KafkaNames) -> frozenset[str]:
    return frozenset({names.control, names.outcomes, names.dead, names.halves, names.ingress})


class _WatchedProducers(SimProducers):
    """Checks every message before it is delivered."""

    def __init__(self, line: KafkaLine, ends: EndTimes, cleaner: SimCleaner) -> None:
        super().__init__(line, ends)
        self._cleaner = cleaner

    def write(self, number: int, records: Iterable[Record]) -> list[RefusedRecord]:
        """See `ProducersPort`."""
        return super().write(number, self._cleaner.produces(records))


class _WatchedClient(SimKafkaClient):
    """Makes checked producers."""

    def __init__(self, cleaner: SimCleaner) -> None:
        node = cleaner.node
        super().__init__(node.world.kafka, node.name, node.world.names, node.clock)
        self._cleaner = cleaner

    def producers(self) -> SimProducers:
        """The producers of a new candidacy."""
        return _WatchedProducers(self._line, self._ends, self._cleaner)
