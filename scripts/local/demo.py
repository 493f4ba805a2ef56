"""The demo: thousands of delayed messages through nodes whose leader is killed, all checked.

They are checked twice: by a consumer that knows what was sent, and, when everything is over and
the nodes have stopped, by the books.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from local.loopback.beside import PageProcess
from local.loopback.child import interrupt_on_signals
from local.loopback.cluster import ClusterError
from local.loopback.kafka_jars import KafkaError
from local.reconciling import RECONCILE_LOG, Books, BooksError, books_folder, reconcile
from local.stage.stage import TOPIC, Ended, Stage, staged
from local.stage.traffic import plan
from local.stage.view import LiveView, PlainView, View, books_text, verdict_text

CLUSTER_ID = "demo"
LEDGER = "ledger"
LEDGER_SEAL_SECONDS = 1
_PAGE_PAUSE_S = 0.2


def play(stage: Stage, options: argparse.Namespace) -> Ended:
    """Sends, kills, and watches until everything has arrived or nothing more comes."""
    planned = plan(options.messages, options.seconds, random.Random())  # noqa: S311 - no secret
    stage.view.note(f"sending {options.messages:,} messages, due over {options.seconds:g} s")
    sending = stage.send(planned)
    kill_at = sending.started_at + options.seconds / 2
    killed_at_ms = None
    while not stage.is_over():
        stage.tick()
        if not options.no_kill and killed_at_ms is None and time.time() > kill_at:
            killed_at_ms = _kill_leader(stage)
    return stage.ended(killed_at_ms=killed_at_ms)


def _kill_leader(stage: Stage) -> float | None:
    """Kills the leader; returns when, or None if no node leads."""
    node = stage.cluster.leader()
    if node is None:
        return None
    row = node.row()
    killed_at_ms = time.time() * 1000
    node.kill()
    pids = ", ".join(str(row[name]) for name in ("pid", "server_pid", "cleaner_pid"))
    stage.view.note(f"kill -9 of the leader, {node.id}: supervisor, server, cleaner ({pids})")
    return killed_at_ms


def keep_books(stage: Stage, folder: Path) -> Books:
    """Waits for the whole ledger, stops the nodes, and reconciles on an idle machine."""
    cluster = stage.cluster
    stage.view.note("waiting for the rest of the ledger, then stopping the nodes")
    cluster.stop_published()
    log = folder / RECONCILE_LOG
    stage.view.note(f"reconciling it with what Kafka holds, on Spark; {log} shows how far it is")
    ledger = folder / LEDGER
    return reconcile(
        folder, ledger=ledger, kafka=cluster.kafka, cluster_id=CLUSTER_ID, topics=[TOPIC]
    )


def _stay(stage: Stage, index: Path) -> None:
    """Starts the nodes again, and shows on a page what is left of the run, until Ctrl-C."""
    cluster, view = stage.cluster, stage.view
    for node in cluster.nodes:
        node.start()
    cluster.wait_until_accepting()
    with suppress(KeyboardInterrupt):
        addresses = [node.address for node in cluster.nodes]
        with PageProcess(addresses, cluster.folder, index) as page:
            while page.link is None:
                cluster.watch()
                time.sleep(_PAGE_PAUSE_S)
            view.conclude(f"\nIn a browser, until Ctrl-C: {page.link}")
            while True:
                cluster.watch()
                time.sleep(_PAGE_PAUSE_S)


def run(options: argparse.Namespace) -> bool:
    """Runs the whole demo; returns whether everything is as it should be."""
    from local.showing.dead_letters import replay_one  # noqa: PLC0415 - not for `--help`
    from local.showing.halves import order_three  # noqa: PLC0415 - the same
    from local.showing.retries import retry_one  # noqa: PLC0415 - the same
    from local.showing.ways import tracing  # noqa: PLC0415 - the same

    plain = options.plain or not sys.stdout.isatty()
    view: View = PlainView() if plain else LiveView()
    with books_folder(options.output) as folder:
        settings = {
            "cluster_id": CLUSTER_ID,
            "ledger_uri": str(folder / LEDGER),
            "ledger_seal_seconds": LEDGER_SEAL_SECONDS,
            "trace": True,
        }
        sizes = {"nodes": options.nodes, "brokers": options.brokers}
        with view, staged(view, **sizes, settings=settings) as stage:
            ended = play(stage, options)
            with tracing(stage.cluster) as told:  # not while lateness is measured
                view.note("sending a message that is too late; replaying its dead letter, twice")
                replayed = replay_one(stage.cluster, CLUSTER_ID)
                view.note("failing a record three times, which a consumer retries by Kafka alone")
                retried = retry_one(stage.cluster, CLUSTER_ID, told.trace)
                view.note("ordering three times, each with a row in a database and a half message")
                ordered = order_three(stage.cluster, CLUSTER_ID, told.trace)
                view.note("asking delaywheel trace for the retried message, and for a half")
                ways = told.way(retried.id, "done after"), told.way(ordered.checked, "answered")
            view.conclude(verdict_text(ended.verdict, ended.mirrors, replayed, retried, ordered))
            books = keep_books(stage, folder)
            view.conclude(books_text(books, ended.verdict))
            view.conclude("\n".join(("", *ways)))
            if options.stay:
                _stay(stage, told.index)
    is_kept = replayed.is_clean and retried.is_clean and ordered.is_clean
    return ended.is_clean and is_kept and books.is_clean(ended.verdict)


def argument_parser() -> argparse.ArgumentParser:
    """The arguments of `scripts/demo`."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Send delayed messages through nodes whose leader is killed midway, and check "
        "that each becomes visible in Kafka once, not early, byte for byte.",
    )
    parser.add_argument("--nodes", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--brokers", type=int, default=1, help="how many (default: 1)")
    parser.add_argument("--messages", type=int, default=20_000, help="how many (default: 20000)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="their dues lie within (default: 20)"
    )
    parser.add_argument("--no-kill", action="store_true", help="let every node live")
    parser.add_argument(
        "--stay", action="store_true", help="show the end of it in a browser, until Ctrl-C"
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="ledger, tables and page go here, a new or empty folder (default: one in .run, "
        "in the place of an earlier demo's)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns 0 only if both counts agree and every promise was kept."""
    parser = argument_parser()
    options = parser.parse_args(arguments)
    if min(options.messages, options.nodes, options.brokers) < 1 or options.seconds <= 0:
        parser.error("--messages, --seconds, --nodes and --brokers must be above 0")
    if options.output and options.output.is_dir() and any(options.output.iterdir()):
        parser.error(f"--output: {options.output} is not empty")
    interrupt_on_signals()
    try:
        return 0 if run(options) else 1
    except KeyboardInterrupt:
        return 130
    except (ClusterError, KafkaError, BooksError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
