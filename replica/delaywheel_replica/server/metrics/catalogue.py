"""All metrics of a node; docs/METRICS.md lists them, and a test compares the two.

No state is kept here: a scrape reads what the node knows, in Prometheus's form. Counters start from
zero with the counting process, as `delaywheel_process_start_time_seconds` shows.
"""

from collections.abc import Callable, Iterator
from importlib.metadata import version

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from delaywheel.reasons import Reason
from delaywheel_replica.core.leader.registration import RegistrationRefusal
from delaywheel_replica.core.protocol.control import ROLLED_BACK
from delaywheel_replica.server.metrics.metric import (
    Spec,
    Value,
    Values,
    by_label,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
    histograms,
)
from delaywheel_replica.server.metrics.of_cleaner import CLEANER_METRICS
from delaywheel_replica.server.metrics.of_peers import PEER_METRICS
from delaywheel_replica.server.metrics.processes import Process
from delaywheel_replica.server.metrics.scrape import CLEANER, SERVER, Scrape
from delaywheel_replica.server.node.node_view import ledger_lag_frames, storage_is_replaced


class Collected(Collector):
    """The metrics of one scrape."""

    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics that apply."""
        for spec in METRICS:
            family = spec.family(self._scrape)
            if family is not None:
                yield family


def _ages(scrape: Scrape) -> Values:
    rows = {SERVER: scrape.server, CLEANER: scrape.cleaner}
    return by_label(
        {
            process: None if row is None else max(0, scrape.monotonic_ms - row.monotonic_ms) / 1e3
            for process, row in rows.items()
        }
    )


def _starts(scrape: Scrape) -> Values:
    cleaner = scrape.cleaner
    return by_label(
        {
            SERVER: scrape.sources.started_s,
            CLEANER: None if cleaner is None else cleaner.started_ms / 1e3,
        }
    )


def _refused_folder(scrape: Scrape) -> Values:
    if scrape.server is None:
        return []
    own = scrape.server.heartbeat
    if own.storage == ROLLED_BACK:
        return [((Reason.STORAGE_ROLLED_BACK.value,), 1)]
    if storage_is_replaced(scrape.cleaner, own.node, own.storage):
        return [((RegistrationRefusal.STORAGE_REPLACED.value,), 1)]
    return []


def _of_processes(value: Callable[[Process], Value]) -> Callable[[Scrape], Values]:
    return lambda scrape: by_label({name: value(p) for name, p in scrape.processes.items()})


def _ledger_failing_s(scrape: Scrape) -> float:
    since_ms = scrape.books.failing_since_ms
    return 0 if since_ms is None else max(0, scrape.wall_ms - since_ms) / 1e3


_NODE: tuple[Spec, ...] = (
    gauges(
        "build_info",
        "1, with the node, its cluster and its release.",
        ("cluster", "node", "version"),
        lambda s: [
            ((s.sources.config.cluster_id, s.sources.config.node_id, version("delaywheel")), 1)
        ],
    ),
    gauge(
        "ready", "1 while new messages are accepted, else 0.", lambda s: float(s.refusal is None)
    ),
    gauges(
        "refusing",
        "1 for the reason why new messages are refused now.",
        ("reason",),
        lambda s: [] if s.refusal is None else [((s.refusal.reason.value,), 1)],
    ),
    gauges(
        "folder_refused",
        "1 for the reason why the node's data folder does not count: it is not the registered one,"
        " or an older copy of it.",
        ("reason",),
        _refused_folder,
    ),
    gauge(
        "complete",
        "1 while the node holds all that it ever acknowledged, else 0.",
        lambda s: None if s.server is None else float(s.server.heartbeat.complete),
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
        lambda s: s.sources.counts.messages,
    ),
    counter(
        "acknowledged_messages",
        "Messages acknowledged to their callers: enough members hold them.",
        lambda s: s.sources.counts.acknowledged,
    ),
    counters(
        "topic_accepted_messages",
        "Accepted messages by topic.",
        ("topic",),
        lambda s: by_label(s.sources.counts.topics.read()),
    ),
    histogram(
        "acknowledgement_duration_seconds",
        "Time from a whole request to its answer, of requests with acknowledged messages.",
        lambda s: s.sources.counts.answer_times.read(),
    ),
    counters(
        "refused_messages",
        "Messages answered with a reason instead.",
        ("reason",),
        lambda s: [((reason.value,), n) for reason, n in s.sources.counts.refused.copy().items()],
    ),
    counter(
        "unchecked_ids",
        "Messages whose senders asked whether their ids had been used before, and which were taken"
        " without an answer to that: it was not known in time, or not with certainty.",
        lambda s: s.sources.counts.unchecked_ids,
    ),
    counters(
        "refused_calls",
        "Calls, and requests of streams, refused as a whole.",
        ("call", "reason"),
        lambda s: [
            ((call, reason.value), calls)
            for (call, reason), calls in s.sources.counts.refused_calls.copy().items()
        ],
    ),
    counters(
        "quota_messages",
        "Messages that principals with a quota sent, cancelled, rescheduled and committed.",
        ("principal",),
        lambda s: by_label(s.sources.access.spending.messages.read()),
    ),
    counters(
        "quota_bytes",
        "Bytes of their requests.",
        ("principal",),
        lambda s: by_label(s.sources.access.spending.length_bytes.read()),
    ),
    counters(
        "quota_refused_messages",
        "Messages and questions that were refused since their principal had sent too many.",
        ("principal",),
        lambda s: by_label(s.sources.access.spending.refused.read()),
    ),
    counter(
        "accepted_cancels",
        "Cancels written into this node's own wheels.",
        lambda s: s.sources.counts.cancels,
    ),
    histograms(
        "call_duration_seconds",
        "Time of gets, pages of searches, and cancels and reschedules of a message (as the leader's"
        " node), by what came of it or the reason for no answer.",
        ("call", "outcome"),
        lambda s: s.sources.counts.calls.read().items(),
    ),
    counters(
        "cancel_stage_seconds",
        "Time that messages to be cancelled spent in each stage, all together: queued; looked_up;"
        " written, until enough members hold the cancel; taken, until a transaction has passed it;"
        " confirmed, by a second look.",
        ("stage",),
        lambda s: [
            ((stage,), ms / 1e3) for stage, ms in s.sources.counts.cancel_stages.copy().items()
        ],
    ),
    gauge(
        "pending_cancels",
        "Messages whose cancel is not decided.",
        lambda s: s.sources.counts.cancel_load()[0],
    ),
    gauge(
        "cancel_queue_age_seconds",
        "How long the first of them waits to be looked up.",
        lambda s: s.sources.counts.cancel_load()[2] / 1e3,
    ),
    gauges(
        "call_age_seconds",
        "How long the first of the calls of a kind is under way; of cancels, the first message.",
        ("call",),
        lambda s: [
            ((call,), age_ms / 1e3) for call, (_, age_ms) in s.sources.counts.waiting().items()
        ],
    ),
    gauge(
        "lookup_index_slots",
        "Seconds whose ids are in memory, because callers asked about them.",
        lambda s: s.sources.counts.lookup_index()[0],
    ),
    gauge(
        "lookup_index_bytes",
        "About what these ids take.",
        lambda s: s.sources.counts.lookup_index()[1],
    ),
    counter(
        "lookup_index_reads",
        "Seconds that were read as a whole for it: the first time, and again if they were dropped.",
        lambda s: s.sources.counts.lookup_index()[2],
    ),
    counters(
        "ingress_handed_records",
        "Records of ingress topics that the node's cleaner handed over, by what it was answered.",
        ("answer",),
        lambda s: [
            ((answer.name.lower(),), n) for answer, n in s.sources.counts.handed.copy().items()
        ],
    ),
    counter(
        "written_groups", "Groups of requests written together.", lambda s: s.sources.counts.groups
    ),
    counter("written_frames", "Frames written into own wheels.", lambda s: s.sources.counts.frames),
    counter(
        "written_bytes",
        "Bytes of frames written into own wheels.",
        lambda s: s.sources.counts.frame_bytes,
    ),
    gauge(
        "in_flight_bytes",
        "Bytes of requests that are not answered, and of answers that are not read yet.",
        lambda s: s.sources.in_flight_bytes(),
    ),
    gauges(
        "pending_messages",
        "Messages on this node's disk that are not done, by how far ahead they are due.",
        ("horizon",),
        lambda s: [((p.horizon,), p.messages) for p in s.pending],
    ),
    gauge(
        "alone_messages",
        "Those of them that no other node has, until they are copied after disks were replaced.",
        lambda s: s.alone_messages,
    ),
    gauges(
        "topic_pending_messages",
        "Messages that this node accepted and that are not done, by topic.",
        ("topic",),
        lambda s: by_label(s.pending_by_topic),
    ),
    gauges(
        "pending_bytes",
        "Bytes of their frames.",
        ("horizon",),
        lambda s: [((p.horizon,), p.length_bytes) for p in s.pending],
    ),
)

_LEDGER: tuple[Spec, ...] = (
    gauge(
        "ledger_lag_frames",
        "Frames of own wheels that are not in the published ledger yet.",
        lambda s: None if s.server is None else ledger_lag_frames(s.server.heartbeat),
    ),
    gauge(
        "ledger_failing_seconds",
        "For how long every attempt to publish the ledger has failed; 0: the last one did not.",
        _ledger_failing_s,
    ),
    counter("ledger_files", "Files of the ledger put in place.", lambda s: s.books.files),
    counter("ledger_messages", "Messages in these files.", lambda s: s.books.rows),
    counter(
        "ledger_gaps",
        "Times that rows of the ledger were given up, or could no longer be read.",
        lambda s: s.books.gaps,
    ),
    counter("ledger_gap_messages", "Messages in these gaps.", lambda s: s.books.gap_messages),
)

_MACHINE: tuple[Spec, ...] = (
    histogram(
        "loop_lag_seconds",
        "How late a timer of the server's event loop came, five times a second.",
        lambda s: s.sources.pulse.lags.read(),
    ),
    gauge(
        "loop_lag_max_seconds",
        "The greatest such lag of the last minute.",
        lambda s: s.sources.pulse.greatest_lag_us / 1e6,
    ),
    gauge("open_slot_files", "Slot files kept open for writing.", lambda s: len(s.sources.handles)),
    gauge(
        "max_slot_files",
        "How many slot files may be kept open.",
        lambda s: s.sources.handles.capacity,
    ),
    gauge(
        "max_caller_connections",
        "How many connections of callers there may be. One more is closed as soon as it is made.",
        lambda s: s.sources.max_caller_connections,
    ),
    gauge("disk_size_bytes", "Size of the data folder's file system.", lambda s: s.disk.size_bytes),
    gauge("disk_free_bytes", "Space left on it for this node.", lambda s: s.disk.free_bytes),
    gauge(
        "disk_reserve_bytes",
        "With less free space new messages are refused.",
        lambda s: s.disk.reserve_bytes,
    ),
    gauge("disk_free_inodes", "Files that can still be made on it.", lambda s: s.disk.free_inodes),
    gauge(
        "undeletable_files",
        "Finished files that it refuses to delete; each is tried again, ever less often.",
        lambda s: len(s.sources.undeletable.paths),
    ),
    gauge(
        "certificate_expiry_seconds",
        "When the certificate that callers are shown expires, Unix time.",
        lambda s: None if (c := s.sources.certificates) is None else c.current.not_after_s,
    ),
    gauge(
        "certificate_refused",
        "1 while the certificate on the disk is not in order, and an earlier one is shown.",
        lambda s: None if (c := s.sources.certificates) is None else c.refused is not None,
    ),
    gauge(
        "access_file_refused",
        "1 while the file of grants or tokens on the disk is not in order, and earlier ones count.",
        lambda s: float(a.refused is not None) if (a := s.sources.access).is_limited else None,
    ),
    gauges(
        "access_differs",
        "1 for a peer that has had other grants or tokens than this node for some seconds.",
        ("peer",),
        lambda s: [((peer,), 1) for peer in s.sources.same_access.differing],
    ),
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
        _of_processes(lambda process: process.cpu_s),
    ),
    gauges(
        "process_resident_memory_bytes",
        "Memory that a process has, shared pages included.",
        ("process",),
        _of_processes(lambda process: process.resident_bytes),
    ),
    gauges(
        "process_open_fds",
        "Descriptors that a process has in use.",
        ("process",),
        _of_processes(lambda process: process.open_fds),
    ),
    gauges(
        "process_open_sockets",
        "Those of them that are sockets: of the server nearly all are callers' connections.",
        ("process",),
        _of_processes(lambda process: process.open_sockets),
    ),
    gauges(
        "process_max_fds",
        "How many it may have.",
        ("process",),
        _of_processes(lambda process: process.max_fds),
    ),
)

METRICS: tuple[Spec, ...] = _NODE + _ACCEPTING + _LEDGER + PEER_METRICS + CLEANER_METRICS + _MACHINE
