"""Reconciles a run's ledger with Kafka on Spark, when the run is over.

The reconciliation knows nothing of the run's own consumer, which knows nothing of the ledger: both
must arrive at the same numbers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from delaywheel_audit.kafka.jars import JARS_VARIABLE
from delaywheel_audit.matching.summary import Summary
from local.loopback.child import end_child, start_child
from local.loopback.cluster import ROOT
from local.loopback.kafka_jars import fetch_connector
from local.stage.tally import Verdict

# Only bounds a hang: Spark takes 20 s on two idle cores, and took 230 s beside a load of 15.
TIMEOUT_S = 900.0
END_PATIENCE_S = 5.0
PAGE = "page.html"
RECONCILE_LOG = "reconcile.log"
RAN = (0, 1)
"""Exit codes of a reconciliation that came to a result: balanced, or not."""


class BooksError(RuntimeError):
    """The reconciliation gave no result."""


class Compared(NamedTuple):
    """One number, determined in two ways."""

    name: str
    by_consumer: int
    by_books: int


class Books(NamedTuple):
    """The result of the reconciliation.

    Attributes:
        summary: Its summary.
        page: The page for a browser.
    """

    summary: Summary
    page: Path

    def compared(self, verdict: Verdict) -> list[Compared]:
        """Compares with what the run's own consumer counted."""
        counts = self.summary.counts
        return [
            Compared("accepted", verdict.accepted, counts["acknowledged"]),
            Compared("delivered", verdict.delivered, counts["forwarded"]),
            Compared("lost", verdict.lost, counts["missing"] + counts["lost"]),
            Compared("duplicated", verdict.duplicated, counts["duplicated"]),
            Compared("early", verdict.early, counts["early"]),
            Compared("unknown records", verdict.strangers, counts["unexpected"]),
        ]

    def is_clean(self, verdict: Verdict) -> bool:
        """Whether the books are in order and agree with the consumer."""
        agree = all(row.by_consumer == row.by_books for row in self.compared(verdict))
        return self.summary.balanced and agree


def finds_the_connector() -> dict[str, str]:
    """The environment in which a reconciliation finds the jars by which Spark reads Kafka."""
    known = os.environ.get(JARS_VARIABLE)
    return {JARS_VARIABLE: str(fetch_connector()) if known is None else known}


@contextlib.contextmanager
def books_folder(wanted: Path | None) -> Iterator[Path]:
    """Creates the folder for ledger, tables and page; removes it if it stays empty.

    Args:
        wanted: A new or empty folder; None: one of our own, in the place of those that earlier
            runs have left.
    """
    if wanted is None:
        runs = ROOT / ".run"
        runs.mkdir(exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="demo-", dir=runs))
    else:
        folder = wanted.absolute()
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BooksError:
        raise  # it says what to look at
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if wanted is None:
        # One that runs now has no page yet.
        for page in folder.parent.glob(f"demo-*/{PAGE}"):
            if page.parent != folder:
                shutil.rmtree(page.parent, ignore_errors=True)


def reconcile(
    folder: Path, *, ledger: Path, kafka: str, cluster_id: str, topics: Sequence[str]
) -> Books:
    """Reconciles everything that was accepted, in a separate process.

    Args:
        folder: Where the tables and the page go.
        ledger: What the nodes have published.
        kafka: The broker's address.
        cluster_id: Whose outcomes and progress are to be read.
        topics: Where the messages went.

    Raises:
        BooksError: It could not run.
    """
    log = folder / RECONCILE_LOG
    command = [
        *(sys.executable, "-m", "delaywheel_audit.job"),
        *("--cluster", cluster_id, "--ledger", str(ledger), "--kafka", kafka),
        *(text for topic in topics for text in ("--topic", topic)),
        *("--interval", "1s", "--output", str(folder)),
    ]
    process = start_child(command, log=log, environment=finds_the_connector())
    try:
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BooksError(
            f"the reconciliation took more than {TIMEOUT_S:.0f} s; see {log}"
        ) from None
    finally:
        end_child(process, patience_s=END_PATIENCE_S)
    if code not in RAN:
        tail = log.read_text(errors="replace")[-3000:]
        raise BooksError(f"the reconciliation ended with code {code}; its log ends with:\n{tail}")
    summary = Summary.from_json((folder / "summary.json").read_text())
    return Books(summary, folder / PAGE)
