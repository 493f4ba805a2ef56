"""Decides what becomes of a half message: one that is sent with a local transaction, or not at all.

A half is an ordinary message in every way but one: unless a row says that it was committed, it is
not forwarded at its due, but asked about. All that decides lies in the slot of its due.
docs/PROTOCOL.md, "Half messages", has the rows, which copies a step takes, and what they end as.

A release counts at once for a copy of the half in its own wheel, with a lower seq: so whoever takes
the release has the copy in the same step, and a leader needs to notice releases alone. For all
other copies it is a commit.

Of several copies in one step those that are released come first, then those first in position.
Everything follows from w, V, V' and rows <= V', so any leader decides the same. Rows that come
after the end change nothing: the half is done.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from delaywheel.record_headers import LONGEST_HOLD_MS
from delaywheel_replica.core.protocol.control import REMOVED, ControlState
from delaywheel_replica.core.protocol.heartbeat import Heartbeat
from delaywheel_replica.core.protocol.progress import Position, Progress

KNOWN_SINCE: Final = 3
"""The version of control records that knows of half messages."""


def are_known(needs: int) -> bool:
    """Whether no leader can be without halves: the control topic says what each has to know."""
    return needs >= KNOWN_SINCE


def longest_left_ms(clock_skew_ms: int) -> int:
    """Returns in how long a half is due at most, by the clocks of maker, taker and asker."""
    return LONGEST_HOLD_MS + 2 * clock_skew_ms


def may_be_half(needs: int, left_ms: int, clock_skew_ms: int) -> bool:
    """Whether a message that is due in so long may be a half."""
    return are_known(needs) and left_ms <= longest_left_ms(clock_skew_ms)


def nodes_behind(state: ControlState, heartbeats: Mapping[str, Heartbeat]) -> list[str]:
    """Returns the nodes that may have a release which does not know halves.

    Empty once the control topic says that leaders must: such a release no longer leads.
    """
    if are_known(state.needs):
        return []
    removed = {node for node, record in state.nodes.items() if record.storage == REMOVED}
    return sorted(
        node
        for node in (state.nodes.keys() | heartbeats.keys()) - removed
        if node not in heartbeats or not are_known(heartbeats[node].control_version)
    )


@dataclass(frozen=True, slots=True)
class HalfRows:
    """Where the rows of one half lie, all of them in the slot of its due."""

    due_ms: int
    copies: frozenset[Position]
    commits: frozenset[Position] = frozenset()
    releases: frozenset[Position] = frozenset()
    cancels: frozenset[Position] = frozenset()


def is_released(copy: Position, releases: Iterable[Position], progress: Progress) -> bool:
    """Whether a release <= V counts at once for this copy."""
    return any(
        release.wheel == copy.wheel and copy.seq < release.seq <= progress.seq(release.wheel)
        for release in releases
    )


def is_done(rows: HalfRows, copy: Position, progress: Progress) -> bool:
    """Whether this copy of a half has its end."""
    return progress.covers(rows.due_ms, copy) or is_released(copy, rows.releases, progress)
