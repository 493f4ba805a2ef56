"""Finds the wheels of which a node may be missing acknowledged frames.

After a crash of the machine every wheel is doubted until the control topic is read; then every
wheel that is registered then and names this node's storage. A wheel is no longer doubted when

| it | because |
|---|---|
| is no longer registered | all of it is finished |
| is closed, and everything through T is held | nothing else of it counts |
| is the node's own, and spare or opened since | no node holds more of it |
| is in use, and held up to its origin's end after the boot | see below |

That end is the one that the origin first reported, directly, after it had learned of this boot:
everything that this node acknowledged before the crash lay below it, and no longer counts with that
origin. A high watermark, or a relayed report, is not enough: answers given before the crash may
still be under way. An origin that uses its wheel as a spare has written nothing.
"""

from collections.abc import Callable, Collection

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import NodeState
from delaywheel_replica.core.node.shared_state import Registry
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.heartbeat import Heartbeat


class Completeness:
    """What a node still has to recover."""

    def __init__(self, node: str, boot: str) -> None:
        self._node = node
        self._boot = boot
        self._targets: dict[WheelId, int] = {}

    def heard(self, heartbeat: Heartbeat) -> None:
        """Notes a heartbeat that came directly from its node."""
        heard = heartbeat.heard.get(self._node)
        if heard is None or heard.boot != self._boot:
            return
        for wheel in heartbeat.named:
            reported = heartbeat.wheels.get(wheel)
            if reported is not None and wheel.node == heartbeat.node:
                self._targets.setdefault(wheel, reported.applied)

    def doubted(
        self,
        state: NodeState,
        registry: Registry,
        prefix: Callable[[WheelId], int],
        own: Collection[WheelId | None],
    ) -> tuple[WheelId, ...]:
        """The wheels that are still incomplete.

        Args:
            registry: The registered wheels, read to the end after the boot.
            prefix: The seq up to which a wheel is held.
            own: The node's own wheels that were not opened, or only since it started.
        """
        doubted = registry.wheels if state.all_incomplete else state.incomplete
        return tuple(
            sorted(
                wheel
                for wheel in doubted
                if (record := registry.wheels.get(wheel)) is not None
                and record.members.get(state.node) == state.storage
                and wheel not in own
                and not self._is_back(wheel, record, prefix(wheel))
            )
        )

    def forget(self, registry: Registry) -> None:
        """Drops the targets of wheels that are no longer registered."""
        self._targets = {
            wheel: seq for wheel, seq in self._targets.items() if not registry.is_gone(wheel)
        }

    def _is_back(self, wheel: WheelId, record: WheelRecord, prefix: int) -> bool:
        if record.closed_at is not None:
            return prefix >= record.closed_at
        return wheel in self._targets and prefix >= self._targets[wheel]
