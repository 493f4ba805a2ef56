"""Wheels that were left, mostly by an earlier life, and whose content is not known yet.

A node accepts messages at once when it starts. What it finds in its folder it looks at meanwhile,
wheel by wheel: after a crash of the machine every file of it. As long as a wheel is *unverified*,
the node is, for that wheel, as if it were away:

| it | because |
|---|---|
| tells nothing of it in its heartbeats | it does not know |
| names it there as `verifying`, and is not `complete` | nobody may take that for "nothing" |
| answers no fence of its origin up to its number | an answer tells all that was ever taken |
| neither serves a frame of it nor says that it lacks one | what all lack is lost |
| takes and fetches none of it, does not close or delete it | its files are being put in order |

So verifying delays what waits for this node: the end of old wheels, and forwarding where this node
leads and does not hold yet what was taken. It delays no acceptance.

A wheel that cannot be made whole, since its medium refuses, is tried again every `AGAIN_MS`; it
keeps no other one from it. So is an own wheel that was left because its medium refuses, and goes on
refusing: the spare is opened meanwhile.
"""

from collections.abc import Iterable
from typing import Final

from delaywheel.identity import WheelId
from delaywheel_replica.core.node.awaiting import Awaiting
from delaywheel_replica.core.node.events import VerifyWheel
from delaywheel_replica.core.protocol.heartbeat import WheelHeartbeat

AGAIN_MS: Final = 10_000


class Verifying:
    """The wheels of one node that are not verified yet."""

    def __init__(self, wheels: Iterable[WheelId], awaiting: Awaiting) -> None:
        """Begins without verifications under way.

        Args:
            wheels: those that the start has found.
            awaiting: what the store was asked for.
        """
        self.wheels = frozenset(wheels)
        self._awaiting = awaiting
        self._not_before_ms: dict[WheelId, int] = {}
        self._told: dict[WheelId, WheelHeartbeat] = {}

    def __contains__(self, wheel: object) -> bool:
        return wheel in self.wheels

    def bears_on(self, origin: str, upto: int) -> bool:
        """Whether any of them belongs to this node and is numbered up to this."""
        return any(wheel.node == origin and wheel.number <= upto for wheel in self.wheels)

    def tick(self, now_ms: int) -> list[VerifyWheel]:
        """Returns the wheels to verify now."""
        return [
            VerifyWheel(wheel)
            for wheel in sorted(self.wheels)
            if now_ms >= self._not_before_ms.get(wheel, now_ms)
            and not self._awaiting.has(VerifyWheel, wheel)
        ]

    def left(self, wheel: WheelId, told: WheelHeartbeat | None, now_ms: int) -> None:
        """Adds an own wheel that was left, with what was last reported of it."""
        self.wheels |= {wheel}
        if told is not None:
            self._told[wheel] = told
        self.failed(wheel, now_ms)

    def done(self, wheel: WheelId) -> WheelHeartbeat | None:
        """Removes a verified wheel; returns what this life last reported of it, if anything."""
        self._awaiting.done(VerifyWheel, wheel=wheel)
        self.wheels -= {wheel}
        return self._told.pop(wheel, None)

    def failed(self, wheel: WheelId, now_ms: int) -> None:
        """Notes that the medium refused; it is retried later."""
        self._not_before_ms[wheel] = now_ms + AGAIN_MS
