"""The JSON of the reading commands, from the protocol's messages: stable, names as in the protocol.

Bytes are base64, null stays null; states are lower case; absent fields are null, never left out.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from typing import Any

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.values import iso


def cluster(answer: pb.DescribeClusterResponse) -> dict[str, Any]:
    """`delaywheel status --json`."""
    leader = answer.leader
    return {
        "cluster": answer.cluster_id,
        "node": answer.node,
        "version": answer.version,
        "now_ms": answer.now_ms,
        "leader": _if_set(answer, "leader", {"node": leader.node, "epoch": leader.epoch}),
        "members": [
            {
                "node": member.node,
                "address": member.address,
                "reachable": member.reachable,
                "accepting": member.accepting,
                "complete": member.complete,
                "storage_replaced": member.storage_replaced,
            }
            for member in answer.members
        ],
        "min_insync": answer.min_insync,
        "wheels": wheels(answer.wheels),
        "progress": progress(answer),
        "floor": _if_set(answer, "floor", answer.floor),
        "lateness_ms": answer.lateness_ms,
        "refusing": _if_set(
            answer,
            "refusing",
            {"reason": answer.refusing.reason, "message": answer.refusing.message},
        ),
        "levels": {level.name: level.delay_ms for level in answer.levels},
        "limits": {
            "span_seconds": answer.limits.span_seconds,
            "late_window_seconds": answer.limits.late_window_seconds,
            "max_message_bytes": answer.limits.max_message_bytes,
            "max_request_messages": answer.limits.max_request_messages,
            "max_request_bytes": answer.limits.max_request_bytes,
        },
    }


def node_change(change: pb.NodeChange) -> dict[str, Any]:
    """`delaywheel node replace --json` and `delaywheel node remove --json`."""
    return {
        "node": change.node,
        "storage_before": change.storage_before or None,
        "storage": change.storage or None,
        "wheels": [{"wheel": row.wheel, "frames_at_risk": row.frames} for row in change.wheels],
    }


def wheels(rows: Iterable[pb.WheelStatus]) -> list[dict[str, Any]]:
    """The wheels of a cluster as one node sees them."""
    return [
        {
            "wheel": row.wheel,
            "node": row.node,
            "state": _state(pb.WheelState.Name(row.state), "WHEEL_STATE_"),
            "applied_seq": row.applied_seq,
            "high_watermark": row.high_watermark,
            "in_sync": list(row.in_sync),
            "final_seq": _if_set(row, "final_seq", row.final_seq),
            "progress_seq": row.progress_seq,
        }
        for row in rows
    ]


def progress(
    answer: pb.DescribeClusterResponse | pb.ListSlotsResponse,
) -> dict[str, Any] | None:
    """How far forwarding has come; null before the first leader."""
    if not answer.HasField("progress"):
        return None
    row = answer.progress
    return {"due_ms": row.due_ms, "position": _if_set(row, "position", row.position)}


def slot_list(answer: pb.ListSlotsResponse) -> dict[str, Any]:
    """`delaywheel slots --json`."""
    return {
        "node": answer.node,
        "progress": progress(answer),
        "wheels": wheels(answer.wheels),
        "slots": [
            {
                "slot": row.slot,
                "messages": row.messages,
                "length_bytes": row.length_bytes,
                "frames": row.frames,
                "cancels": row.cancels,
                "wheels": row.wheels,
            }
            for row in answer.slots
        ],
        "next_slot": _if_set(answer, "next_slot", answer.next_slot),
    }


def stored_message(row: pb.StoredMessage, *, with_content: bool) -> dict[str, Any]:
    """One message of `delaywheel slot --json` and `delaywheel get --json`."""
    document: dict[str, Any] = {
        "handle": row.handle,
        "id": row.id.hex(),
        "due_ms": row.due_ms,
        "due": iso(row.due_ms),
        "topic": row.topic,
        "partition": _if_set(row, "partition", row.partition),
        "timestamp_ms": _if_set(row, "timestamp_ms", row.timestamp_ms),
        "accepted_at_ms": row.accepted_at_ms,
        "wheel": row.wheel,
        "seq": row.seq,
        "state": _state(pb.MessageState.Name(row.state), "MESSAGE_STATE_"),
        "key_length_bytes": row.key_length_bytes,
        "value_length_bytes": row.value_length_bytes,
        "headers_length_bytes": row.headers_length_bytes,
    }
    if with_content:
        document["key"] = _if_set(row, "key", _base64(row.key))
        document["value"] = _if_set(row, "value", _base64(row.value))
        document["headers"] = [
            {"name": header.name, "value": _if_set(header, "value", _base64(header.value))}
            for header in row.headers
        ]
    return document


def _if_set(message: Any, field: str, value: Any) -> Any:
    return value if message.HasField(field) else None


def _base64(content: bytes) -> str:
    return b64encode(content).decode()


def _state(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
