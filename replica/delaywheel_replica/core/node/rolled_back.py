"""Whether a node's folder is an older copy of itself: a backup, or a snapshot that was put back.

It has forgotten promises that it gave, wheels that it opened and frames that it acknowledged, and
nothing in it says so. But others remember how often its node.json was saved, and mirrors have the
frames that it wrote: docs/PROTOCOL.md, "An older copy of a folder", has what shows it, and what the
node does then. While a leader is heard there is a save every second, of the spare's seal
(core/wheels/own_wheels.py): so a copy from the same life of the process is older, too.

A peer says what it heard in the very heartbeat by which its reports begin to count. So what it
holds is never taken for copies of what the folder writes, unless it has forgotten it as well: then
the frames themselves show it, or the control topic.

What the node has may differ from what was agreed on under the same names. It saves nothing: the
next start finds the same, and if a peer was wrong, nothing is spoiled. Only an emptied folder gets
another storage, with which an operator can replace it.
"""

from delaywheel.storage.folder.node_state import NodeState
from delaywheel_replica.core.protocol.heartbeat import Heartbeat


def was_heard_later(state: NodeState, peer: Heartbeat) -> bool:
    """Whether a peer has heard of a later state of this node's folder."""
    heard = peer.heard.get(state.node)
    return heard is not None and heard.storage == state.storage and heard.saves > state.saves
