"""What a node reports of its cluster: DescribeCluster, and the wheels in lists of slots.

For each wheel the newest report counts: for an open one its own node's, if that is heard.
"""

from importlib.metadata import version
from typing import Final

from delaywheel.identity import WheelId
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.config import Config
from delaywheel_replica.core.protocol.heartbeat import WheelHeartbeat
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role, ServerStatus
from delaywheel_replica.server.lookup.stored import progress_message
from delaywheel_replica.server.node.node_view import (
    NodeView,
    heartbeats_heard,
    leader_heard,
    storage_is_replaced,
    wall_ms,
)
from delaywheel_replica.server.node.refusals import Refusal

# Read once: it is in a file.
_VERSION: Final = version("delaywheel")

_SILENT_MS: Final = 2_000
"""A cleaner that reported nothing for this long may have left anything undone since."""


def describe_cluster(
    config: Config, view: NodeView, status: ServerStatus, address: str, *, refusal: Refusal | None
) -> pb.DescribeClusterResponse:
    """Returns members, wheels, leader, progress, floor and limits, and why it refuses messages."""
    cleaner = view.cleaner.status
    progress = None if cleaner is None else cleaner.progress
    answer = pb.DescribeClusterResponse(
        cluster_id=config.cluster_id,
        node=config.node_id,
        version=_VERSION,
        members=_members(config, view, status, address, accepting=refusal is None),
        min_insync=config.min_insync_members,
        wheels=wheels_of(status, view, of_all=True),
        progress=progress_message(progress),
        lateness_ms=_lateness_ms(cleaner),
        levels=[pb.Level(name=name, delay_ms=ms) for name, ms in config.levels.items()],
        limits=pb.Limits(
            span_seconds=config.span_seconds,
            late_window_seconds=config.late_window_seconds,
            max_message_bytes=config.max_message_bytes,
            max_request_messages=config.max_request_messages,
            max_request_bytes=config.max_request_bytes,
        ),
        now_ms=wall_ms(),
        kafka=config.kafka["bootstrap.servers"],
        trace_topic=config.kafka_settings.names.trace if config.trace else "",
        counts_topic=config.kafka_settings.names.counts if config.trace else "",
    )
    if refusal is not None:
        answer.refusing.CopyFrom(refusal.as_error())
    leader = leader_heard(status)
    if leader is not None:
        answer.leader.node = leader.node
        answer.leader.epoch = leader.epoch
    if status.heartbeat.floor is not None:
        answer.floor = status.heartbeat.floor
    return answer


def wheels_of(status: ServerStatus, view: NodeView, *, of_all: bool) -> list[pb.WheelStatus]:
    """Returns every wheel that is registered or has files, as this node or any sees it."""
    cleaner, heartbeats = view.cleaner.status, heartbeats_heard(status)
    registered = {} if cleaner is None else cleaner.wheels
    progress = None if cleaner is None else cleaner.progress
    rows = []
    for wheel in sorted(status.heartbeat.wheels.keys() | registered.keys()):
        record, reported = registered.get(wheel), _newest(wheel, status, of_all=of_all)
        row = pb.WheelStatus(
            wheel=str(wheel),
            node=wheel.node,
            state=pb.WHEEL_STATE_FENCED,
            applied_seq=reported.applied,
            high_watermark=reported.high_watermark,
            progress_seq=progress.seq(wheel) if progress is not None else 0,
            ledger_seq=reported.ledger_seq,
        )
        origin = heartbeats.get(wheel.node)
        if origin is not None and storage_is_replaced(cleaner, wheel.node, origin.storage):
            origin = None  # what another folder reports of its wheels is ignored
        if record is not None and record.closed_at is not None:
            row.state = pb.WHEEL_STATE_CLOSED
            row.final_seq = record.closed_at
        elif origin is not None and wheel == origin.open:
            row.state = pb.WHEEL_STATE_OPEN
            if wheel.node == status.heartbeat.node:
                row.in_sync.extend(sorted(view.in_sync()))
        elif origin is not None and (wheel == origin.spare or wheel.number > origin.last_number):
            row.state = pb.WHEEL_STATE_SPARE
        rows.append(row)
    return rows


def _newest(wheel: WheelId, status: ServerStatus, *, of_all: bool) -> WheelHeartbeat:
    """Returns the best-informed report of a wheel: its origin's, or that of the best holder."""
    others = [known.heartbeat for known in status.peers.values()] if of_all else []
    heartbeats = [status.heartbeat, *others]
    reported = [heartbeat.wheels[wheel] for heartbeat in heartbeats if wheel in heartbeat.wheels]
    return max(
        reported,
        key=lambda each: (each.applied, each.high_watermark),
        default=WheelHeartbeat.empty(),
    )


def _members(
    config: Config, view: NodeView, status: ServerStatus, address: str, *, accepting: bool
) -> list[pb.Member]:
    heartbeats, peers = heartbeats_heard(status), view.peers()
    rows = []
    for node in sorted(config.members):
        heartbeat, is_self = heartbeats.get(node), node == config.node_id
        peer = peers.get(node)
        reported = None if peer is None else peer.client_address
        others_accept = (
            heartbeat is not None and heartbeat.open is not None and not heartbeat.draining
        )
        rows.append(
            pb.Member(
                node=node,
                address=address if is_self else reported or "",
                reachable=heartbeat is not None,
                accepting=accepting if is_self else others_accept,
                complete=heartbeat is not None and heartbeat.complete,
                storage_replaced=heartbeat is not None
                and storage_is_replaced(view.cleaner.status, node, heartbeat.storage),
                settings_differ=(None if peer is None else peer.rolling) or "",
            )
        )
    return rows


def _lateness_ms(cleaner: CleanerStatus | None) -> int | None:
    """Returns the cleaner's lateness plus its silence; None if nothing is known to be done."""
    if cleaner is None or cleaner.progress is None:
        return None
    silent_ms = max(0, wall_ms() - cleaner.wall_ms)
    is_reporting = cleaner.role is Role.LEADING and silent_ms < _SILENT_MS
    return 0 if is_reporting and not cleaner.lateness_ms else cleaner.lateness_ms + silent_ms
