"""Metrics of the ledger: how far it is published, and what delays that."""

from delaywheel_replica.server.metrics.metric import Spec, counter, gauge
from delaywheel_replica.server.metrics.scrape import Scrape
from delaywheel_replica.server.node.node_view import ledger_lag_frames


def _lag(scrape: Scrape) -> float | None:
    return None if scrape.server is None else ledger_lag_frames(scrape.server.heartbeat)


def _failing_s(scrape: Scrape) -> float:
    since_ms = scrape.books.failing_since_ms
    return 0 if since_ms is None else max(0, scrape.wall_ms - since_ms) / 1e3


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
    counter("ledger_files", "Files of the ledger put in place.", lambda s: s.books.files),
    counter("ledger_messages", "Messages in these files.", lambda s: s.books.rows),
    counter(
        "ledger_gaps",
        "Times that rows of the ledger were given up, or could no longer be read.",
        lambda s: s.books.gaps,
    ),
    counter("ledger_gap_messages", "Messages in these gaps.", lambda s: s.books.gap_messages),
)
