"""Messages between the nodes of the member machine's tests."""

from dataclasses import replace

from delaywheel.identity import WheelId
from delaywheel.storage.folder.node_state import Spare
from delaywheel_replica.core.protocol.control import WheelRecord
from delaywheel_replica.core.protocol.heartbeat import Heard, Heartbeat, WheelHeartbeat
from delaywheel_replica.core.protocol.messages import Gossip, PeerMessage
from support.core.member_world import FakeNode, disk_of, record_of


def heartbeat_of(node: str, *, boot_heard: str | None = None, **values: object) -> Heartbeat:
    """A heartbeat of another node, which heard this one if asked to."""
    heard = {} if boot_heard is None else {"a": Heard(boot_heard, 0)}
    heartbeat = Heartbeat(
        node=node,
        storage=disk_of(node),
        boot=f"boot-{node}",
        wall_ms=0,
        open=None,
        spare=None,
        last_number=1,
        draining=False,
        complete=True,
        start=1,
        count=1,
        heard=heard,
    )
    return replace(heartbeat, **values)  # type: ignore[arg-type]


def meet(node: FakeNode) -> None:
    """The node hears the others for the first time: it opens no wheel before."""
    for peer in node.nodes.replace(node.name, ""):
        node.receive(peer, Gossip(heartbeat_of(peer, start=0, count=0)))


def wheel_heartbeat(applied: int, **values: object) -> WheelHeartbeat:
    return replace(WheelHeartbeat(applied, 0, 0, 0, 0, 0), **values)  # type: ignore[arg-type]


def messages(node: FakeNode, kind: type[PeerMessage]) -> list[tuple[str, PeerMessage]]:
    return [(peer, message) for peer, message in node.take_sent() if isinstance(message, kind)]


def spare_of(wheel: WheelId) -> Spare:
    record: WheelRecord = record_of()
    return Spare(wheel, 0, record.members, record.min_insync)
