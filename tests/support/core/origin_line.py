"""An origin's open wheel with a clock, driven by tests."""

from collections.abc import Collection
from dataclasses import dataclass, field

from delaywheel.identity import WheelId
from delaywheel_replica.core.node.events import MemberConfig
from delaywheel_replica.core.protocol.seal import Seal
from delaywheel_replica.core.wheels.open_wheel import Replication

A1 = WheelId("a", 1)
START_MS = 50_000
INSYNC_MS = 1_000
PUSH_MS = 700


def config_of(nodes: str, *, in_flight: int = 40) -> MemberConfig:
    """The configuration of node `a`."""
    return MemberConfig(
        "a",
        tuple(nodes),
        2,
        120,
        insync_timeout_ms=INSYNC_MS,
        fetch_timeout_ms=PUSH_MS,
        in_flight_frames=in_flight,
        batch_frames=10,
    )


@dataclass
class Line:
    """A wheel of node `a` with a clock; mirrors answer from storage `disk-x` under boot `1`."""

    nodes: str = "abc"
    min_insync: int = 2
    in_flight: int = 40
    now_ms: int = START_MS
    replication: Replication = field(init=False)

    def __post_init__(self) -> None:
        self.replication = Replication(
            config_of(self.nodes, in_flight=self.in_flight),
            A1,
            {node: f"disk-{node}" for node in self.nodes},
            self.min_insync,
            Seal(7, 0),
            in_sync=self.nodes,
            now_ms=self.now_ms,
        )
        for mirror in self.nodes[1:]:
            self.booted(mirror)

    @property
    def in_sync(self) -> str:
        """The members that are waited for."""
        return "".join(sorted(self.replication.in_sync))

    @property
    def high_watermark(self) -> int:
        """What is acknowledged."""
        return self.replication.high_watermark

    def after(self, ms: int) -> None:
        """Time passes."""
        self.now_ms += ms
        self.replication.tick(self.now_ms)

    def written(self, last_seq: int) -> None:
        """The origin has written up to here."""
        self.replication.written(last_seq, 0, self.now_ms)

    def booted(self, mirror: str, boot: str = "1", *, disk: str = "disk") -> None:
        """A mirror was heard."""
        self.replication.booted(mirror, f"{disk}-{mirror}", boot, self.now_ms)

    def drains(self, *mirrors: str) -> None:
        """These nodes report that they stop, the others that they do not."""
        for mirror in self.nodes[1:]:
            self.replication.says(mirror, is_draining=mirror in mirrors, disk_out=False)

    def disk_out(self, *mirrors: str) -> None:
        """These nodes report that their disks take no frames, the others that they do."""
        for mirror in self.nodes[1:]:
            self.replication.says(mirror, is_draining=False, disk_out=mirror in mirrors)

    def applied(self, mirror: str, prefix: int, boot: str = "1", *, disk: str = "disk") -> None:
        """Reports what a mirror holds."""
        self.replication.applied(mirror, f"{disk}-{mirror}", boot, prefix, self.now_ms)

    def pushes(self, reachable: Collection[str] = "bc") -> list[tuple[str, int, int]]:
        """What is pushed now."""
        return self.replication.pushes(self.now_ms, reachable)
