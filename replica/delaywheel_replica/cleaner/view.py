"""The public state of a cleaner, for its status."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from delaywheel.identity import WheelId
from delaywheel_replica.core.protocol.control import ControlState, Leader
from delaywheel_replica.core.protocol.frames import NO_FRAMES, FrameSet
from delaywheel_replica.core.protocol.heartbeat import Fence
from delaywheel_replica.core.protocol.messages import PrevoteRequest
from delaywheel_replica.core.protocol.status_files import (
    FloorWait,
    Role,
    Standstill,
)


@dataclass(frozen=True, slots=True)
class View:
    """The public state of this cleaner."""

    role: Role
    epoch: int | None
    leader: Leader | None
    state: ControlState
    control_offset: int
    lateness_ms: int
    error: str | None
    warnings: tuple[str, ...] = ()
    unreadable: FrameSet = NO_FRAMES
    fences: tuple[Fence, ...] = ()
    fills: Mapping[WheelId, int] = field(default_factory=dict)
    prevote_request: PrevoteRequest | None = None
    stands: bool = False
    ingress_slot: int | None = None
    floor_wait: FloorWait | None = None
    standstill: Standstill | None = None
    halves_objection: str | None = None
