"""Faults of the ingress: of its topic, and of the connection from a cleaner to its server.

Records that the topic loses before a leader could read them are excused, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.checking.ingress import DELETED, RECREATED
from sim.checking.ingress_book import CUT_OFF, PARTITIONS
from sim.checking.moments import Moment
from sim.kafka.log import Partition
from sim.machine.scheduler import US_PER_MS

if TYPE_CHECKING:
    from sim.nodes.world import World

FaultFunction = Callable[..., None]
INGRESS_FAULTS: dict[str, FaultFunction] = {}

CUT_MS = 6_000

QUIET_US = 1 * US_PER_MS
"""Interval of looking whether a log is between two transactions."""


def _fault(function: FaultFunction) -> FaultFunction:
    INGRESS_FAULTS[function.__name__] = function
    return function


@_fault
def ingress_deleted(world: World, partition: int, kept: int) -> None:
    """Lets retention delete all but the latest records, read or unread."""
    log = _partition(world, partition)
    if log is not None:
        log.delete_before(len(log.log) - kept)
        world.trace.add("kafka", f"deletes ingress/{partition} before", log.first)
        world.ingress.excuses(_topic_id(world), log, range(log.first), DELETED)


@_fault
def ingress_recreated(world: World, ms: int) -> None:
    """Deletes the topic, and recreates it a while later."""
    kafka, topic = world.kafka, world.names.ingress
    if not kafka.has(topic):
        return
    world.trace.add("kafka", "deletes the ingress topic")
    for log in kafka.partitions(topic):
        world.ingress.excuses(_topic_id(world), log, range(len(log.log)), RECREATED)
    kafka.delete(topic)
    world.later(ms, lambda: _make(world))


def _make(world: World) -> None:
    if not world.kafka.has(world.names.ingress):
        world.trace.add("kafka", "recreates the ingress topic")
        world.kafka.create(world.names.ingress, PARTITIONS)


@_fault
def ingress_cut_off(world: World, partition: int, lost: int) -> None:
    """Lets a broker without a partition's end lead it: later records there may stay unread."""
    log = _partition(world, partition)
    if log is None:
        return
    if log.open:
        world.scheduler.call_later(QUIET_US, ingress_cut_off, world, partition, lost)
        return
    end = len(log.log)
    world.ingress.book.cut_off.add((log.topic, partition))
    log.cut_off(end - lost)
    world.trace.add("kafka", f"loses ingress/{partition} from {len(log.log)} to {end}")
    world.ingress.excuses(_topic_id(world), log, range(len(log.log), end), CUT_OFF)


@_fault
def slow_handover(world: World, us: int, ms: int) -> None:
    """Makes the hand-over and its answers slow."""
    before = world.handover_us
    world.handover_us = (us // 2, us)

    def mend() -> None:
        world.handover_us = before

    world.later(ms, mend)


@_fault
def at_moment(world: World, moment: str, what: str, us: int, nth: int = 1) -> None:
    """Kills a process, or breaks the hand-over, at the nth moment of a kind, or soon."""

    def act(node: str) -> None:
        world.trace.add("fault", f"{moment} at {node}: {what} in {us} us")
        world.scheduler.call_later(us, _AT_MOMENTS[what], world, node)

    for _ in range(nth - 1):
        world.moments.wait_for(Moment(moment), lambda _: None)
    world.moments.wait_for(Moment(moment), act)


@_fault
def cut_handover(world: World, node: str) -> None:
    """Breaks the connection between a cleaner and its server; a new one is made."""
    cleaner = world.nodes[node].cleaner
    if cleaner is not None and cleaner.handover is not None:
        cleaner.handover.cut()


def _kill_cleaner(world: World, node: str) -> None:
    world.nodes[node].cleaner_died()


def _kill_server(world: World, node: str) -> None:
    if world.nodes[node].server is not None:
        world.nodes[node].server_died()


def _isolate(world: World, node: str) -> None:
    world.kafka.cut(node)
    world.later(CUT_MS, lambda: world.kafka.mend(node))


_AT_MOMENTS: dict[str, Callable[[World, str], None]] = {
    "kill_cleaner": _kill_cleaner,
    "kill_server": _kill_server,
    "kafka_cut": _isolate,
    "cut_handover": cut_handover,
}


def _partition(world: World, number: int) -> Partition | None:
    partitions = world.kafka.partitions(world.names.ingress)
    return partitions[number] if number < len(partitions) else None


def _topic_id(world: World) -> str:
    return world.kafka.topic_id(world.names.ingress)
