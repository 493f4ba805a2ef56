"""``node.json``, which holds what a node must never forget; and the folder's lock.

Every change is on the medium before ``save`` returns, and only then may it be reported to others.
The storage uuid is made with the folder: it distinguishes an emptied or replaced node from the old
one.
"""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from delaywheel.identity import WheelId, check_name
from delaywheel.storage.folder.disk import Disk, FolderInUseError, Lock
from delaywheel.storage.folder.node_state import NodeState, Spare

_VERSION = 1


class NodeFolderError(Exception):
    """The data folder cannot be used by this node."""


class NodeFolderInUse(NodeFolderError):
    """Another process works on this data folder."""


class NodeFolderForeign(NodeFolderError):
    """The data folder belongs to another node or another cluster."""


class NodeFileDamaged(NodeFolderError):
    """``node.json`` exists but cannot be understood."""


class NodeFolder:
    """A locked data folder and its node's state."""

    def __init__(self, disk: Disk, data: Path, state: NodeState, lock: Lock) -> None:
        self._disk = disk
        self._lock = lock
        self.data = data
        self.state = state

    def put(self, state: NodeState) -> None:
        """Saves this state durably."""
        _write(self._disk, self.data, state)
        self.state = state

    def release(self) -> None:
        """Releases the folder's lock."""
        self._lock.close()


def new_storage() -> str:
    """Returns a uuid for a new data folder."""
    return uuid.uuid4().hex


def open_node_folder(
    disk: Disk,
    data: Path,
    *,
    node: str,
    cluster_id: str,
    boot_id: str,
    make_storage: Callable[[], str] = new_storage,
) -> NodeFolder:
    """Locks a data folder for a node and reads its state, or creates both.

    A changed ``boot_id`` stays in the state for the caller to see and save: it must first make
    durable what may be incomplete.

    Raises:
        NodeFolderInUse: Another process has the lock.
        NodeFolderForeign: The folder belongs to another node or cluster.
        NodeFileDamaged: Its state cannot be read.
    """
    check_name(node, what="node id")
    check_name(cluster_id, what="cluster id")
    made = [folder for folder in (data, *data.parents) if not disk.exists(folder)]
    disk.make_folder(data)
    try:
        lock = disk.lock(data / "lock")
    except FolderInUseError as error:
        raise NodeFolderInUse(f"{data} is in use by another process") from error
    try:
        state = load_node_state(disk, data)
        if state is None:
            state = NodeState(node, cluster_id, make_storage(), boot_id, unsynced=False)
            # An earlier process may have made the folder, and died.
            for folder in {data, *made}:
                disk.sync_folder(folder.parent)
            _write(disk, data, state)
        _refuse_foreign(data, state, node=node, cluster_id=cluster_id)
    except BaseException:
        lock.close()
        raise
    return NodeFolder(disk, data, state, lock)


def load_node_state(disk: Disk, data: Path) -> NodeState | None:
    """Reads ``node.json`` without the lock, or raises NodeFileDamaged; None if there is none."""
    path = data / "node.json"
    try:
        content = disk.read_file(path)
    except FileNotFoundError:
        return None
    try:
        return _decoded(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NodeFileDamaged(f"{path}: {error}") from error


def _refuse_foreign(data: Path, state: NodeState, *, node: str, cluster_id: str) -> None:
    if (state.node, state.cluster_id) != (node, cluster_id):
        raise NodeFolderForeign(
            f"{data} belongs to node {state.node} of cluster {state.cluster_id}, "
            f"not to node {node} of cluster {cluster_id}"
        )


def _write(disk: Disk, data: Path, state: NodeState) -> None:
    content = json.dumps(_encoded(state), indent=2, sort_keys=True) + "\n"
    disk.replace_file(data / "node.json", content.encode())


def _encoded(state: NodeState) -> dict[str, Any]:
    spare = state.spare
    return {
        "version": _VERSION,
        "node": state.node,
        "cluster_id": state.cluster_id,
        "storage": state.storage,
        "boot_id": state.boot_id,
        "starts": state.starts,
        "saves": state.saves,
        "last_number": state.last_number,
        "open": str(state.open) if state.open else None,
        "spare": _encoded_spare(spare) if spare else None,
        "fenced": dict(state.fenced),
        "incomplete": [str(wheel) for wheel in state.incomplete],
        "all_incomplete": state.all_incomplete,
        "unsynced": state.unsynced,
    }


def _decoded(document: dict[str, Any]) -> NodeState:
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']}, this program knows {_VERSION}")
    spare = document["spare"]
    return NodeState(
        node=str(document["node"]),
        cluster_id=str(document["cluster_id"]),
        storage=str(document["storage"]),
        boot_id=str(document["boot_id"]),
        starts=int(document["starts"]),
        saves=int(document.get("saves", 0)),  # earlier releases did not count them
        last_number=int(document["last_number"]),
        open=WheelId.parse(document["open"]) if document["open"] else None,
        spare=_decoded_spare(spare) if spare else None,
        fenced={str(node): int(number) for node, number in document["fenced"].items()},
        incomplete=tuple(WheelId.parse(wheel) for wheel in document["incomplete"]),
        all_incomplete=bool(document["all_incomplete"]),
        unsynced=bool(document.get("unsynced", True)),  # earlier releases did not say
    )


def _encoded_spare(spare: Spare) -> dict[str, Any]:
    return {
        "wheel": str(spare.wheel),
        "seal_slot": spare.seal_slot,
        "members": dict(spare.members),
        "min_insync": spare.min_insync,
    }


def _decoded_spare(document: dict[str, Any]) -> Spare:
    return Spare(
        wheel=WheelId.parse(document["wheel"]),
        seal_slot=int(document["seal_slot"]),
        members={str(node): str(storage) for node, storage in document["members"].items()},
        min_insync=int(document["min_insync"]),
    )
