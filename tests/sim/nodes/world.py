"""One run: cluster, Kafka, callers and checks on one scheduler, driven by a plan.

    settle -> the plan's steps, faults among them -> heal -> drain -> last checks

A run ends with its first violation. What the code under test raises, and does not catch, is one.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch
from zlib import crc32

import structlog

from delaywheel.reasons import Reason
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.node.events import MemberConfig
from delaywheel_replica.kafka_settings import KafkaNames
from sim.checking.answers import Answers
from sim.checking.book import MORE_TOPICS, TOPICS, Book, Entry
from sim.checking.bounds import OPEN_INDEXES, out_of_bounds, too_large_at_the_end
from sim.checking.calm import leaderless, lost_in_turn, resting_floor, undeleted_files
from sim.checking.checks import Checks
from sim.checking.drained import why_not_drained
from sim.checking.ingress import IngressChecks
from sim.checking.ingress_book import PARTITIONS as INGRESS_PARTITIONS
from sim.checking.moments import Moments
from sim.checking.truth import Truth
from sim.halves.checker import Checker
from sim.halves.checks import HalvesChecks
from sim.halves.operator import Operator
from sim.kafka.brokers import SimKafka
from sim.machine.clocks import EPOCH_MS
from sim.machine.locks import SimLock
from sim.machine.network import Network
from sim.machine.scheduler import US_PER_MS, US_PER_S, Scheduler
from sim.machine.trace import Trace
from sim.models.model import without_collections
from sim.nodes.calls import on_simulated_time
from sim.nodes.clients import Change, Clients, CommitAnswer
from sim.nodes.frontend import Frontend
from sim.nodes.node import SimNode
from sim.nodes.senders import Senders
from sim.plans.faults import perform
from sim.plans.plan import (
    Action,
    AskOrder,
    CancelManyOrder,
    CancelOrder,
    HalfOrder,
    IngressOrder,
    Plan,
    Request,
    RescheduleOrder,
    Step,
)
from support.wheels.segments import segments_of

CLUSTER = "sim"
PARTITIONS = 2
HANDOVER_US = (50, 400)
DRAIN_S = 240
LOOK_S = 0.5
LOOK_US = 3 * US_PER_S
RESOLVED_US = 25 * US_PER_S
"""Once everything is healed, whoever asks again and again is told what became of a message."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended.

    Attributes:
        plan: of the run.
        violations: what did not hold; empty: all is well.
        digest: two runs of one plan have the same.
        seconds: simulated ones.
        delivered: how many messages became visible.
        trace: the last of what happened.
    """

    plan: Plan
    violations: tuple[str, ...]
    digest: int
    seconds: float
    delivered: int
    trace: tuple[str, ...]


class World:
    """The whole simulated world."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.settings = plan.settings
        self.violations: list[str] = []
        self.scheduler = Scheduler(plan.seed)
        self.trace = Trace(self.scheduler)
        self.names = KafkaNames(CLUSTER)
        self.network = Network(self.scheduler)
        self.kafka = SimKafka(self.scheduler, dict.fromkeys(TOPICS + MORE_TOPICS, PARTITIONS))
        self.kafka.create(self.names.ingress, INGRESS_PARTITIONS)
        self.kafka.create(self.names.halves, 1)
        self.kafka.trace = lambda what: self.trace.add("kafka", what)
        self.ledger_away = False
        self.replacements: dict[str, str] = {}
        self.removals: set[str] = set()
        self.old_releases: set[str] = set()
        self.set_back_from: int | None = None
        self.handover_us = HANDOVER_US
        self.moments = Moments()
        self.healed_us = 0
        self._last_lists: dict[str, tuple[tuple[str, ...], int]] = {}
        self.members = plan.settings.nodes
        self.min_insync = plan.settings.min_insync
        self.truth = Truth()
        self.book = Book(plan.settings.ttl_header)
        self.ingress = IngressChecks(self)
        self.halves = HalvesChecks(self)
        self.answers = Answers(self)
        self.checks = Checks(self)
        self.kafka.on_decided(self.checks.decided)
        self.kafka.on_visible(self.checks.visible)
        self.frontend = Frontend(self)
        self.clients = Clients(self.scheduler, self.frontend, self.book, self, self.trace)
        self.senders = Senders(self)
        self.checker = Checker(self)
        self.operator = Operator(self)
        self.nodes: dict[str, SimNode] = {}
        self._undos: dict[int, Callable[[], None]] = {}
        self._undo_count = 0
        self._pids = 0

    def run(self) -> Result:
        """Runs the plan."""
        locks = patch("threading.Lock", lambda: SimLock(self.scheduler))
        few_files = patch("delaywheel.storage.files.index.OPEN_INDEXES", OPEN_INDEXES)
        segments = segments_of(self.plan.settings.segment_rows)
        times = on_simulated_time(self.plan.settings)
        with (
            locks,
            few_files,
            segments,
            times,
            self.scheduler,
            _without_logs(),
            without_collections(),
        ):
            try:
                self._run()
            except Exception:  # noqa: BLE001 - whatever the code under test raises is a finding
                self.violation(traceback.format_exc())
            return self._result()

    # --- for the parts

    def violation(self, what: str) -> None:
        """Reports a violation."""
        self.trace.add("CHECK", what)
        self.violations.append(f"{self.scheduler.now_us / US_PER_S:.3f} s: {what}")

    def next_pid(self) -> int:
        """A fresh process id."""
        self._pids += 1
        return self._pids

    def living(self) -> Iterator[SimNode]:
        """The nodes that are part of the cluster."""
        return (node for _, node in sorted(self.nodes.items()) if not node.is_gone)

    def configured(self, node: str) -> tuple[tuple[str, ...], int]:
        """The list of nodes and W for a node that starts now; a node to be removed keeps its."""
        return self._last_lists.get(node, (self.members, self.min_insync))

    def member_config(self, node: str) -> MemberConfig:
        """How a server that starts now takes part."""
        settings = self.settings
        nodes, min_insync = self.configured(node)
        return MemberConfig(
            node=node,
            nodes=nodes,
            min_insync=min_insync,
            late_window_s=settings.late_window_s,
            span_seconds=settings.span_s,
            in_flight_frames=settings.in_flight_frames,
            batch_frames=settings.batch_frames,
        )

    def later(self, ms: int, undo: Callable[[], None]) -> None:
        """Ends a fault after this time, or when everything heals."""
        self._undo_count += 1
        number = self._undo_count
        self._undos[number] = undo
        self.scheduler.call_later(ms * US_PER_MS, self._undo, number)

    def replace(self, node: str) -> None:
        """Lets the operator say that a node's new, empty disk stands for its id."""
        storage = self.nodes[node].storage
        if node in self.removals:
            return
        if storage is None:
            self.scheduler.call_later(US_PER_S, self.replace, node)
            return
        self.trace.add("operator", f"replaces {node} by", storage)
        self.replacements[node] = storage

    def set_back(self) -> None:
        """Lets the operator set w back to the clock, repeatedly until it is done."""
        progress = self.checks.control.progress
        if progress is not None:
            self.trace.add("operator", "sets w back from", progress.due_ms - EPOCH_MS)
            self.set_back_from = progress.set_backs

    def change_members(self, nodes: tuple[str, ...], min_insync: int) -> None:
        """Lets the operator give all nodes another list of nodes, and restart them one by one."""
        leaving = [node for node in self.living() if node.name not in nodes]
        for node in leaving:
            self._last_lists.setdefault(node.name, (self.members, self.min_insync))
        self.members, self.min_insync = nodes, min_insync
        for node in leaving:
            if node.server is not None:
                node.server.run(node.server.drain)
        for order, node in enumerate(self.living()):
            change = partial(self._leave, node) if node in leaving else node.restart
            self.scheduler.call_later((2_000 + order * 700) * US_PER_MS, change)
        for name in nodes:
            if name not in self.nodes:
                self._add_node(name)

    def _leave(self, node: SimNode) -> None:
        """Removes a node for good: the operator says that it will not return."""
        node.leave()
        self.trace.add("operator", "takes out", node.name)
        self.replacements.pop(node.name, None)
        self.removals.add(node.name)
        self.checks.disturbed()

    # --- what callers learn

    def acknowledged(self, entry: Entry) -> None:
        """Notes that a message was accepted."""
        self.checks.caller_acknowledged(entry)

    def reschedule_answered(
        self, entry: Entry, decision: Change, to_ms: int | None, asked_us: int
    ) -> None:
        """Notes the outcome of a reschedule."""
        self.answers.reschedule(entry, decision, to_ms, asked_us)

    def get_answered(self, entry: Entry, answer: pb.StoredMessage | Reason, asked_us: int) -> None:
        """Notes what a node tells of a message."""
        self.answers.get(entry, answer, asked_us)

    def search_answered(self, found: pb.SearchResponse, asked_us: int) -> None:
        """Notes what a node lists."""
        self.answers.search(found, asked_us)

    def slot_answered(self, slot: int, found: pb.GetSlotResponse, asked_us: int) -> None:
        """Notes what a node lists of a second."""
        self.answers.slot(slot, found, asked_us)

    def slots_answered(self, found: pb.ListSlotsResponse, asked_us: int) -> None:
        """Notes what seconds a node lists."""
        self.answers.slots(found, asked_us)

    def status_answered(self, found: pb.DescribeClusterResponse, asked_us: int) -> None:
        """Notes what a node tells of the cluster."""
        self.answers.status(found, asked_us)

    def cancel_many_answered(
        self, entry: Entry, found: pb.CancelManyResponse, asked_us: int
    ) -> None:
        """Notes what a node has cancelled that a search found."""
        self.answers.cancel_many(entry, found, asked_us)

    def commit_answered(self, entry: Entry, answer: CommitAnswer, asked_us: int) -> None:
        """Notes the outcome of a commit."""
        self.answers.commit(entry, answer, asked_us)

    def cancel_answered(self, entry: Entry, decision: Change, asked_us: int) -> None:
        """Notes the outcome of a cancel."""
        self.answers.cancel(entry, decision, asked_us)

    def never_answered(self, entries: list[Entry], patience_us: int) -> None:
        """Checks that nobody has asked in vain for long although everything is healed."""
        healed_us = self.scheduler.now_us - self.healed_us if self.healed_us else 0
        if min(patience_us, healed_us) > RESOLVED_US:
            self.violation(f"nobody knows what became of {entries[0]}, whoever asks again")

    # --- the run

    def _run(self) -> None:
        early = [step for step in self.plan.steps if step.at_ms < 0]
        for step in early:
            self._do(step)  # before any node starts
        for name in self.settings.nodes:
            self._add_node(name)
        self.scheduler.call_later(LOOK_US, self._look)
        for step in self.plan.steps[len(early) :]:
            self.scheduler.call_at(step.at_ms * US_PER_MS, self._do, step)
        self._go_on_until(self.plan.faults_end_ms / 1000)
        self._heal()
        why = self._drain()
        if self.violations:
            return
        if why:
            self.violation(f"not drained {DRAIN_S} s after healing: {'; '.join(why)}")
            return
        self.checks.check_at_the_end()
        for what in too_large_at_the_end(self):
            self.violation(what)

    def _drain(self) -> list[str]:
        """Waits until nothing is left to do; returns what still is when time is up."""
        until_s = self.scheduler.now_us / US_PER_S + DRAIN_S + self._ahead_s()
        while True:
            why = why_not_drained(self)
            if not why or self.violations or self.scheduler.now_us / US_PER_S > until_s:
                return why
            self._go_on_until(self.scheduler.now_us / US_PER_S + LOOK_S)

    def _ahead_s(self) -> float:
        """How far a leader with a wrong clock went ahead: all nodes have to wait that long."""
        progress = self.checks.control.progress
        if progress is None:
            return 0.0
        nodes = list(self.living())
        return max(0.0, (progress.due_ms - nodes[0].clock.wall_ms()) / 1000)

    def _go_on_until(self, seconds: float) -> None:
        self.scheduler.run_until(round(seconds * US_PER_S), self.violations.__len__)

    def _do(self, step: Step) -> None:
        match step:
            case Request():
                self.clients.send(step)
            case CancelOrder():
                self.clients.cancel(step)
            case CancelManyOrder():
                self.clients.cancel_many(step)
            case RescheduleOrder():
                self.clients.reschedule(step)
            case AskOrder():
                self.clients.ask(step)
            case HalfOrder(is_ingress=True):
                self.senders.half(step)
            case HalfOrder():
                self.clients.half(step)
            case IngressOrder():
                self.senders.send(step)
            case Action():
                self.trace.add("fault", str(step))
                perform(self, step.kind, dict(step.arguments))

    def _look(self) -> None:
        checked = (out_of_bounds, resting_floor, undeleted_files, lost_in_turn, leaderless)
        for what in (what for check in checked for what in check(self)):
            self.violation(what)
        self.scheduler.call_later(LOOK_US, self._look)

    def _undo(self, number: int) -> None:
        undo = self._undos.pop(number, None)
        if undo is not None:
            undo()

    def _heal(self) -> None:
        """Repairs everything, and starts every node."""
        self.trace.add("fault", "everything heals")
        self.healed_us = self.scheduler.now_us
        # Ending one fault may begin to end another (a drained node starts).
        while self._undos:
            self._undo(min(self._undos))
        self.network.heal()
        self.kafka.heal()
        for node in self.living():
            node.disk.faults.clear()
            if not node.is_up:
                node.start()

    def _add_node(self, name: str) -> None:
        node = self.nodes[name] = SimNode(self, name)
        node.disk.on_delete = lambda path: self.checks.deletes(node, path)
        node.start()

    def _result(self) -> Result:
        for entry in self.book.entries.values():
            self.scheduler.note(crc32(f"{entry} {entry.visible_us} {entry.cancelled}".encode()))
        return Result(
            plan=self.plan,
            violations=tuple(self.violations),
            digest=self.scheduler.digest,
            seconds=self.scheduler.now_us / US_PER_S,
            delivered=sum(entry.is_visible for entry in self.book.entries.values())
            + self.ingress.delivered,
            trace=tuple(self.trace.lines()) if self.violations else (),
        )


@contextmanager
def _without_logs() -> Iterator[None]:
    """Ignores the log of the code under test, which has its own tests."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def run(plan: Plan) -> Result:
    """Runs a plan in a new world."""
    return World(plan).run()
