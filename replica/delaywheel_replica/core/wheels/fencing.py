"""Fencing: promises to refuse a node's wheels, and the answers to them.

| a promise is | accepted of these wheels | reported |
|---|---|---|
| requested | what a limit or a committed end allows | no |
| saved | the same | to asking nodes, with each heartbeat; to this node's own cleaner |

A leader requests it, or a member that refused a wheel of this node. From then on no more writes may
be requested: those requested before are done before the promise is saved, because effects are
carried out in order. So an answer covers everything that was ever accepted.

A limit is committed before it is reported (core/leader/closing.py), so it stays true whichever node
reports it, and however late: the greatest one counts.
"""

from collections.abc import Iterable, Mapping

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import NodeState
from delaywheel_replica.core.protocol.heartbeat import Fence, Promise
from delaywheel_replica.core.wheels.inventory import Inventory
from delaywheel_replica.core.wheels.verifying import Verifying


class Fencing:
    """The promises that were requested of one node, and other nodes' answers."""

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self._limits: dict[WheelId, int] = {}
        self._answers: dict[tuple[str, str], Promise] = {}

    def asked(self, fences: Iterable[Fence], state: NodeState) -> bool:
        """Notes requests for promises; returns whether any of them is new."""
        is_new = False
        for fence in fences:
            if fence.upto > self.upto(fence.origin, state):
                self.wanted[fence.origin] = fence.upto
                is_new = True
        return is_new

    def upto(self, origin: str, state: NodeState) -> int:
        """Returns the highest number promised, or about to be: wheels up to it are refused."""
        return max(state.fenced.get(origin, 0), self.wanted.get(origin, 0))

    def saved(self, state: NodeState) -> None:
        """Drops requests that have become durable."""
        self.wanted = {
            node: upto for node, upto in self.wanted.items() if upto > state.fenced.get(node, 0)
        }

    def limited(self, limits: Mapping[WheelId, int]) -> None:
        """Notes how far wheels may be fetched although they are fenced."""
        for wheel, seq in limits.items():
            if seq > self._limits.get(wheel, 0):
                self._limits[wheel] = seq

    def limit(self, wheel: WheelId, state: NodeState) -> int | None:
        """Returns how far a wheel that is promised away may be limited; None: it is not."""
        return self._limits.get(wheel, 0) if wheel.number <= self.upto(wheel.node, state) else None

    def forget(self, wheel: WheelId) -> None:
        """Drops a deleted wheel."""
        self._limits.pop(wheel, None)

    def answered(self, sender: str, answer: Promise) -> bool:
        """Notes another node's promise; returns whether it counts."""
        key = (answer.node, answer.fence.origin)
        known = self._answers.get(key)
        is_overtaken = (
            known is not None
            and known.storage == answer.storage
            and known.fence.upto > answer.fence.upto
        )
        if sender != answer.node or is_overtaken or known == answer:
            return False
        self._answers[key] = answer
        return True

    def answers(self) -> list[Promise]:
        """The newest answer of each other node for each origin, in order."""
        return [self._answers[key] for key in sorted(self._answers)]


def answer(
    state: NodeState, fence: Fence, inventory: Inventory, verifying: Verifying
) -> Promise | None:
    """Returns this node's answer to a fence, with all that was ever promised about that node.

    None while the promise is not durable, or it is unknown what the node holds of these wheels.
    """
    upto = state.fenced.get(fence.origin, 0)
    if upto < fence.upto or verifying.bears_on(fence.origin, upto):
        return None
    applied = {
        wheel: held.applied
        for wheel, held in inventory.items()
        if wheel.node == fence.origin and wheel.number <= upto
    }
    return Promise(
        node=state.node,
        storage=state.storage,
        fence=Fence(fence.origin, upto),
        applied=applied,
        incomplete=frozenset(
            wheel
            for wheel in state.incomplete
            if wheel.node == fence.origin and wheel.number <= upto
        ),
        all_incomplete=state.all_incomplete,
    )
