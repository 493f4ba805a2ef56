"""Why a node takes no half messages, or no commits of them."""

from __future__ import annotations

from time import monotonic

from delaywheel.reasons import Reason
from delaywheel_replica.core.leader.halves import are_known
from delaywheel_replica.server.node.node_view import NodeView, halves_objection_heard
from delaywheel_replica.server.node.refusals import Refusal

_HEARD_S = 0.25
"""How long what the leader said is reused: a new status is made to learn it."""


class HalvesRefusals:
    """Judges begins and commits. For one thread."""

    def __init__(self, view: NodeView, *, are_wanted: bool) -> None:
        self._view = view
        self._are_wanted = are_wanted
        self._objection: str | None = None
        self._look_at = 0.0

    def of_begins(self) -> Refusal | None:
        """Why none may be begun now; None: they may."""
        objection = self._heard() if self._are_wanted else None
        if objection is not None:
            return Refusal(Reason.HALVES_UNAVAILABLE, objection)
        return self.of_commits()

    def of_commits(self) -> Refusal | None:
        """Why none may be committed now; None: they may, also if no other is begun any more."""
        if not self._are_wanted:
            return Refusal(Reason.HALVES_OFF)
        status = self._view.cleaner.status
        if status is None or not are_known(status.needs):
            return Refusal(Reason.HALVES_NOT_READY)
        return None

    def _heard(self) -> str | None:
        """Returns what the leader says, this node or another one."""
        now = monotonic()
        if now >= self._look_at:
            self._look_at = now + _HEARD_S
            self._objection = halves_objection_heard(self._view.status())
        return self._objection
