"""Checks 7 and 9: copies are equal, and everything is bounded. Checked at intervals."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING

from delaywheel.storage.frames.rows import HOLE_ROW
from delaywheel_replica.cleaner.due.unreadable import REPORTED_RANGES
from delaywheel_replica.core.protocol.codec import to_json
from delaywheel_replica.core.protocol.heartbeat import MAX_MISSING, MAX_SOUGHT
from delaywheel_replica.core.protocol.status_files import ServerStatus
from sim.checking.truth import FrameTruth, index_of, row_on
from sim.nodes.node import CLEANER, SERVER

if TYPE_CHECKING:
    from sim.nodes.node import SimNode
    from sim.nodes.world import World

MACHINE_BYTES = 40_000
"""Memory limit of a member of five nodes when nothing is left to do."""


OPEN_INDEXES = 2
"""Index segments that one thread may have open; few enough that runs reach the limit."""

READING_THREADS = {SERVER: 5, CLEANER: 2}
"""Who reads wheels: store, queries, copies, pages, searches; the main thread and the loader."""

OTHER_FILES = 5
"""The open wheel's own (`writing`, its index, and that being read), and two in use for a moment.

One is being synced, which may take long, and one is rewritten or looked at meanwhile.
"""

ROW_BYTES = 3_000
"""Size of a status file without wheels, nodes, and lost or missing frames."""

ROW_BYTES_A_NODE = 300
"""Size for each node that is heard."""

ROW_BYTES_A_WHEEL = 150
"""Size for each node that reports it."""

ROW_BYTES_AN_ANSWER = 250
"""Size for each node and fence of a leader: nodes x nodes with many nodes and a new leader."""


def out_of_bounds(world: World) -> Iterator[str]:
    """Yields what is too large, or not a copy."""
    for node in world.living():
        if node.server is not None:
            yield from _too_many(world, node)
            yield from _not_copies(world, node)


def too_large_at_the_end(world: World) -> Iterator[str]:
    """Yields histories that are too long."""
    for node in world.living():
        assert node.server is not None
        length = len(pickle.dumps(node.server.machine))
        if length > MACHINE_BYTES:
            yield f"{node.name}'s machine keeps {length} bytes"


def _too_many(world: World, node: SimNode) -> Iterator[str]:
    assert node.server is not None
    handles = len(node.server.store.handles)
    if handles > world.settings.handles:
        yield f"{node.name} has {handles} slot files open"
    for process, threads in READING_THREADS.items():
        files = node.disk.open_files[process]
        slot_files = world.settings.handles if process == SERVER else 0
        if files > slot_files + threads * OPEN_INDEXES + OTHER_FILES:
            yield f"{node.name}'s {process} has {files} files open"
    row, cleaner = node.server.row, node.server.cleaner_row
    if row is not None:
        yield from _too_much_reported(world, node.name, row)
    most = 2 * REPORTED_RANGES + MAX_SOUGHT
    if cleaner is not None:
        ranges = len([*cleaner.unreadable.ranges()])
        if ranges > most * (len(cleaner.wheels) + 1):
            yield f"{node.name} reports {ranges} ranges of unreadable frames"


def _too_much_reported(world: World, name: str, row: ServerStatus) -> Iterator[str]:
    nodes = len(world.nodes)
    length, wheels = (
        len(json.dumps(to_json(row))),
        max(len(heartbeat.wheels) for heartbeat in row.heartbeats.values()),
    )
    most = ROW_BYTES + nodes * (ROW_BYTES_A_NODE + wheels * ROW_BYTES_A_WHEEL)
    if length > most + len(row.answers) * ROW_BYTES_AN_ANSWER:
        yield f"{name}'s row of {wheels} wheels has {length} bytes"
    if len(row.answers) > nodes * nodes:
        yield f"{name} reports {len(row.answers)} answers"
    for wheel, reported in row.heartbeat.wheels.items():
        spans = len(reported.missing.spans)
        if spans > MAX_MISSING:
            yield f"{name} reports {spans} spans of {wheel} as missing"


def _not_copies(world: World, node: SimNode) -> Iterator[str]:
    """Yields frames that differ from what their origin wrote, and that no fault damaged."""
    assert node.server is not None
    copies = node.server.store.held_wheels()
    for frame in world.truth.live(world.checks.floor):
        if frame.wheel in node.server.store.unverified:
            continue
        places = frame.path, index_of(frame.wheel, frame.seq)
        if node.damaged and not node.damaged.isdisjoint(places):
            continue
        row = row_on(node.disk, frame.wheel, frame.seq)
        is_lost = (frame.wheel, frame.seq) in world.checks.given_up
        # Frames beyond the end of a closed wheel do not count, and are being cut.
        is_cut = frame.seq > world.checks.closed_at.get(frame.wheel, frame.seq)
        if not row or row == HOLE_ROW or is_lost or is_cut:
            continue
        held = copies.get(frame.wheel)
        if held is not None and frame.seq in held.missing:
            continue
        if not _is_copy(node, frame, row):
            yield f"{node.name} has another {frame.wheel}/{frame.seq} than its origin wrote"


def _is_copy(node: SimNode, frame: FrameTruth, row: bytes) -> bool:
    finished = row == bytes(len(row)) or frame.slot < (node.server.floor if node.server else 0)
    return finished or frame.is_on(node.disk, with_row=True)
