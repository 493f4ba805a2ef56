"""What must hold of the answers that callers hear, and of what nodes decide for them.

| call | answer | is true only if |
|---|---|---|
| cancel | CANCELLED | a row says so, and it was not delivered |
| | ALREADY_DELIVERED | it was |
| | TOO_LATE | it is due, or nearly; nobody has cancelled it |
| | NOT_FOUND | nobody was told before that it is accepted |
| reschedule | RESCHEDULED | a leader has decided that, and it was not delivered at its old due |
| | others | as of a cancel |
| commit | COMMITTED | a row says so |
| | LEFT_TO_CHECK | it is due, or nearly |

What disks have lost is excused. TOO_LATE and LEFT_TO_CHECK are judged by the clock of the node that
decides, when it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delaywheel_replica.core.leader.cancel import TOO_LATE_MS, CancelDecision
from delaywheel_replica.server.commit.own_halves import LEFT_TO_CHECK_MS
from sim.checking.book import Entry, Fate
from sim.checking.truth import FrameName, Key

if TYPE_CHECKING:
    from sim.checking.checks import Checks
    from sim.nodes.node import SimNode
    from sim.nodes.world import World


class Answers:
    """Judges the answers of one run.

    Attributes:
        cancelled_by: of messages that a caller knows to be cancelled, the rows by then.
        sealed: messages, cancels and commits that a wheel has refused as too late.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.cancelled_by: dict[Key, list[FrameName]] = {}
        self.sealed: set[Key] = set()

    # --- what a node decides

    def decides_cancel(self, node: SimNode, key: Key, decision: CancelDecision) -> None:
        """Checks a decision when it is made; its caller waits for those on other messages."""
        if decision is not CancelDecision.TOO_LATE:
            return
        entry = self._world.book.of(key)
        if entry is not None and self._is_known_cancelled(entry):
            self._fail(f"{entry} is cancelled, and reported too late")
        if not (self._is_past(node, key, TOO_LATE_MS) or key[1] // 1000 < self._checks.floor):
            self._fail(f"{node.name} reports {entry} too late, and it is still to come")

    def leaves_to_check(self, node: SimNode, key: Key) -> None:
        """Checks a commit that is not written: it is too late for that."""
        if not self._is_past(node, key, LEFT_TO_CHECK_MS):
            entry = self._world.book.of(key)
            self._fail(f"{node.name} leaves {entry} to its check, and it is still to come")

    # --- what callers learn

    def cancel(self, entry: Entry, decision: CancelDecision, asked_us: int) -> None:
        """Checks the outcome of a cancel."""
        checks, cancels = self._checks, self._world.truth.cancels[entry.key]
        if decision is CancelDecision.CANCELLED:
            entry.cancelled = True
            self.cancelled_by[entry.key] = list(cancels)
            if not cancels:
                self._fail(f"{entry} is reported cancelled, and no row says so")
            if checks.deliveries(entry) and not self._world.truth.are_gone(cancels):
                self._fail(f"{entry} is reported cancelled after it was delivered")
            self._world.halves.cancelled(entry)
        elif decision is CancelDecision.ALREADY_DELIVERED:
            elsewhere = {"asked", "committed", "deferred"}
            is_elsewhere = not elsewhere.isdisjoint(checks.outcomes[entry.key])
            if not (checks.delivered[entry.key] or is_elsewhere or checks.is_excused(entry.key)):
                self._fail(f"{entry} is reported delivered and is not")
        elif decision is CancelDecision.NOT_FOUND and self._was_known(entry, asked_us):
            self._fail(f"{entry} is reported not found")

    def reschedule(self, entry: Entry, decision: CancelDecision, asked_us: int) -> None:
        """Checks the outcome of a reschedule."""
        if decision is CancelDecision.RESCHEDULED:
            if entry.key not in self._checks.rescheduled:
                self._fail(f"{entry} is reported rescheduled, and nobody has decided that")
            if self._checks.delivered[entry.key] and not self._checks.is_any_gone(entry):
                self._fail(f"{entry} is reported rescheduled after it was delivered")
        elif decision in {CancelDecision.ALREADY_DELIVERED, CancelDecision.NOT_FOUND}:
            self.cancel(entry, decision, asked_us)

    def commit(self, entry: Entry) -> None:
        """Checks a commit that is recorded."""
        if not self._world.truth.commits[entry.key]:
            self._fail(f"{entry} is committed, as its caller is told, and no row says so")

    # --- inside

    @property
    def _checks(self) -> Checks:
        return self._world.checks

    def _is_past(self, node: SimNode, key: Key, margin_ms: int) -> bool:
        """Whether it is due, or nearly, by a node's clock; or its wheel has refused it as that."""
        return key[1] <= node.clock.wall_ms() + margin_ms or key in self.sealed

    def _is_known_cancelled(self, entry: Entry) -> bool:
        """Whether nodes can say that it was cancelled: below the floor none knows any more."""
        checks = self._checks
        was_cancelled = "cancelled" in checks.outcomes[entry.key]
        return was_cancelled and entry.slot >= checks.floor and not checks.is_any_gone(entry)

    def _was_known(self, entry: Entry, asked_us: int) -> bool:
        """Whether the message was acknowledged before anyone asked, and was not lost."""
        return (
            entry.fate is Fate.ACKNOWLEDGED
            and entry.acknowledged_us < asked_us
            and not self._checks.is_excused(entry.key)
        )

    def _fail(self, what: str) -> None:
        self._world.violation(what)
