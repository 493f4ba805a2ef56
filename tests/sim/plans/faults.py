"""The faults and operator actions of a run: every kind of `Action` in a plan, by name.

A fault that lasts is undone after its `ms`, or when everything heals, whichever comes first. A
fault that finds nothing to break (the node is down already) does nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from delaywheel.storage.folder.disk import MEDIUM_ERRORS
from delaywheel_replica.core.election.events import IN_TERM
from sim.kafka.log import Entry, Partition
from sim.kafka.topic_troubles import TopicTrouble
from sim.machine.disk import Fault
from sim.machine.network import Quality
from sim.machine.scheduler import US_PER_MS
from sim.nodes.node import SimNode
from sim.plans.ingress_faults import INGRESS_FAULTS

if TYPE_CHECKING:
    from sim.nodes.world import World

FaultFunction = Callable[..., None]
FAULTS: dict[str, FaultFunction] = {}

QUIET_US = 100
"""Interval of looking whether a log is between two transactions."""


def _fault(function: FaultFunction) -> FaultFunction:
    FAULTS[function.__name__] = function
    return function


def perform(world: World, kind: str, arguments: dict[str, Any]) -> None:
    """Carries out one action of a plan."""
    {**FAULTS, **INGRESS_FAULTS}[kind](world, **arguments)


# --- processes


@_fault
def kill_server(world: World, node: str) -> None:
    """Kills the server and the cleaner between two effects, as kill -9 does."""
    if world.nodes[node].server is not None:
        world.nodes[node].server_died()


@_fault
def kill_cleaner(world: World, node: str) -> None:
    """Kills the cleaner, as kill -9 does."""
    world.nodes[node].cleaner_died()


@_fault
def kill_at_effect(world: World, node: str, effects: int) -> None:
    """Kills the server between two effects of its machine."""
    server = world.nodes[node].server
    if server is not None:
        server.effects_left = effects


@_fault
def kill_at_write(world: World, node: str, effects: int, torn: float) -> None:
    """Kills the server between two effects on its disk, or within a write."""
    if world.nodes[node].server is not None:
        world.nodes[node].disk.crash_after(effects, torn_share=torn)


@_fault
def kill_all(world: World) -> None:
    """Kills all servers at once."""
    for node in world.living():
        kill_server(world, node.name)


@_fault
def absence(world: World, node: str, ms: int) -> None:
    """Keeps both processes dead for a while."""
    sim = world.nodes[node]
    if sim.is_up:
        sim.kill()
        world.later(ms, lambda: _start(sim))


@_fault
def drain(world: World, node: str, ms: int) -> None:
    """Stops a node cleanly, and starts it after a while."""
    sim = world.nodes[node]
    if sim.server is None:
        return
    server = sim.server
    server.run(server.drain)

    def stop() -> None:
        if sim.server is server:
            sim.kill()
            world.later(ms, lambda: _start(sim))

    world.later(1_000, stop)


@_fault
def pause(world: World, node: str, part: str, ms: int) -> None:
    """Pauses the server, the cleaner, or both, as SIGSTOP and SIGCONT do."""
    resume = world.nodes[node].pause(server=part != "cleaner", cleaner=part != "server")
    world.later(ms, resume)


@_fault
def old_release(world: World, node: str, ms: int) -> None:
    """Lets a node say that its release knows nothing of half messages, until it is updated."""
    world.old_releases.add(node)
    world.later(ms, lambda: world.old_releases.discard(node))


@_fault
def checker_dies(world: World, ms: int) -> None:
    """Kills the program that is asked about half messages, and starts it after a while."""
    world.checker.die()
    world.later(ms, world.checker.begin)


# --- machines


@_fault
def crash_machine(
    world: World, node: str, ms: int, *, loses: bool = True, loses_all: bool = False
) -> None:
    """Crashes the operating system: unsynced writes are kept, lost or torn; or all are lost."""
    sim = world.nodes[node]
    if sim.is_up:
        sim.crash_machine(_lossy(world, loses=loses), loses_all=loses_all)
        world.later(ms, lambda: _start(sim))


@_fault
def crash_all(world: World, ms: int, *, loses: bool = True) -> None:
    """Cuts the power of all machines."""
    for node in world.living():
        crash_machine(world, node.name, ms, loses=loses)


@_fault
def switch_flush(world: World, node: str) -> None:
    """Restarts a node with the other setting of `flush`."""
    sim = world.nodes[node]
    sim.sync_groups = not sim.sync_groups
    sim.restart()


@_fault
def wipe(world: World, node: str, ms: int, replaced_ms: int) -> None:
    """Loses the data folder; some time later the operator replaces the node."""
    sim = world.nodes[node]
    if sim.is_gone:
        return
    sim.wipe()
    world.later(ms, lambda: _start(sim))
    world.later(replaced_ms, lambda: world.replace(node))


@_fault
def put_back(world: World, node: str, away_ms: int, ms: int) -> None:
    """Copies the data folder, and puts the copy back after a while; later the disk is emptied."""
    sim = world.nodes[node]
    copy = sim.disk.copied()

    def put() -> None:
        sim.wipe(copy)
        world.trace.add("operator", f"puts back an older folder of {node}")
        _start(sim)

    world.later(away_ms, put)
    world.later(away_ms + ms, lambda: wipe(world, node, ms=300, replaced_ms=700))


@_fault
def slow_start(world: World, node: str, ms: int) -> None:
    """Makes the next start take long to recover wheels; the cleaner runs from its beginning."""
    world.nodes[node].recovery_us = ms * US_PER_MS


@_fault
def clock_step(world: World, node: str, step_ms: int, ms: int) -> None:
    """Sets the wall clock, and corrects it after a while."""
    clock = world.nodes[node].clock
    clock.step(step_ms)
    world.later(ms, lambda: clock.step(-step_ms))


@_fault
def clocks_ahead(world: World, nodes: tuple[str, ...], step_ms: int, ms: int) -> None:
    """Sets clocks of nodes and of the brokers ahead together, and corrects them after a while."""
    clocks = [world.kafka.clock, *(world.nodes[node].clock for node in nodes)]
    world.kafka.has_wrong_clock = True
    for clock in clocks:
        clock.step(step_ms)

    def correct() -> None:
        for clock in clocks:
            clock.step(-step_ms)

    world.later(ms, correct)


@_fault
def set_back(world: World) -> None:
    """Lets the operator set w back to the clock."""
    world.set_back()


@_fault
def clock_drift(world: World, node: str, ppm: int, ms: int) -> None:
    """Makes the clocks run fast or slow for a while."""
    clock = world.nodes[node].clock
    clock.drift(ppm)
    world.later(ms, lambda: clock.drift(0))


# --- disks


@_fault
def disk_full(world: World, node: str, spare_bytes: int, ms: int) -> None:
    """Leaves little room on the disk for a while."""
    disk = world.nodes[node].disk
    disk.capacity_bytes = disk.used_bytes + spare_bytes

    def free() -> None:
        disk.capacity_bytes = None

    world.later(ms, free)


@_fault
def disk_error(world: World, node: str, operation: str, path_part: str, countdown: int) -> None:
    """Makes one operation fail: by the medium, or, of each fourth write, for lack of space."""
    disk = world.nodes[node].disk
    written_bytes = countdown * 37 % 90
    error = errno.ENOSPC if (operation, countdown) == ("write", 3) else _medium_error(countdown)
    fault = Fault(operation, error, path_part, countdown, written_bytes)
    disk.faults.append(fault)

    def forget() -> None:
        if fault in disk.faults:
            disk.faults.remove(fault)

    world.later(10_000, forget)


def _medium_error(choice: int) -> int:
    errors = sorted(MEDIUM_ERRORS)
    return errors[choice % len(errors)]


def _fails(world: World, node: str, what: str, failing: tuple[str, int], ms: int) -> None:
    """Has one kind of operation of a disk fail for a while, unless it comes to fail otherwise."""
    disk = world.nodes[node].disk
    setattr(disk, what, failing)

    def mend() -> None:
        if getattr(disk, what) == failing:
            setattr(disk, what, None)

    world.later(ms, mend)


@_fault
def unreadable(world: World, node: str, part: str, choice: int, ms: int) -> None:
    """Returns no content of slot files, or of indexes, for a while; nothing is damaged."""
    _fails(world, node, "failing_reads", (part, _medium_error(choice)), ms)
    world.trace.add(node, f"no content of {part} for {ms} ms")


@_fault
def unsynced_names(world: World, node: str, part: str, choice: int, ms: int) -> None:
    """Syncs no folder whose path has this part, for a while: a crash may undo what is named."""
    _fails(world, node, "failing_folder_syncs", (part, _medium_error(choice)), ms)
    world.trace.add(node, f"syncs no folder with {part!r} for {ms} ms")


@_fault
def slow_disk(world: World, node: str, us: int, ms: int) -> None:
    """Makes each effect on the disk slow."""
    sim = world.nodes[node]
    sim.disk_us = us

    def fast() -> None:
        sim.disk_us = 0

    world.later(ms, fast)


@_fault
def hung_disk(world: World, node: str, us: int) -> None:
    """Makes the next disk operation take as long as if the disk hung."""
    sim = world.nodes[node]
    sim.disk_us = us

    def fast() -> None:  # not the earlier value: it may be another fault's, which ends sooner
        sim.disk_us = 0

    world.later(us // US_PER_MS, fast)


@_fault
def slow_files(world: World, node: str, operations: tuple[str, ...], us: int, ms: int) -> None:
    """Makes opening, syncing and deleting files slow, while other operations are not."""
    delays_us = world.nodes[node].disk.delays_us
    delays_us.update(dict.fromkeys(operations, us))
    world.later(ms, delays_us.clear)


@_fault
def bit_flip(world: World, node: str, what: str, choice: int) -> None:
    """Damages a file on the medium: of a slot, or an index."""
    sim = world.nodes[node]
    if path := sim.disk.flip_somewhere(what, Random(choice)):
        sim.damaged.add(path)
        world.trace.add(node, "a bit flipped in", what)
        world.checks.disturbed()


@_fault
def bad_sector(
    world: World, node: str, what: str, choice: int = 0, page: int | None = None
) -> None:
    """Makes a page of a file unreadable: of a slot, or an index."""
    sim = world.nodes[node]
    if path := sim.disk.spoil_somewhere(what, Random(choice), page=page):
        sim.damaged.add(path)
        world.trace.add(node, "a bad sector in", what)
        world.checks.disturbed()


@_fault
def worn_sector(world: World, node: str, what: str, choice: int) -> None:
    """Makes a sector of a file neither readable nor writable, for ever."""
    sim = world.nodes[node]
    if path := sim.disk.spoil_somewhere(what, Random(choice), wears=True):
        sim.damaged.add(path)
        world.trace.add(node, "a worn sector in", path.name)
        world.checks.disturbed()


@_fault
def zeroed(world: World, node: str, what: str, choice: int) -> None:
    """Turns synced sectors of a file into zeros: of a slot, an index, or a small file."""
    sim = world.nodes[node]
    if path := sim.disk.zero_somewhere(what, Random(choice)):
        sim.damaged.add(path)
        world.trace.add(node, "zeros in", path.name)
        world.checks.disturbed()


@_fault
def segment_gone(world: World, node: str, choice: int, ms: int) -> None:
    """Loses a whole index segment while the node is away, as a repaired file system may."""
    sim = world.nodes[node]
    if not sim.is_up:
        return
    sim.kill()
    if path := sim.disk.drop_somewhere("index", Random(choice)):
        sim.damaged.add(path)
        world.trace.add(node, "an index segment is gone:", path.parent.name)
        world.checks.disturbed()
    world.later(ms, lambda: _start(sim))


@_fault
def slot_gone(world: World, node: str, choice: int) -> None:
    """Deletes a slot file."""
    sim = world.nodes[node]
    if path := sim.disk.unlink_somewhere(Random(choice)):
        sim.damaged.add(path)
        world.trace.add(node, "a slot file is gone")
        world.checks.disturbed()


@_fault
def undeletable(world: World, node: str, choice: int, ms: int) -> None:
    """Makes a slot file undeletable for a while."""
    disk = world.nodes[node].disk
    if path := disk.keep_somewhere(Random(choice)):
        world.trace.add(node, "cannot be deleted:", path.name)
        world.later(ms, lambda: disk.undeletable.discard(str(path)))


# --- the network between the nodes


@_fault
def isolate(world: World, node: str, ms: int) -> None:
    """Cuts a node off from all others."""
    _partition(world, (node,), ms)


@_fault
def partition(world: World, side: tuple[str, ...], ms: int) -> None:
    """Cuts some nodes off from the rest."""
    _partition(world, side, ms)


@_fault
def block(world: World, src: str, dst: str, ms: int) -> None:
    """Blocks one direction of a link."""
    network = world.network
    network.block(src, dst)
    world.later(ms, lambda: network.unblock(src, dst))


@_fault
def cut(world: World, one: str, other: str, ms: int) -> None:
    """Blocks a link."""
    network = world.network
    network.cut(one, other)
    world.later(ms, lambda: network.mend(one, other))


@_fault
def flap(world: World, src: str, dst: str, period_ms: int, ms: int) -> None:
    """Blocks and unblocks a direction in turns."""
    until_us = world.scheduler.now_us + ms * US_PER_MS
    world.network.flap(src, dst, period_us=period_ms * US_PER_MS, until_us=until_us)


@_fault
def bad_link(world: World, src: str, dst: str, quality: Quality, ms: int) -> None:
    """Makes a direction slow, or lose, double and reorder messages."""
    link = world.network.link(src, dst)
    before = link.quality
    link.quality = quality

    def mend() -> None:
        link.quality = before

    world.later(ms, mend)


@_fault
def mute(world: World, src: str, dst: str, kind: str, ms: int) -> None:
    """Loses all messages of one type in one direction."""
    network = world.network
    network.mute(src, dst, kind)
    world.later(ms, lambda: network.unmute(src, dst, kind))


@_fault
def lost_answers(world: World, share: float, ms: int) -> None:
    """Loses some answers to callers."""
    frontend = world.frontend
    frontend.lost_answers = share

    def mend() -> None:
        frontend.lost_answers = 0.0

    world.later(ms, mend)


# --- Kafka and the ledger


@_fault
def kafka_down(world: World, ms: int) -> None:
    """Stops all brokers."""
    world.kafka.stop()
    world.later(ms, world.kafka.start)


@_fault
def kafka_cut(world: World, node: str, ms: int) -> None:
    """Cuts one node off from the brokers."""
    world.kafka.cut(node)
    world.later(ms, lambda: world.kafka.mend(node))


@_fault
def kafka_faults(world: World, changes: dict[str, Any], ms: int) -> None:
    """Makes the brokers slow, or lose requests and answers."""
    kafka = world.kafka
    before = kafka.faults
    kafka.faults = replace(before, **changes)

    def mend() -> None:
        kafka.faults = replace(kafka.faults, **{name: getattr(before, name) for name in changes})

    world.later(ms, mend)


@_fault
def lose_end(world: World, lost_ms: int, ms: int) -> None:
    """Lets a broker without the control topic's end lead it, while the cluster's leader dies."""
    for partition in world.kafka.partitions(world.names.control):
        if partition.open:
            world.scheduler.call_later(QUIET_US, lose_end, world, lost_ms, ms)
            return
        for node in world.living():
            if node.cleaner is not None and node.cleaner.leadership.phase in IN_TERM:
                node.cleaner_died()
        end = len(partition.log)
        log = partition.lose_end(world.scheduler.now_us - lost_ms * US_PER_MS)
        world.trace.add("kafka", f"loses the control topic from {len(partition.log)} to {end}")
        world.kafka.has_lost_end = True
        world.later(ms, partial(_end_again, world, partition, log))


def _end_again(world: World, partition: Partition, log: list[Entry]) -> None:
    """Brings back the broker that has the whole topic."""
    if partition.open:
        world.scheduler.call_later(QUIET_US, _end_again, world, partition, log)
        return
    partition.lead_again(log)
    world.trace.add("kafka", "has the control topic's end again")


@_fault
def slow_first_init(world: World, us: int) -> None:
    """Makes a candidacy's first request and its inits slow: less than other nodes wait for it."""
    kafka = world.kafka
    kafka.faults = replace(kafka.faults, check_us=us, init_us=(us, us))


@_fault
def topic_trouble(
    world: World, topic: str, trouble: str, ms: int, partition: int | None = None
) -> None:
    """Makes a topic, or one of its partitions, take nothing for a while."""
    troubles, scheduler = world.kafka.troubles, world.scheduler
    troubles.begin(topic, TopicTrouble(trouble), scheduler.now_us, partition)
    world.later(ms, lambda: troubles.end(topic, scheduler.now_us, partition))


@_fault
def leaders_move(world: World, ms: int) -> None:
    """Other brokers become the leaders of all partitions, of ours too."""
    for topic in world.kafka.topics():
        topic_trouble(world, topic, TopicTrouble.MOVING, ms)


@_fault
def coordinator_moves(world: World, ms: int) -> None:
    """Another broker comes to coordinate transactions, while one is under way."""
    kafka = world.kafka
    if all(transaction.committed is not None for transaction in kafka.ongoing()):
        world.scheduler.call_later(US_PER_MS, coordinator_moves, world, ms)
        return
    kafka.has_coordinator = False

    def moved() -> None:
        kafka.has_coordinator = True

    world.later(ms, moved)


@_fault
def own_topic_trouble(world: World, which: str, trouble: str, ms: int) -> None:
    """Makes the topic of outcomes, of dead letters or of halves take nothing for a while."""
    names = world.names
    topics = {"outcomes": names.outcomes, "dead": names.dead, "halves": names.halves}
    topic_trouble(world, topics[which], trouble, ms)


@_fault
def ledger_away(world: World, ms: int) -> None:
    """Makes publishing fail."""
    world.ledger_away = True

    def back() -> None:
        world.ledger_away = False

    world.later(ms, back)


# --- members


@_fault
def change_members(world: World, nodes: tuple[str, ...], min_insync: int) -> None:
    """Lets the operator give all nodes another list of nodes, and restart them one by one."""
    world.change_members(nodes, min_insync)


# --- inside


def _start(sim: SimNode) -> None:
    if not sim.is_up:
        sim.start()


def _lossy(world: World, *, loses: bool) -> Random | None:
    return world.scheduler.stream(f"crash {world.scheduler.now_us}") if loses else None


def _partition(world: World, side: tuple[str, ...], ms: int) -> None:
    network, rest = world.network, [name for name in world.nodes if name not in side]
    for one in side:
        for other in rest:
            network.cut(one, other)

    def mend() -> None:
        for one in side:
            for other in rest:
                network.mend(one, other)

    world.later(ms, mend)
