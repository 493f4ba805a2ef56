"""A healthy node, for tests of reports."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.writing.dial import HORIZONS, Pending
from delaywheel_replica.core.protocol.control import Leader, WheelRecord
from delaywheel_replica.core.protocol.histogram import (
    COMMIT_BOUNDS_US,
    LATENESS_BOUNDS_US,
    Tally,
)
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.status_files import (
    CleanerStatus,
    IngressStatus,
    KnownPeer,
    Role,
    ServerStatus,
    UnansweredHalves,
)
from delaywheel_replica.peers.states import (
    Connection,
    Counters,
    PeerReason,
    PeerRefusal,
    PeerState,
)
from delaywheel_replica.server.access.callers import Access
from delaywheel_replica.server.access.quotas import Quota
from delaywheel_replica.server.access.spending import Spending
from delaywheel_replica.server.certificates import Certificates, NodeCertificates
from delaywheel_replica.server.ledger.publisher import BooksState
from delaywheel_replica.server.metrics.processes import Process
from delaywheel_replica.server.metrics.scrape import DiskSpace, Scrape, Sources
from delaywheel_replica.server.node.counts import NodeCounts
from delaywheel_replica.server.node.node_view import CleanerView
from delaywheel_replica.server.node.pulse import LAG_BOUNDS_US
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError
from delaywheel_replica.server.node.same_access import SameAccess
from sim.machine.disk import SimulatedDisk
from support.core.values import heartbeat, wheel_heartbeat
from support.server.server_process import config_for
from support.server.views import node_view

NOW_MS = 1_700_000_000_000
A1, A2, A3, B1, B2 = (WheelId(*name) for name in zip("aaabb", (1, 2, 3, 1, 2), strict=True))
MONOTONIC_MS = 50_000


def tally(bounds_us: tuple[int, ...], *values_us: int) -> Tally:
    made = Tally(bounds_us)
    for value_us in values_us:
        made.add(value_us)
    return made


def server_status() -> ServerStatus:
    """Node a's metrics: it leads; b mirrors it, and was not heard for a second."""
    own = heartbeat(
        "a",
        open_=A2,
        spare=A3,
        wheels={
            A1: wheel_heartbeat(10),
            A2: replace(wheel_heartbeat(20), high_watermark=17, ledger_seq=15),
            A3: wheel_heartbeat(0),
            B1: wheel_heartbeat(7, missing=(3, 4)),
        },
    )
    other = heartbeat(
        "b", open_=B1, spare=B2, wheels={A2: wheel_heartbeat(18), B1: wheel_heartbeat(9)}
    )
    return ServerStatus(
        own, 1, MONOTONIC_MS - 100, peers={"b": KnownPeer(other, MONOTONIC_MS - 1_000)}
    )


def cleaner_status(**changes: Any) -> CleanerStatus:
    """The leader's metrics."""
    status = CleanerStatus(
        node="a",
        boot="boot",
        pid=2,
        monotonic_ms=MONOTONIC_MS - 40,
        wall_ms=NOW_MS - 40,
        role=Role.LEADING,
        epoch=7,
        leader=Leader("a", 7),
        progress=Progress(NOW_MS - 500, None, {}, NOW_MS // 1000 - 180),
        wheels={A1: WheelRecord({"a": "d"}, 1, 5, 10), A2: WheelRecord({"a": "d"}, 1, 5)},
        ingress=IngressStatus(1, 7, {"in/0": 7}),
        lateness_ms=250,
        started_ms=NOW_MS - 90_000,
        counters={"forwarded": 1_000, "transactions": 30, "elections": 1, "dead_lettered": 2},
        forwarded_by_topic={"orders": 990, "(others)": 10},
        dead_by_topic={"orders": 2},
        dead_by_reason={"TOPIC_MISSING": 2, "REFUSED": 0},
        unanswered=(UnansweredHalves("shop", 2, NOW_MS - 10_000),),
        lateness=tally(LATENESS_BOUNDS_US, 4_000, 5_000, 40_000, 7_200_000_000).read(),
        commit_times=tally(COMMIT_BOUNDS_US, 12_000).read(),
    )
    return replace(status, **changes)


def counts() -> NodeCounts:
    made = NodeCounts(groups=3, frames=9, frame_bytes=4_096, messages=40, cancels=2)
    made.answered(41, {0: Refusal(Reason.DUE_TOO_OLD)}, 4_000)
    made.topics.add_one("orders", 40)
    made.calls.add("cancel", "CANCELLED", 40_000)
    made.calls.add("reschedule", "RESCHEDULED", 90_000)
    made.calls.add("get", "PENDING", 3_000)
    made.cancel_stages["queued"] += 3
    made.cancel_load = lambda: (2, 50, 40)
    made.refused[Reason.NO_WHEEL] += 5
    made.refused_calls["DelayProduce", Reason.NO_WHEEL] += 1
    return made


def peer_state(**changes: Any) -> PeerState:
    counted = Counters(sent=4, sent_bytes=400, received=3, received_bytes=300, dropped=1, breaks=2)
    return replace(PeerState(Connection.CONNECTED, 1, "b:7421", counters=counted), **changes)


class _Part:
    """Sources of a scrape that need no separate fake."""

    capacity = 8_192
    in_sync_changes = 4
    greatest_lag_us = 1_200
    lags = tally(LAG_BOUNDS_US, 300, 1_200)

    def __len__(self) -> int:
        return 5


def undeletable(files: int) -> Undeletable:
    """Knows of so many files that a disk refused to delete: `/data/1.slot`, `/data/2.slot` …"""
    disk, made = SimulatedDisk(), Undeletable()
    for number in range(1, files + 1):
        path = Path(f"/data/{number}.slot")
        disk.set_content(path, b"x")
        disk.undeletable.add(str(path))
        assert not made.delete(disk, path)
    return made


class _Certificates:
    """Files that are not in order any more, and what is shown since they were."""

    refused = "tls_cert /c.pem: expired"
    current = Certificates(b"", b"", None, None, 1_800_000_000.0)


class _Access:
    """Grants that are refused, and a principal with a quota."""

    refused = "grants /g.toml: permission denied"
    is_limited = True

    def __init__(self) -> None:
        self.spending = Spending()
        quota = Quota(messages_per_second=1)
        self.spending.spend("shop", quota, 3, 300, 1_000.0)
        with suppress(RequestRefusedError):
            self.spending.spend("shop", quota, 2, 200, 1_000.0)


class _SameAccess:
    differing = ("c",)


class _Sources(Sources):
    """A healthy node, without a data folder."""

    def __init__(self, in_sync: frozenset[str]) -> None:
        part: Any = _Part()
        self.config = config_for(
            Path("/nowhere"),
            cluster_id="shop",
            node_id="a",
            **{f"members.{node}": f"{node}:7421" for node in "abc"},
        )
        self.view = node_view(server_status, in_sync=in_sync, cleaner=CleanerView(cleaner_status()))
        self.handles = self.pulse = part
        self.in_flight_bytes = lambda: 77
        self.counts = counts()
        self.undeletable = undeletable(2)
        self.certificates = cast("NodeCertificates", _Certificates())
        self.access = cast("Access", _Access())
        self.same_access = cast("SameAccess", _SameAccess())
        self.max_caller_connections = 4_096
        self.started_s = 1_699_999_000.5


def on_folder(storage: str) -> ServerStatus:
    """The status of a node whose folder has this uuid."""
    status = server_status()
    return replace(status, heartbeat=replace(status.heartbeat, storage=storage))


def scrape(*, in_sync: frozenset[str] = frozenset("ab"), **changes: Any) -> Scrape:
    """Everything is known and healthy, unless changed."""
    refusal = PeerRefusal(PeerReason.WRONG_CLUSTER, "another")
    known = {
        "wall_ms": NOW_MS,
        "monotonic_ms": MONOTONIC_MS,
        "server": server_status(),
        "refusal": None,
        "pending": tuple(Pending(name, n, n * 100) for n, (name, _) in enumerate(HORIZONS)),
        "pending_by_topic": {"orders": 38},
        "alone_messages": 1_204,
        "disk": DiskSpace(1_000, 600, 50, 100),
        "processes": {
            "server": Process(1.5, 1 << 20, 40, 30, 1_024),
            "cleaner": Process(2.5, 2 << 20, 50, 20, None),
        },
        "peers": {
            "b": peer_state(),
            "c": peer_state(connection=Connection.REFUSED, refusal=refusal),
        },
        "books": BooksState("/books", "gone", NOW_MS - 4_500, 1, 20, 3, 70),
    }
    made = Scrape(_Sources(in_sync))
    # What is known already is not read.
    vars(made).update(known | changes)
    return made
