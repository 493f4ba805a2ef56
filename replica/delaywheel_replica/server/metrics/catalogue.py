"""All metrics of a node; docs/OPERATIONS.md lists them, and a test compares the two.

No state is kept here: a scrape gathers the facts and converts them to Prometheus's form. Counters
start from zero with the counting process, as `delaywheel_process_start_time_seconds` shows.
"""

from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from delaywheel_replica.server.metrics.facts import Facts
from delaywheel_replica.server.metrics.metric import (
    Spec,
    Values,
    by_label,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
)
from delaywheel_replica.server.metrics.of_books import BOOKS_METRICS
from delaywheel_replica.server.metrics.of_cleaner import CLEANER_METRICS
from delaywheel_replica.server.metrics.of_peers import PEER_METRICS


class Collected(Collector):
    """The metrics of one scrape."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics that apply."""
        for spec in METRICS:
            family = spec.family(self._facts)
            if family is not None:
                yield family


def _ages(facts: Facts) -> Values:
    rows = {"server": facts.server, "cleaner": facts.cleaner}
    return by_label(
        {
            process: None if row is None else max(0, facts.monotonic_ms - row.monotonic_ms) / 1e3
            for process, row in rows.items()
        }
    )


def _starts(facts: Facts) -> Values:
    cleaner = facts.cleaner
    return by_label(
        {
            "server": facts.started_s,
            "cleaner": None if cleaner is None else cleaner.started_ms / 1e3,
        }
    )


def _refusing(facts: Facts) -> Values:
    return [] if facts.refusal is None else [((facts.refusal.reason.value,), 1)]


def _refused_calls(facts: Facts) -> Values:
    refused = facts.counts.refused_calls.copy()
    return [((call, reason.value), calls) for (call, reason), calls in refused.items()]


_NODE: tuple[Spec, ...] = (
    gauges(
        "build_info",
        "1, with the node, its cluster and its release.",
        ("cluster", "node", "version"),
        lambda f: [((f.cluster, f.node, version("delaywheel")), 1)],
    ),
    gauge(
        "ready", "1 while new messages are accepted, else 0.", lambda f: float(f.refusal is None)
    ),
    gauges(
        "refusing",
        "1 for the reason why new messages are refused now.",
        ("reason",),
        _refusing,
    ),
    gauge(
        "complete",
        "1 while the node holds all that it ever acknowledged, else 0.",
        lambda f: None if f.server is None else float(f.server.heartbeat.complete),
    ),
    gauges(
        "row_age_seconds",
        "How long ago a process wrote its status; the server does so ten times a second, the"
        " cleaner at least four times.",
        ("process",),
        _ages,
    ),
)

_ACCEPTING: tuple[Spec, ...] = (
    counter(
        "accepted_messages",
        "Messages written into this node's own wheels; a retry counts again.",
        lambda f: f.counts.messages,
    ),
    counter(
        "acknowledged_messages",
        "Messages acknowledged to their callers: enough members hold them.",
        lambda f: f.counts.acknowledged,
    ),
    counters(
        "topic_accepted_messages",
        "Accepted messages by topic.",
        ("topic",),
        lambda f: by_label(f.counts.topics.read()),
    ),
    histogram(
        "acknowledgement_duration_seconds",
        "Time from a whole request to its answer, of requests with acknowledged messages.",
        lambda f: f.counts.answer_times.read(),
    ),
    counters(
        "refused_messages",
        "Messages answered with a reason instead.",
        ("reason",),
        lambda f: [((reason.value,), n) for reason, n in f.counts.refused.items()],
    ),
    counters(
        "refused_calls",
        "Calls, and requests of streams, refused as a whole.",
        ("call", "reason"),
        _refused_calls,
    ),
    counter(
        "accepted_cancels",
        "Cancels written into this node's own wheels.",
        lambda f: f.counts.cancels,
    ),
    counters(
        "ingress_handed_records",
        "Records of ingress topics that the node's cleaner handed over, by what it was answered.",
        ("answer",),
        lambda f: [((answer.name.lower(),), n) for answer, n in f.counts.handed.items()],
    ),
    counter("written_groups", "Groups of requests written together.", lambda f: f.counts.groups),
    counter("written_frames", "Frames written into own wheels.", lambda f: f.counts.frames),
    counter(
        "written_bytes", "Bytes of frames written into own wheels.", lambda f: f.counts.frame_bytes
    ),
    gauge(
        "in_flight_bytes",
        "Bytes of requests that are not answered, and of answers that are not read yet.",
        lambda f: f.in_flight_bytes,
    ),
    gauges(
        "pending_messages",
        "Messages on this node's disk that are not done, by how far ahead they are due.",
        ("horizon",),
        lambda f: [((p.horizon,), p.messages) for p in f.pending],
    ),
    gauges(
        "topic_pending_messages",
        "Messages that this node accepted and that are not done, by topic.",
        ("topic",),
        lambda f: by_label(f.pending_by_topic),
    ),
    gauges(
        "pending_bytes",
        "Bytes of their frames.",
        ("horizon",),
        lambda f: [((p.horizon,), p.length_bytes) for p in f.pending],
    ),
)

_MACHINE: tuple[Spec, ...] = (
    histogram(
        "loop_lag_seconds",
        "How late a timer of the server's event loop came, ten times a second.",
        lambda f: f.loop_lags,
    ),
    gauge(
        "loop_lag_max_seconds",
        "The greatest such lag of the last minute.",
        lambda f: f.greatest_lag_us / 1e6,
    ),
    gauge("open_slot_files", "Slot files kept open for writing.", lambda f: f.open_slot_files),
    gauge("max_slot_files", "How many slot files may be kept open.", lambda f: f.max_slot_files),
    gauge(
        "max_caller_connections",
        "How many connections of callers there may be. One more is closed as soon as it is made.",
        lambda f: f.max_caller_connections,
    ),
    gauge("disk_size_bytes", "Size of the data folder's file system.", lambda f: f.disk.size_bytes),
    gauge("disk_free_bytes", "Space left on it for this node.", lambda f: f.disk.free_bytes),
    gauge(
        "disk_reserve_bytes",
        "With less free space new messages are refused.",
        lambda f: f.disk.reserve_bytes,
    ),
    gauge("disk_free_inodes", "Files that can still be made on it.", lambda f: f.disk.free_inodes),
    gauges(
        "process_start_time_seconds",
        "When a process started, Unix time: its counters begin then.",
        ("process",),
        _starts,
    ),
    counters(
        "process_cpu_seconds",
        "CPU time that a process used.",
        ("process",),
        lambda f: [((name,), p.cpu_s) for name, p in f.processes.items()],
    ),
    gauges(
        "process_resident_memory_bytes",
        "Memory that a process has, shared pages included.",
        ("process",),
        lambda f: [((name,), p.resident_bytes) for name, p in f.processes.items()],
    ),
    gauges(
        "process_open_fds",
        "Descriptors that a process has in use.",
        ("process",),
        lambda f: [((name,), p.open_fds) for name, p in f.processes.items()],
    ),
    gauges(
        "process_open_sockets",
        "Those of them that are sockets: of the server nearly all are callers' connections.",
        ("process",),
        lambda f: [((name,), p.open_sockets) for name, p in f.processes.items()],
    ),
    gauges(
        "process_max_fds",
        "How many it may have.",
        ("process",),
        lambda f: by_label({name: p.max_fds for name, p in f.processes.items()}),
    ),
)

METRICS: tuple[Spec, ...] = (
    _NODE + _ACCEPTING + BOOKS_METRICS + PEER_METRICS + CLEANER_METRICS + _MACHINE
)
