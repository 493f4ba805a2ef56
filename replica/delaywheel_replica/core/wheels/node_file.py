"""Brings node.json and the current own wheel to their desired states, one save at a time.

| what differs | what is requested | retried |
|---|---|---|
| an own wheel is in hand and may not be written | `LeaveWheel` | a tick after it failed |
| node.json is not what own_wheels.py says | `Save` | a tick after it failed |
| it names a wheel as open that was not made | `OpenWheel` | never: the wheel is given up |

It is checked once at the end of each step in which something relevant changed, and at each tick;
what only time changes (a spare's seal, the incomplete set) at ticks alone.
"""

from dataclasses import replace

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import NodeState
from delaywheel_replica.core.node.events import (
    Awaited,
    Effect,
    HeldWheel,
    LeaveWheel,
    OpenWheel,
    Save,
)
from delaywheel_replica.core.node.shared_state import Known, PendingEffects
from delaywheel_replica.core.protocol.heartbeat import WheelHeartbeat
from delaywheel_replica.core.wheels import own_wheels as own
from delaywheel_replica.core.wheels.completeness import Completeness
from delaywheel_replica.core.wheels.fencing import Fencing
from delaywheel_replica.core.wheels.inventory import Inventory
from delaywheel_replica.core.wheels.open_wheel import CurrentWheel

DRAIN_MS = 1_000
"""How long a stopping node waits for its last frames to be acknowledged."""

OPEN_AGAIN_MS = 1_000
"""A wheel that could not be made is given up; the next one is tried no sooner than this."""


class NodeFile:
    """What one node has to change in its durable state."""

    def __init__(
        self,
        known: Known,
        promises: Fencing,
        completeness: Completeness,
        inventory: Inventory,
        current: CurrentWheel,
        pending: PendingEffects,
    ) -> None:
        self._known = known
        self._fencing = promises
        self._completeness = completeness
        self._inventory = inventory
        self._current = current
        self._pending = pending
        self._is_settled = True
        self._has_to_leave = False
        self._draining_since_ms: int | None = None
        self._open_after_ms = known.now_ms
        self._seal_after_ms = known.now_ms

    @property
    def is_draining(self) -> bool:
        """Whether the node stops cleanly."""
        return self._draining_since_ms is not None

    @property
    def waits_for_members(self) -> bool:
        """Whether there is a spare, and too few of its members were heard to open it."""
        spare = self._known.state.spare
        return spare is not None and not self._current.has_heard_enough(spare)

    def changed(self) -> None:
        """Notes a change of something that the durable state depends on."""
        self._is_settled = False

    def drain(self) -> None:
        """Begins a clean stop of the node."""
        self._draining_since_ms = self._known.now_ms
        self.changed()

    def must_leave(self, wheel: WheelId) -> None:
        """Notes that a wheel can no longer be written."""
        if wheel == self._current.wheel:
            self._has_to_leave = True
            self.changed()

    def settle(self, *, is_tick: bool) -> list[Effect]:
        """Leaves wheels that must be left, and saves the durable state; called once a step."""
        if self._is_settled and not is_tick:
            return []
        self._is_settled = True
        effects: list[Effect] = []
        wheel = self._current.wheel
        if wheel is not None and self._may_not_stay(wheel):
            is_asked = self._pending.has(LeaveWheel, wheel)
            effects += [] if is_asked else self._current.leave()
        # What an older copy of the folder saved would make it seem less old.
        if self._pending.has(Save) or self._known.is_rolled_back:
            return effects
        before = self._known.state
        after = own.next_state(before, self._inputs(is_tick=is_tick))
        if after == before:
            return effects
        if before.spare is not None and after.open == before.spare.wheel:
            self._current.name(before.spare)
        return [*effects, Save(replace(after, saves=before.saves + 1))]

    def saved(self, state: NodeState) -> list[Effect]:
        """Notes a durable state, and continues what waited for it."""
        self._pending.done(Save)
        self._known.state = state
        self._fencing.saved(state)
        self.changed()
        return self._current.saved()

    def opened(self, wheel: WheelId) -> None:
        """Notes a newly made folder, which may have to be left at once."""
        self._pending.done(OpenWheel, wheel=wheel)
        self._current.opened(wheel)
        self.changed()

    def left(self, wheel: WheelId, held: HeldWheel | None) -> WheelHeartbeat | None:
        """Notes that an own wheel is no longer written, with what was last reported of it.

        What the store holds of it is None as long as that is not known.
        """
        self._pending.done(LeaveWheel, wheel=wheel)
        self._has_to_leave = False
        last = self._current.drop()
        if held is not None:
            self._inventory.put(held)
            if last is not None:
                self._inventory.left(wheel, last)
        self.changed()
        return last

    def dropped(self, effect: Awaited) -> None:
        """Notes that an effect was dropped; the next tick finds what is left to do."""
        if isinstance(effect, Save):
            self._current.not_named()
        elif isinstance(effect, OpenWheel):
            # The folder may exist: the name is used up all the same.
            self._current.drop()
            self._has_to_leave = False
            self._open_after_ms = self._known.now_ms + OPEN_AGAIN_MS

    def _inputs(self, *, is_tick: bool) -> own.NodeFileInputs:
        known = self._known
        waits = known.now_ms < self._open_after_ms or self.waits_for_members
        return own.NodeFileInputs(
            fences=self._fencing.wanted,
            registry=known.registry,
            in_hand=self._current.wheel,
            draining=self.is_draining,
            may_open=not waits and not known.disk.is_out,
            spare_slot=self._spare_slot() if is_tick else None,
            incomplete=self._incomplete() if is_tick else None,
            ahead_slot=known.ahead_slot,
        )

    def _may_not_stay(self, wheel: WheelId) -> bool:
        known = self._known
        return (
            self._has_to_leave
            or known.is_rolled_back
            or self._current.is_leaving
            or self._has_drained()
            or wheel.number <= self._fencing.upto(known.node, known.state)
            or own.is_over(known.state, wheel, known.registry)
            or self._has_better()
        )

    def _has_better(self) -> bool:
        """Whether the spare should replace the open wheel.

        It should if the open wheel was sealed by a clock that was ahead, and the spare was not; and
        if a spare between the two was given up, which cannot be closed while one below it is used.
        """
        known, replication, spare = self._known, self._current.replication, self._known.state.spare
        if replication is None or spare is None or own.is_ahead(spare.seal_slot, known.ahead_slot):
            return False
        return own.is_ahead(replication.seal.slot, known.ahead_slot) or own.has_given_up_a_spare(
            known.state, known.registry
        )

    def _has_drained(self) -> bool:
        since_ms = self._draining_since_ms
        if since_ms is None:
            return False
        return self._current.has_all_acknowledged or self._known.now_ms - since_ms >= DRAIN_MS

    def _spare_slot(self) -> int | None:
        known = self._known
        spare = known.state.spare
        if spare is None or known.now_ms < self._seal_after_ms:
            return None
        self._seal_after_ms = known.now_ms + own.SPARE_SEAL_MS
        return own.spare_slot(
            spare,
            own_clock_ms=known.wall_ms,
            leader_clock_ms=known.leader_clock_ms,
            late_window_s=known.config.late_window_s,
        )

    def _incomplete(self) -> tuple[WheelId, ...] | None:
        known = self._known
        if known.is_complete or known.registry is None:
            return None
        spare = known.state.spare
        fresh = [self._current.wheel, None if spare is None else spare.wheel]
        return self._completeness.doubted(
            known.state, known.registry, self._inventory.prefix, fresh
        )
