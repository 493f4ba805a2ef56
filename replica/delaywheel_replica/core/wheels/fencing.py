"""Promises to take no more of a node's wheels, and the answers to those who asked for them.

| a promise is | taken of these wheels | told |
|---|---|---|
| asked for | what a fill or a committed end allows | no |
| saved | the same | to whoever asks, with each beat; to this node's own cleaner |

A leader asks for it, or a member that refused a wheel of this node. From that moment on nothing
more may be asked to be written: what was asked to be
written before is written before the promise is saved, since effects are carried out in order. So
an answer tells of everything that was ever taken.

A fill is committed before it is told (core/leader/closing.py), so it stays true whoever tells it,
and however late: of several the greatest counts.
"""

from collections.abc import Iterable, Mapping

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import NodeState
from delaywheel_replica.core.protocol.heartbeat import Fence, FenceAnswer
from delaywheel_replica.core.wheels.inventory import Inventory
from delaywheel_replica.core.wheels.verifying import Verifying


class Fencing:
    """What was asked of one node, and what others have answered to it."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self.wanted: dict[str, int] = {}
        self._fills: dict[WheelId, int] = {}
        self._answers: dict[tuple[str, str], FenceAnswer] = {}

    def asked(self, fences: Iterable[Fence], state: NodeState) -> bool:
        """Promises are asked for; returns whether one of them is new."""
        is_new = False
        for fence in fences:
            if fence.upto > self.upto(fence.origin, state):
                self.wanted[fence.origin] = fence.upto
                is_new = True
        return is_new

    def upto(self, origin: str, state: NodeState) -> int:
        """The highest number promised, or about to be: nothing up to there is taken."""
        return max(state.fenced.get(origin, 0), self.wanted.get(origin, 0))

    def saved(self, state: NodeState) -> None:
        """What is durable need not be wanted any more."""
        self.wanted = {
            node: upto for node, upto in self.wanted.items() if upto > state.fenced.get(node, 0)
        }

    def filled(self, fills: Mapping[WheelId, int]) -> None:
        """Up to here wheels may be taken although they are fenced."""
        for wheel, seq in fills.items():
            if seq > self._fills.get(wheel, 0):
                self._fills[wheel] = seq

    def fill(self, wheel: WheelId) -> int | None:
        """Up to where a fenced wheel may be taken; None: not at all."""
        return self._fills.get(wheel)

    def forget(self, wheel: WheelId) -> None:
        """A wheel is deleted."""
        self._fills.pop(wheel, None)

    def answered(self, sender: str, answer: FenceAnswer) -> bool:
        """Another node has promised; returns whether its answer counts."""
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

    def answers(self) -> list[FenceAnswer]:
        """The newest of each other node, for each origin, in order."""
        return [answer for _, answer in sorted(self._answers.items(), key=_by_key)]


def answer(
    state: NodeState, fence: Fence, holdings: Inventory, verifying: Verifying
) -> FenceAnswer | None:
    """What this node answers to a fence; None: that promise is not durable yet.

    Or what it holds of these wheels is not known yet.

    It may cover more than was asked: everything that was ever promised of that node.
    """
    upto = state.fenced.get(fence.origin, 0)
    if upto < fence.upto or verifying.bears_on(fence.origin, upto):
        return None
    applied = {
        wheel: held.applied
        for wheel, held in holdings.items()
        if wheel.node == fence.origin and wheel.number <= upto
    }
    return FenceAnswer(
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


def _by_key(item: tuple[tuple[str, str], FenceAnswer]) -> tuple[str, str]:
    return item[0]
