"""The content of ``node.json`` (``node_file.py`` reads and writes it)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from delaywheel.identity import WheelId


@dataclass(frozen=True, slots=True)
class Spare:
    """A wheel registered in advance and not open yet, with its newest reported seal.

    It holds all that is needed to open it while no other node can be asked.
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
    saves: int = 0  # of this file; others remember it, so an older copy is noticed
    last_number: int = 0  # the greatest wheel number that this node was given; 0 = none
    open: WheelId | None = None
    spare: Spare | None = None
    # Node -> the greatest number of its wheels that we promised to refuse. Forever.
    fenced: Mapping[str, int] = field(default_factory=dict)
    # Wheels of which we may have lost acknowledged frames.
    incomplete: tuple[WheelId, ...] = ()
    # Until the control topic is first read after such a loss: every wheel.
    all_incomplete: bool = False
    # A crash of the machine may lose acknowledged frames: some may not be on the medium.
    unsynced: bool = True
