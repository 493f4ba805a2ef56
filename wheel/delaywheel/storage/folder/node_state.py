"""The content of ``node.json`` (``node_file.py`` reads and writes it)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from delaywheel.identity import WheelId


@dataclass(frozen=True, slots=True)
class Spare:
    """A wheel registered in advance and not open yet, with its newest reported seal.

    All that is needed to open it while nobody can be asked.
    """

    wheel: WheelId
    seal_slot: int
    members: Mapping[str, str]  # node -> storage uuid, as registered
    min_insync: int


@dataclass(frozen=True, slots=True)
class NodeState:
    """The content of ``node.json``."""

    node: str
    cluster_id: str
    storage: str  # uuid, 32 hex digits
    boot_id: str  # of the machine's start in which the node last ran
    starts: int = 0  # of the node on this storage
    last_number: int = 0  # the greatest wheel number that this node was given; 0 = none
    open: WheelId | None = None
    spare: Spare | None = None
    # Node -> the greatest wheel number of it that we promised to take no more of. For ever.
    fenced: Mapping[str, int] = field(default_factory=dict)
    # Wheels of which we may have lost what we acknowledged.
    incomplete: tuple[WheelId, ...] = ()
    # Before the control topic was first read after such a loss: every wheel.
    all_incomplete: bool = False
