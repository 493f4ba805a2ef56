"""The audit after the disturbances: what the nodes accepted, against what lies in Kafka."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from local.reconciling import Books, reconcile
from local.stage.stage import Stage
from local.stage.view import ledger_text

_LEDGER: Final = "ledger"


@dataclass(frozen=True, slots=True)
class Audited:
    """The result of an audit.

    Attributes:
        books: What it found.
        arrived: How many messages the run's own consumers have seen, each once.
    """

    books: Books
    arrived: int

    @property
    def is_clean(self) -> bool:
        """Whether the books balance, and both have seen as many messages."""
        summary = self.books.summary
        return summary.balanced and summary.counts["forwarded"] == self.arrived

    def text(self) -> str:
        """Describes it in a few lines."""
        same = "" if self.is_clean else f"; consumers saw {self.arrived:,} messages"
        return f"{ledger_text(self.books)}{same}"


def settings_for(folder: Path) -> Mapping[str, Any]:
    """Returns the settings of nodes that keep a ledger in this folder."""
    return {"ledger_uri": str(folder / _LEDGER), "ledger_seal_seconds": 1}


def audit(stage: Stage, folder: Path, topics: Sequence[str], arrived: int) -> Audited:
    """Waits for the whole ledger, stops the nodes, and reconciles.

    Args:
        stage: The run; nobody sends any more.
        folder: That of `settings_for`.
        topics: Where messages went.
        arrived: See `Audited`.

    Raises:
        ClusterError: The ledger is not published.
        BooksError: The audit could not run.
    """
    stage.view.note("waiting for the rest of the ledger, then stopping the nodes")
    stage.cluster.stop_published()
    stage.view.note("reconciling it with what Kafka holds, on Spark")
    ledger, kafka = folder / _LEDGER, stage.cluster.kafka
    books = reconcile(folder, ledger=ledger, kafka=kafka, cluster_id="local", topics=topics)
    return Audited(books, arrived)
