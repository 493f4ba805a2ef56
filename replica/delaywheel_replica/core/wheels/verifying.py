"""Wheels left mostly by an earlier process, whose content is not known yet.

A node accepts messages as soon as it starts, and examines the wheels in its folder meanwhile, one
by one: after a crash of the machine every file of them. For a wheel that is *unverified* it behaves
as if it were away: docs/PROTOCOL.md, "A start", says how, and why.

So verifying delays what waits for this node: the end of old wheels, and forwarding if this node
leads and does not yet hold what was taken. It never delays accepting messages.

A wheel that cannot be recovered because its medium reports errors is retried every `AGAIN_MS`; it
does not delay other wheels. The same holds for an own wheel that was left because of such errors
and still has them: the spare is opened meanwhile. One whose meta.json is damaged gets it again from
the control topic, as soon as that was read; if the wheel is no longer registered, it is deleted.
"""

from collections.abc import Iterable
from typing import Final

from delaywheel.identity import WheelId
from delaywheel_replica.core.node.events import DeleteWheel, VerifyWheel
from delaywheel_replica.core.node.shared_state import PendingEffects, Registry
from delaywheel_replica.core.protocol.heartbeat import WheelHeartbeat

AGAIN_MS: Final = 10_000


class Verifying:
    """The wheels of one node that are not verified yet."""

    def __init__(self, wheels: Iterable[WheelId], pending: PendingEffects) -> None:
        self.wheels = frozenset(wheels)
        self._pending = pending
        self._not_before_ms: dict[WheelId, int] = {}
        self._last: dict[WheelId, WheelHeartbeat] = {}

    def bears_on(self, origin: str, upto: int) -> bool:
        """Whether any of them belongs to this node and is numbered up to this."""
        return any(wheel.node == origin and wheel.number <= upto for wheel in self.wheels)

    def tick(self, now_ms: int, registry: Registry | None) -> list[VerifyWheel | DeleteWheel]:
        """Returns the wheels to verify now, and those that need not be."""
        effects: list[VerifyWheel | DeleteWheel] = []
        for wheel in sorted(self.wheels):
            if now_ms < self._not_before_ms.get(wheel, now_ms):
                continue
            if self._pending.has(VerifyWheel, wheel) or self._pending.has(DeleteWheel, wheel):
                continue
            record = None if registry is None else registry.wheels.get(wheel)
            is_gone = registry is not None and registry.is_gone(wheel)
            is_again = wheel in self._not_before_ms
            effects.append(
                DeleteWheel(wheel) if is_gone and is_again else VerifyWheel(wheel, record)
            )
        return effects

    def left(self, wheel: WheelId, last: WheelHeartbeat | None, now_ms: int) -> None:
        """Adds an own wheel that was left, with what was last reported of it."""
        self.wheels |= {wheel}
        if last is not None:
            self._last[wheel] = last
        self.failed(wheel, now_ms)

    def done(self, wheel: WheelId) -> WheelHeartbeat | None:
        """Removes a verified wheel; returns what this process last reported of it, if anything."""
        self._pending.done(VerifyWheel, wheel=wheel)
        self.wheels -= {wheel}
        return self._last.pop(wheel, None)

    def deleted(self, wheel: WheelId) -> None:
        """Removes a wheel whose folder was deleted."""
        self.wheels -= {wheel}
        self._not_before_ms.pop(wheel, None)
        self._last.pop(wheel, None)

    def failed(self, wheel: WheelId, now_ms: int) -> None:
        """Notes that the medium reported an error; it is retried later."""
        self._not_before_ms[wheel] = now_ms + AGAIN_MS
