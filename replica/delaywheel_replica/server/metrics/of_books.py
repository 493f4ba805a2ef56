"""Metrics of the ledger: how far it is published, and what delays that."""

from delaywheel_replica.server.metrics.facts import Facts
from delaywheel_replica.server.metrics.metric import Spec, counter, gauge
from delaywheel_replica.server.node.node_view import ledger_lag_frames


def _lag(facts: Facts) -> float | None:
    return None if facts.server is None else ledger_lag_frames(facts.server.heartbeat)


def _failing_s(facts: Facts) -> float:
    since_ms = facts.books.failing_since_ms
    return 0 if since_ms is None else max(0, facts.wall_ms - since_ms) / 1e3


BOOKS_METRICS: tuple[Spec, ...] = (
    gauge(
        "ledger_lag_frames",
        "Frames of own wheels that are not in the published ledger yet.",
        _lag,
    ),
    gauge(
        "ledger_failing_seconds",
        "For how long every attempt to publish the ledger has failed; 0: the last one did not.",
        _failing_s,
    ),
    counter("ledger_files", "Files of the ledger put in place.", lambda f: f.books.files),
    counter("ledger_messages", "Messages in these files.", lambda f: f.books.rows),
    counter(
        "ledger_gaps",
        "Times that rows of the ledger were given up, or could no longer be read.",
        lambda f: f.books.gaps,
    ),
    counter("ledger_gap_messages", "Messages in these gaps.", lambda f: f.books.gap_messages),
)
