"""The panels of the board, in rows, and the metrics that are on none.

What is the leader's is the greatest of all nodes': others say 0, or what they knew when they led.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from local.monitoring.queries import OF, each, greatest, quantile, rate, total


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over time.

    Attributes:
        title: What they show.
        unit: Grafana's name of it.
        section: The heading of the runbook that says what to do.
        queries: PromQL by legend, in which {{label}} is a label's value.
    """

    title: str
    unit: str
    section: str
    queries: Mapping[str, str]


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Delivery": (
        Panel(
            "Since when nothing due is undone",
            "s",
            "Nothing is forwarded",
            {
                "progress": f"time() - {greatest('progress_timestamp_seconds')}",
                "oldest overdue": greatest("overdue_seconds"),
            },
        ),
        Panel(
            "Lateness",
            "s",
            "Lateness grows",
            {f"p{100 * of:g}": quantile(of, "lateness_seconds") for of in (0.5, 0.99, 0.999)},
        ),
        Panel(
            "What becomes of messages, a second",
            "short",
            "Lateness grows",
            {
                "forwarded": rate("forwarded_messages_total"),
                "cancelled": rate("cancelled_messages_total"),
                "deferred": rate("deferred_messages_total"),
                "retries dropped": rate("duplicate_messages_total"),
                "lost frames": rate("lost_frames_total"),
            },
        ),
        Panel(
            "Forwarded by topic, a second",
            "short",
            "Lateness grows",
            {"{{topic}}": rate("topic_forwarded_messages_total", "topic")},
        ),
        Panel(
            "Dead letters a second",
            "short",
            "Dead letters grow",
            {
                "{{reason}}": rate("dead_letters_total", "reason"),
                "to {{topic}}": rate("topic_dead_letters_total", "topic"),
                "topics that take nothing": greatest("unavailable_topics"),
            },
        ),
        Panel(
            "Transactions",
            "s",
            "Kafka throttles",
            {
                "p50": quantile(0.5, "commit_duration_seconds"),
                "p99": quantile(0.99, "commit_duration_seconds"),
                "throttled, of a second": rate("kafka_throttled_seconds_total"),
            },
        ),
        Panel(
            "Transactions a second",
            "short",
            "Kafka is away",
            {
                "committed": rate("commits_total"),
                "not committed": rate("failed_commits_total"),
            },
        ),
        Panel(
            "What Kafka refuses the leader",
            "short",
            "No leader is elected",
            {
                "errors": greatest("kafka_error"),
                "warnings": greatest("kafka_warnings"),
                "frames that cannot be read": greatest("unreadable_frames"),
            },
        ),
    ),
    "Acceptance": (
        Panel(
            "Messages taken, a second",
            "short",
            "A node takes no messages",
            {
                "acknowledged": rate("acknowledged_messages_total"),
                "written by {{instance}}": rate("accepted_messages_total", "instance"),
                "unchecked ids": rate("unchecked_ids_total"),
            },
        ),
        Panel(
            "Accepted by topic, a second",
            "short",
            "A node takes no messages",
            {"{{topic}}": rate("topic_accepted_messages_total", "topic")},
        ),
        Panel(
            "Whether nodes take messages",
            "short",
            "A node takes no messages",
            {
                "{{instance}} ready": each("ready"),
                "{{instance}} refuses: {{reason}}": each("refusing"),
            },
        ),
        Panel(
            "Refused, a second",
            "short",
            "A node takes no messages",
            {
                "messages: {{reason}}": rate("refused_messages_total", "reason"),
                "{{call}}: {{reason}}": rate("refused_calls_total", "call", "reason"),
            },
        ),
        Panel(
            "Time to acknowledge",
            "s",
            "The disk hangs",
            {
                f"p{100 * of:g}": quantile(of, "acknowledgement_duration_seconds")
                for of in (0.5, 0.99)
            },
        ),
        Panel(
            "Time of calls, p99",
            "s",
            "Cancels are slow",
            {
                "{{call}}": quantile(0.99, "call_duration_seconds", "call"),
                "{{call}} under way": greatest("call_age_seconds", "call"),
            },
        ),
        Panel(
            "Cancels",
            "short",
            "Cancels are slow",
            {
                "accepted a second": rate("accepted_cancels_total"),
                "undecided": total("pending_cancels"),
                "first waits, s": greatest("cancel_queue_age_seconds"),
                "in {{stage}}, of a second": rate("cancel_stage_seconds_total", "stage"),
            },
        ),
        Panel(
            "Ids in memory for look-ups",
            "bytes",
            "Cancels are slow",
            {
                "{{instance}}": each("lookup_index_bytes"),
                "seconds of {{instance}}": each("lookup_index_slots"),
                "read a second": rate("lookup_index_reads_total"),
            },
        ),
        Panel(
            "Writing, a second",
            "short",
            "The disk hangs",
            {
                "groups": rate("written_groups_total"),
                "frames": rate("written_frames_total"),
                "bytes": rate("written_bytes_total"),
            },
        ),
        Panel(
            "Requests in memory",
            "bytes",
            "A node takes no messages",
            {"{{instance}}": each("in_flight_bytes")},
        ),
    ),
    "Cluster": (
        Panel(
            "Who leads",
            "short",
            "No leader is elected",
            {"{{instance}} {{role}}": f"{each('role')} > 0"},
        ),
        Panel(
            "Elections",
            "short",
            "Leaders change often",
            {
                "elections an hour": f"sum (increase(delaywheel_elections_total{OF}[1h]))",
                "begin of the term, offset": greatest("leader_epoch"),
            },
        ),
        Panel(
            "Members in sync",
            "short",
            "Copies are missing",
            {
                "{{instance}}": each("in_sync_members"),
                "needed": greatest("min_in_sync_members"),
                "members": greatest("members"),
                "changes a second": rate("in_sync_changes_total"),
            },
        ),
        Panel(
            "Frames behind",
            "short",
            "Copies are missing",
            {
                "{{peer}} of {{instance}}": each("peer_lag_frames"),
                "{{instance}} of {{peer}}": each("mirror_lag_frames"),
                "not held by enough: {{instance}}": each("high_watermark_lag_frames"),
            },
        ),
        Panel(
            "Missing copies",
            "short",
            "Copies are missing",
            {
                "missing frames of {{instance}}": each("missing_frames"),
                "on one node alone": total("alone_messages"),
                "{{instance}} is complete": each("complete"),
                "{{instance}}: {{reason}}": each("folder_refused"),
            },
        ),
        Panel(
            "Peers",
            "short",
            "Nodes refuse each other",
            {
                "{{instance}} to {{peer}} connected": each("peer_connected"),
                "{{instance}} and {{peer}}: {{reason}}": each("peer_refused"),
                "{{instance}} and {{peer}} differ": each("peer_settings_differ"),
                "breaks a second": rate("peer_breaks_total"),
            },
        ),
        Panel(
            "Since peers were heard",
            "s",
            "Nodes refuse each other",
            {"{{peer}} by {{instance}}": each("peer_heard_age_seconds")},
        ),
        Panel(
            "Between nodes, a second",
            "short",
            "Nodes refuse each other",
            {
                "messages sent": rate("peer_sent_messages_total"),
                "bytes sent": rate("peer_sent_bytes_total"),
                "messages received": rate("peer_received_messages_total"),
                "bytes received": rate("peer_received_bytes_total"),
                "dropped": rate("peer_dropped_messages_total"),
            },
        ),
        Panel(
            "What no node can mean, a second",
            "short",
            "A node says what cannot be",
            {
                "malformed, of {{peer}}": rate("peer_malformed_messages_total", "peer"),
                "implausible": rate("implausible_beats_total"),
            },
        ),
    ),
    "Ingress": (
        Panel(
            "Ingress records, a second",
            "short",
            "Ingress topics are not taken",
            {
                "announced": rate("ingress_announced_records_total"),
                "handed over: {{answer}}": rate("ingress_handed_records_total", "answer"),
                "settled offsets": rate("ingress_settled_offsets_total"),
                "held": rate("ingress_held_records_total"),
                "forwarded": rate("ingress_forwarded_records_total"),
                "dead letters": rate("ingress_dead_letters_total"),
                "deleted before they were read": rate("ingress_deleted_offsets_total"),
                "cut off": rate("ingress_cut_off_offsets_total"),
            },
        ),
        Panel(
            "Not settled",
            "short",
            "Ingress topics are not taken",
            {
                "all": greatest("ingress_lag_offsets"),
                "{{partition}}": greatest("ingress_partition_lag_offsets", "partition"),
            },
        ),
        Panel(
            "Partitions",
            "short",
            "Ingress topics are not taken",
            {
                "read": greatest("ingress_partitions"),
                "cut off": greatest("ingress_cut_off_partitions"),
                "behind an open transaction": greatest("ingress_open_transaction_partitions"),
                "faults": greatest("ingress_faults"),
            },
        ),
        Panel(
            "Memory of records",
            "bytes",
            "Ingress topics are not taken",
            {"leader": greatest("ingress_held_bytes")},
        ),
    ),
    "Half messages": (
        Panel(
            "Half messages, a second",
            "short",
            "Half messages wait for their checker",
            {
                "asked about": rate("asked_halves_total"),
                "answered: {{answer}}": rate("answered_halves_total", "answer"),
                "committed, due later": rate("passed_on_halves_total"),
            },
        ),
        Panel(
            "Letters that no checker has read",
            "short",
            "Half messages wait for their checker",
            {
                "{{group}}": greatest("unanswered_halves", "group"),
                "{{group}}, first waits, s": greatest("unanswered_halves_age_seconds", "group"),
            },
        ),
    ),
    "Disk and ledger": (
        Panel(
            "Pending messages by when they are due",
            "short",
            "Lateness grows",
            {"{{horizon}}": greatest("pending_messages", "horizon")},
        ),
        Panel(
            "Bytes of them",
            "bytes",
            "The disk is full",
            {"{{horizon}}": greatest("pending_bytes", "horizon")},
        ),
        Panel(
            "Pending by topic",
            "short",
            "The disk is full",
            {"{{topic}}": total("topic_pending_messages", "topic")},
        ),
        Panel(
            "Free space",
            "bytes",
            "The disk is full",
            {
                "{{instance}}": each("disk_free_bytes"),
                "reserve": greatest("disk_reserve_bytes"),
                "size of {{instance}}": each("disk_size_bytes"),
            },
        ),
        Panel(
            "Files",
            "short",
            "The disk is full",
            {
                "{{instance}} may make": each("disk_free_inodes"),
                "{{instance}} cannot delete": each("undeletable_files"),
                "slots open in {{instance}}": each("open_slot_files"),
                "slots at most": greatest("max_slot_files"),
            },
        ),
        Panel(
            "What may be deleted",
            "s",
            "Nothing is deleted",
            {
                "floor behind": greatest("floor_behind_seconds"),
                "floor, ago": f"time() - {greatest('floor_timestamp_seconds')}",
            },
        ),
        Panel(
            "Wheels",
            "short",
            "Nothing is deleted",
            {
                "{{instance}} {{role}}": each("wheels"),
                "registered, {{state}}": greatest("registered_wheels", "state"),
            },
        ),
        Panel(
            "Ledger",
            "short",
            "The ledger is not published",
            {
                "frames of {{instance}} not in it": each("ledger_lag_frames"),
                "{{instance}} fails for, s": each("ledger_failing_seconds"),
                "gaps a second": rate("ledger_gaps_total"),
                "messages in gaps, a second": rate("ledger_gap_messages_total"),
            },
        ),
        Panel(
            "Published, a second",
            "short",
            "The ledger is not published",
            {
                "files": rate("ledger_files_total"),
                "messages": rate("ledger_messages_total"),
            },
        ),
    ),
    "Security": (
        Panel(
            "Certificates and rights",
            "short",
            "A certificate or a file of rights is refused",
            {
                "certificate of {{instance}}, days": (
                    f"({each('certificate_expiry_seconds')} - time()) / 86400"
                ),
                "certificate refused: {{instance}}": each("certificate_refused"),
                "rights refused: {{instance}}": each("access_file_refused"),
                "{{instance}} and {{peer}} have other rights": each("access_differs"),
            },
        ),
        Panel(
            "Quotas, a second",
            "short",
            "A node takes no messages",
            {
                "messages of {{principal}}": rate("quota_messages_total", "principal"),
                "bytes of {{principal}}": rate("quota_bytes_total", "principal"),
                "refused {{principal}}": rate("quota_refused_messages_total", "principal"),
            },
        ),
    ),
    "Processes": (
        Panel(
            "CPU, of one core",
            "percentunit",
            "Lateness grows",
            {"{{instance}} {{process}}": rate("process_cpu_seconds_total", "instance", "process")},
        ),
        Panel(
            "Memory",
            "bytes",
            "The node does not start",
            {"{{instance}} {{process}}": each("process_resident_memory_bytes")},
        ),
        Panel(
            "Age of status, and of processes",
            "s",
            "The disk hangs",
            {
                "status, {{instance}} {{process}}": each("row_age_seconds"),
                "{{instance}} {{process}}": f"time() - {each('process_start_time_seconds')}",
            },
        ),
        Panel(
            "Lag of the event loop",
            "s",
            "Lateness grows",
            {
                "p99": quantile(0.99, "loop_lag_seconds"),
                "greatest of {{instance}}": each("loop_lag_max_seconds"),
            },
        ),
        Panel(
            "Descriptors",
            "short",
            "A node takes no messages",
            {
                "{{instance}} {{process}}": each("process_open_fds"),
                "sockets, {{instance}} {{process}}": each("process_open_sockets"),
                "at most": greatest("process_max_fds"),
                "callers' connections at most": greatest("max_caller_connections"),
            },
        ),
    ),
}

ON_NONE: Mapping[str, str] = {
    "delaywheel_build_info": "the board's choice of cluster and nodes is made of it",
}
"""Metrics that no panel shows, and why."""


def panels() -> Iterator[Panel]:
    """Yields all panels."""
    for row in ROWS.values():
        yield from row
