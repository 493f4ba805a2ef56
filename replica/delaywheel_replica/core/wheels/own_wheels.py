"""The life of a node's own wheels, as far as node.json records it.

`next_state` compares the durable state with the desired one, and returns what to save. It is called
whenever something has changed and with each tick, and one save is under way at a time: a save that
failed is simply found again.

| should be | when | saved |
|---|---|---|
| a promise | it is requested, or a member refused a wheel of this node | `fenced` |
| one about own wheels | the same, and none of them is in hand | `fenced`, `last_number` |
| no open wheel | none is in hand: left, not made, or of an earlier process | `open` = None |
| no spare | it is promised away, closed or gone, or sealed by a clock ahead | `spare` = None |
| a spare | there is none; one was registered above all known ones | `spare`, `last_number` |
| an open wheel | none is in hand; there is a spare, saved before; W were heard | `open`, `spare` |
| a later seal of the spare | a second has passed | `spare` |
| a smaller incomplete set | core/wheels/completeness.py | `incomplete`, `all_incomplete` |

An own wheel is *in hand* from the moment its name is to be saved as open until the store has
reported what it holds (core/wheels/open_wheel.py). It is named open here before its folder is made,
and only once: a number that was open never becomes spare or open again. The numbers of a promise
about own wheels are used up; otherwise a wheel registered among them would never be fenced again,
nor closed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import NodeState, Spare
from delaywheel_replica.core.node.shared_state import Registry
from delaywheel_replica.core.protocol.seal import Seal, next_seal

SPARE_SEAL_MS = 1_000
"""A spare's seal is saved before it is reported, so it moves at most this often."""


@dataclass(frozen=True, slots=True)
class NodeFileInputs:
    """What node.json depends on besides the durable state.

    Attributes:
        fences: Node -> the highest number that a promise is wanted for.
        registry: None: not known yet.
        in_hand: The own wheel that is being named, made, written or left.
        draining: The node stops cleanly.
        may_open: The disk has room, making a wheel has not just failed, and W members were heard.
        spare_slot: The seal that the spare may give; None: as it is.
        incomplete: What the incomplete set should be; None: as it is.
        ahead_slot: A spare that is sealed beyond it is useless; None: any is useful.
    """

    fences: Mapping[str, int] = field(default_factory=dict)
    registry: Registry | None = None
    in_hand: WheelId | None = None
    draining: bool = False
    may_open: bool = True
    spare_slot: int | None = None
    incomplete: tuple[WheelId, ...] | None = None
    ahead_slot: int | None = None


def next_state(state: NodeState, inputs: NodeFileInputs) -> NodeState:
    """Returns the state that should be durable; the same object if nothing has to be saved."""
    after = _promised(state, inputs)
    if inputs.in_hand is None and after.open is not None:
        after = replace(after, open=None)
    spare = after.spare
    if spare is not None and (
        is_over(after, spare.wheel, inputs.registry) or is_ahead(spare.seal_slot, inputs.ahead_slot)
    ):
        after = replace(after, spare=None)
    if not inputs.draining:
        after = _opened(after, state.spare, inputs)
        after = _adopted(after, inputs.registry)
    if inputs.spare_slot is not None:
        after = _sealed(after, inputs.spare_slot)
    if inputs.incomplete is not None:
        after = replace(after, all_incomplete=False, incomplete=inputs.incomplete)
    return after


def is_over(state: NodeState, wheel: WheelId, registry: Registry | None) -> bool:
    """Whether an own wheel may no longer be written: fenced, closed or unregistered."""
    if wheel.number <= state.fenced.get(state.node, 0):
        return True
    if registry is None:
        return False
    record = registry.wheels.get(wheel)
    return registry.is_gone(wheel) if record is None else record.closed_at is not None


def is_ahead(seal_slot: int, ahead_slot: int | None) -> bool:
    """Whether an own wheel was sealed by a clock that was ahead, so that a new one accepts more."""
    return ahead_slot is not None and seal_slot > ahead_slot


def has_given_up_a_spare(state: NodeState, registry: Registry | None) -> bool:
    """Whether a wheel between the open one and the spare is registered, and not closed."""
    if registry is None or state.open is None or state.spare is None:
        return False
    return any(
        wheel.node == state.node
        and state.open.number < wheel.number < state.spare.wheel.number
        and record.closed_at is None
        for wheel, record in registry.wheels.items()
    )


def spare_slot(
    spare: Spare, *, own_clock_ms: int, leader_clock_ms: int | None, late_window_s: int
) -> int:
    """Returns the slot below which a spare may promise to accept nothing."""
    return next_seal(
        Seal(spare.seal_slot, 0),
        own_clock_ms=own_clock_ms,
        leader_clock_ms=leader_clock_ms,
        last_seq=0,
        late_window_s=late_window_s,
    ).slot


def _promised(state: NodeState, inputs: NodeFileInputs) -> NodeState:
    """Fences own wheels only once they accept nothing more, since the answer reports their ends."""
    raised = {
        node: upto
        for node, upto in sorted(inputs.fences.items())
        if upto > state.fenced.get(node, 0) and not _is_held_back(state, node, upto, inputs)
    }
    if not raised:
        return state
    return replace(
        state,
        fenced={**state.fenced, **raised},
        last_number=max(state.last_number, raised.get(state.node, 0)),
    )


def _is_held_back(state: NodeState, node: str, upto: int, inputs: NodeFileInputs) -> bool:
    in_hand = inputs.in_hand
    return node == state.node and in_hand is not None and in_hand.number <= upto


def _opened(state: NodeState, saved: Spare | None, inputs: NodeFileInputs) -> NodeState:
    """Opens only a durable spare: what was reported of the spare, above all its seal, must bind."""
    spare = state.spare
    is_free = inputs.in_hand is None and state.open is None and inputs.may_open
    if spare is None or spare != saved or not is_free:
        return state
    return replace(state, open=spare.wheel, spare=None)


def _adopted(state: NodeState, registry: Registry | None) -> NodeState:
    """Adopts the least registered wheel of this node that it does not know yet."""
    if state.spare is not None or registry is None:
        return state
    above = max(state.last_number, state.fenced.get(state.node, 0))
    mine = [
        wheel
        for wheel, record in registry.wheels.items()
        if wheel.node == state.node
        and wheel.number > above
        and record.closed_at is None
        and record.members.get(state.node) == state.storage
    ]
    if not mine:
        return state
    wheel = min(mine)
    record = registry.wheels[wheel]
    spare = Spare(wheel, record.seal_slot, dict(record.members), record.min_insync)
    return replace(state, spare=spare, last_number=wheel.number)


def _sealed(state: NodeState, slot: int) -> NodeState:
    spare = state.spare
    if spare is None or slot <= spare.seal_slot:
        return state
    return replace(state, spare=replace(spare, seal_slot=slot))
