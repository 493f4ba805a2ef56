"""The JSON of reading commands, made from protocol messages, whose names it keeps.

Bytes are base64, null stays null; states are lower case; absent fields are null, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from delaywheel.ingress import id_to_send_again
from delaywheel.record_headers import HALF_DELIVER_AT, HALF_GROUP
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.printing.text import base64_of
from delaywheel_replica.quantities import iso


def cluster(answer: pb.DescribeClusterResponse) -> dict[str, Any]:
    """Returns the document of `delaywheel status --json`."""
    return {
        "cluster": answer.cluster_id,
        "node": answer.node,
        "version": answer.version,
        "now_ms": answer.now_ms,
        "kafka": answer.kafka or None,
        "leader": if_set(answer, "leader", _leader),
        "members": [_member(row) for row in answer.members],
        "min_insync": answer.min_insync,
        "wheels": wheels(answer.wheels),
        "progress": if_set(answer, "progress", _progress),
        "floor": if_set(answer, "floor"),
        "lateness_ms": if_set(answer, "lateness_ms"),
        "pending": if_set(answer, "pending", _pending),
        "refusing": if_set(answer, "refusing", _refusal),
        "levels": {level.name: level.delay_ms for level in answer.levels},
        "limits": {
            "span_seconds": answer.limits.span_seconds,
            "late_window_seconds": answer.limits.late_window_seconds,
            "max_message_bytes": answer.limits.max_message_bytes,
            "max_request_messages": answer.limits.max_request_messages,
            "max_request_bytes": answer.limits.max_request_bytes,
        },
    }


def _member(row: pb.Member) -> dict[str, Any]:
    return {
        "node": row.node,
        "address": row.address,
        "reachable": row.reachable,
        "accepting": row.accepting,
        "complete": row.complete,
        "storage_replaced": row.storage_replaced,
        "settings_differ": row.settings_differ or None,
        "silent": row.silent or None,
        "report": if_set(row, "report", _report),
    }


def _report(report: pb.MemberReport) -> dict[str, Any]:
    ledger = report.ledger
    return {
        "version": report.version,
        "now_ms": report.now_ms,
        "refusing": if_set(report, "refusing", _refusal),
        "role": report.role or None,
        "kafka_error": report.kafka_error or None,
        "server_started_ms": report.server_started_ms,
        "cleaner_started_ms": if_set(report, "cleaner_started_ms"),
        "elections": report.elections,
        "in_sync_changes": report.in_sync_changes,
        "ledger": {
            "place": ledger.place,
            "lag_frames": ledger.lag_frames,
            "failure": ledger.failure or None,
            "failing_since_ms": if_set(ledger, "failing_since_ms"),
            "gaps": ledger.gaps,
            "gap_messages": ledger.gap_messages,
        },
        "pending_messages": report.pending_messages,
        "pending_bytes": report.pending_bytes,
        "dead_letters": report.dead_letters,
        "unavailable_topics": list(report.unavailable_topics),
        "unavailable": [
            {
                "topic": each.topic,
                "partitions": list(each.partitions),
                "since_ms": each.since_ms,
                "cause": each.cause,
                "deferred_messages": each.deferred_messages,
            }
            for each in report.unavailable
        ],
        "verifying_wheels": report.verifying_wheels,
        "wheels": report.wheels,
        "unanswered_halves": [
            {"group": each.group, "letters": each.letters, "oldest_ms": each.oldest_ms}
            for each in report.unanswered_halves
        ],
        "ingress_lag": if_set(report, "ingress_lag"),
        "ingress_faults": list(report.ingress_faults),
        "floor_wait": if_set(report, "floor_wait", _floor_wait),
        "standstill": if_set(report, "standstill", _standstill),
        "unreadable_frames": report.unreadable_frames,
        "alone_messages": report.alone_messages,
        "missing_frames": report.missing_frames,
        "undeletable_files": report.undeletable_files,
        "undeletable_file": report.undeletable_file or None,
        "certificate_expires_ms": if_set(report, "certificate_expires_ms"),
        "certificate_fault": report.certificate_fault or None,
        "insecure": report.insecure or None,
        "unchecked": report.unchecked or None,
        "access_fault": report.access_fault or None,
        "access_differs": list(report.access_differs),
        "waiting_calls": {
            each.call: {"count": each.count, "longest_ms": each.longest_ms}
            for each in report.waiting_calls
        },
        "counts": if_set(report, "counts", _counts),
        "memory_kill": if_set(report, "memory_kill", _memory_kill),
        "quota_refusals": {each.principal: each.messages for each in report.quota_refusals},
        "disk": if_set(report, "disk", _disk),
    }


def _disk(disk: pb.DiskSpace) -> dict[str, Any]:
    return {"free_bytes": disk.free_bytes, "reserve_bytes": disk.reserve_bytes}


def _memory_kill(kill: pb.MemoryKill) -> dict[str, Any]:
    return {"process": kill.process, "at_ms": kill.at_ms}


def _counts(counts: pb.MemberCounts) -> dict[str, Any]:
    return {
        "accepted_messages": counts.accepted_messages,
        "acknowledged_messages": counts.acknowledged_messages,
        "accepted_cancels": counts.accepted_cancels,
        "refused_messages": {each.reason: each.messages for each in counts.refused_messages},
        "forwarded_messages": counts.forwarded_messages,
        "dead_letters": {each.reason: each.messages for each in counts.dead_letters},
        "lateness": if_set(counts, "lateness", _lateness),
        "halves": if_set(counts, "halves", _half_counts),
    }


def _half_counts(halves: pb.HalfCounts) -> dict[str, Any]:
    return {
        "asked": halves.asked,
        "committed": halves.committed,
        "rolled_back": halves.rolled_back,
        "undecided": halves.undecided,
    }


def _lateness(lateness: pb.LatenessHistogram) -> dict[str, Any]:
    return {
        "bounds_us": list(lateness.bounds_us),
        "counts": list(lateness.counts),
        "sum_us": lateness.sum_us,
    }


def _floor_wait(wait: pb.FloorWait) -> dict[str, Any]:
    return {"behind_seconds": wait.behind_seconds, "causes": list(wait.causes)}


def _standstill(standstill: pb.Standstill) -> dict[str, Any]:
    return {"since_ms": standstill.since_ms, "cause": standstill.cause}


def _refusal(error: pb.Error) -> dict[str, Any]:
    return {"reason": error.reason, "message": error.message}


def _leader(leader: pb.Leader) -> dict[str, Any]:
    return {"node": leader.node, "epoch": leader.epoch}


def _pending(pending: pb.Pending) -> dict[str, Any]:
    return {
        "messages": pending.messages,
        "length_bytes": pending.length_bytes,
        "node": pending.node,
        "at_least": pending.at_least,
    }


def set_back(answer: pb.SetBackResponse) -> dict[str, Any]:
    """Returns the document of `delaywheel clock set-back --json`."""
    return {
        "node": answer.node,
        "set_backs": answer.set_backs,
        "forwarded_to_ms": answer.forwarded_to_ms,
        "goes_on_from_ms": answer.goes_on_from_ms,
        "floor": answer.floor,
    }


def node_change(change: pb.NodeChange) -> dict[str, Any]:
    """Returns the document of `delaywheel node replace --json` and `node remove --json`."""
    return {
        "node": change.node,
        "storage_before": change.storage_before or None,
        "storage": change.storage or None,
        "wheels": [
            {
                "wheel": row.wheel,
                "frames_at_risk": row.frames,
                "alone_messages": row.alone_messages,
                "alone_on": row.alone_on or None,
            }
            for row in change.wheels
        ],
    }


def wheels(rows: Iterable[pb.WheelStatus]) -> list[dict[str, Any]]:
    """Returns the wheels of a cluster, or those of which a node has files."""
    return [
        {
            "wheel": row.wheel,
            "node": row.node,
            "state": _state(pb.WheelState.Name(row.state), "WHEEL_STATE_"),
            "applied_seq": row.applied_seq,
            "high_watermark": row.high_watermark,
            "in_sync": list(row.in_sync),
            "final_seq": if_set(row, "final_seq"),
            "progress_seq": row.progress_seq,
            "ledger_seq": row.ledger_seq,
            "told_by": row.told_by or None,
            "replicas": [_replica(replica) for replica in row.replicas],
        }
        for row in rows
    ]


def _replica(row: pb.Replica) -> dict[str, Any]:
    return {
        "node": row.node,
        "state": replica_state(row),
        "held_seq": if_set(row, "held_seq"),
        "lag_frames": if_set(row, "lag_frames"),
        "lag_ms": if_set(row, "lag_ms"),
        "told_ago_ms": if_set(row, "told_ago_ms"),
    }


def replica_state(row: pb.Replica) -> str:
    """Returns the state of a member's copy of a wheel."""
    return _state(pb.ReplicaState.Name(row.state), "REPLICA_STATE_")


def _progress(row: pb.Progress) -> dict[str, Any]:
    return {
        "due_ms": row.due_ms,
        "position": if_set(row, "position"),
        "set_backs": row.set_backs,
        "ahead_ms": if_set(row, "ahead_ms"),
    }


def slot_list(answer: pb.ListSlotsResponse) -> dict[str, Any]:
    """Returns the document of `delaywheel slots --json`."""
    return {
        "node": answer.node,
        "counted_by": list(answer.counted_by),
        "silent": [{"node": row.node, "why": row.why} for row in answer.silent],
        "progress": if_set(answer, "progress", _progress),
        "wheels": wheels(answer.wheels),
        "slots": [slot_row(row, answer.progress) for row in answer.slots],
        "next_slot": if_set(answer, "next_slot"),
    }


def pending(row: pb.SlotRow, progress: pb.Progress) -> int:
    """Returns how many messages of a second are pending, as the status counts them.

    A second is pending as a whole, until all of it is done. A cancel takes one message away; a
    message that was sent or cancelled twice is counted as two until its due.
    """
    done_slot = (progress.due_ms + 1) // 1000
    return 0 if row.slot < done_slot else max(0, row.messages - row.cancels)


def slot_row(row: pb.SlotRow, progress: pb.Progress) -> dict[str, Any]:
    """Returns one second of `delaywheel slots --json`, or one line of `--ndjson`."""
    return {
        "slot": row.slot,
        "pending": pending(row, progress),
        "messages": row.messages,
        "length_bytes": row.length_bytes,
        "frames": row.frames,
        "cancels": row.cancels,
        "wheels": row.wheels,
        "copies": row.copies,
    }


def stored_message(row: pb.StoredMessage, *, with_content: bool) -> dict[str, Any]:
    """Returns one message of `delaywheel slot --json` or `delaywheel get --json`.

    Of a message that may not be read it has `content_withheld` in place of the content.
    """
    document: dict[str, Any] = {
        "handle": row.handle,
        "id": row.id.hex(),
        "due_ms": row.due_ms,
        "due": iso(row.due_ms),
        "topic": row.topic,
        "partition": if_set(row, "partition"),
        "timestamp_ms": if_set(row, "timestamp_ms"),
        "accepted_at_ms": row.accepted_at_ms,
        "wheel": row.wheel,
        "seq": row.seq,
        "state": _state(pb.MessageState.Name(row.state), "MESSAGE_STATE_"),
        "dead_reason": row.dead_reason or None,
        "place": if_set(row, "place", _place),
        "rescheduled_to_ms": if_set(row, "rescheduled_to_ms"),
        "key_length_bytes": row.key_length_bytes,
        "value_length_bytes": row.value_length_bytes,
        "headers_length_bytes": row.headers_length_bytes,
    }
    if with_content and row.content_withheld:
        document["content_withheld"] = True
    elif with_content:
        document["key"] = if_set(row, "key", base64_of)
        document["value"] = if_set(row, "value", base64_of)
        document["headers"] = [
            {"name": header.name, "value": if_set(header, "value", base64_of)}
            for header in row.headers
        ]
        document["half"] = half(row)
    return document


def half(row: pb.StoredMessage) -> dict[str, Any] | None:
    """Returns what a half message is beside its content, which must be given; None if it is none.

    Its due is the end of its hold; `deliver_at_ms` is its own, None if that is its commit.
    """
    headers = {header.name: header.value for header in row.headers}
    if HALF_GROUP not in headers:
        return None
    own = headers.get(HALF_DELIVER_AT)
    return {
        "group": headers[HALF_GROUP].decode(errors="replace"),
        "deliver_at_ms": None if own is None else int(own),
    }


def message_line(row: pb.StoredMessage) -> dict[str, Any]:
    """Returns one line of `delaywheel export`, which `produce --jsonl` takes.

    The value is in each, null or not; other fields are left out if they are not set.
    """
    line: dict[str, Any] = {
        "handle": row.handle,
        "topic": row.topic,
        "id": id_to_send_again(row.id).hex(),
        "at": row.due_ms,
        **(_text_or_base64("key", row.key) if row.HasField("key") else {}),
        **_text_or_base64("value", if_set(row, "value")),
    }
    for name in ("partition", "timestamp_ms"):
        if row.HasField(name):
            line[name] = getattr(row, name)
    if row.headers:
        line["headers"] = [
            (header.name, _header_text(if_set(header, "value"))) for header in row.headers
        ]
    return line


def _text_or_base64(name: str, content: bytes | None) -> dict[str, str | None]:
    if content is None:
        return {name: None}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64_of(content)}


def _header_text(content: bytes | None) -> Any:
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64_of(content)}


def cancelled_many(row: pb.CancelManyResponse, *, dry_run: bool) -> dict[str, Any]:
    """Returns the document of `delaywheel cancel --json` for many messages."""
    unspecified = "pending" if dry_run else "unknown"
    return {
        "dry_run": dry_run,
        "messages": [
            {
                "handle": each.handle,
                "due_ms": each.due_ms,
                "topic": each.topic,
                "outcome": _state(pb.CancelOutcome.Name(each.outcome), "CANCEL_OUTCOME_")
                if each.outcome
                else unspecified,
                "cancelled_before": each.cancelled_before,
            }
            for each in row.results
        ],
        "halves": row.halves,
        "looked": looked(row.looked),
    }


def looked(row: pb.Looked) -> dict[str, Any]:
    """Returns the `looked` of `delaywheel search --json`."""
    return {
        "node": row.node,
        "messages": row.messages,
        "length_bytes": row.length_bytes,
        "to_slot": if_set(row, "to_slot"),
        "incomplete": row.incomplete,
    }


def _place(place: pb.KafkaPlace) -> dict[str, Any]:
    return {"topic": place.topic, "partition": place.partition, "offset": place.offset}


def if_set(message: Any, field: str, shape: Callable[[Any], Any] | None = None) -> Any:
    """Returns a field, in its shape if it has one; null if it is not set."""
    if not message.HasField(field):
        return None
    value = getattr(message, field)
    return value if shape is None else shape(value)


def _state(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
