"""Upgrades a cluster node by node, goes back, and upgrades once more, all under load.

It does what docs/INSTALL.md tells an operator to do. The load are messages at a rate, others that
are cancelled, half messages, and a consumer that retries. Half messages end before the way back,
and go on once all nodes are upgraded again. At the end the books are reconciled on Spark, with what
Kafka holds and with what the run's own consumers saw.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from local.chaos.audit import Audited, audit, settings_for
from local.chaos.halves import HalfVerdict, open_shop
from local.loopback.child import interrupt_on_signals
from local.loopback.cluster import ClusterError
from local.loopback.kafka_jars import KafkaError
from local.loopback.node import Node
from local.reconciling import BooksError, books_folder
from local.stage.gaps import longest_gap, usual_spacing_ms
from local.stage.stage import TOPIC, Ended, Stage, staged
from local.stage.traffic import steady
from local.stage.view import PlainView, verdict_text
from local.stage.wholeness import look
from local.upgrading import consumer
from local.upgrading.consumer import Worker, working
from local.upgrading.earlier import UPGRADE_FROM, installed

WHOLE_WITHIN_S = 120.0
SETTLE_S = 1.0
"""What waited meanwhile is forwarded by then."""
SILENCE_MS = 3_000.0
"""The target: the longest time without forwarding while a node is exchanged."""
OPEN_S = 8.0
"""How long the shop is open on nodes that were upgraded again."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A node that has another release since.

    Attributes:
        node: Its id, and whether it led.
        to: The release.
        silence_ms: The longest time without an arrival, beyond the usual one.
        whole_after_s: When nothing was missing any more.
    """

    node: str
    to: str
    silence_ms: float
    whole_after_s: float

    def __str__(self) -> str:
        """As it is printed."""
        return (
            f"{self.node} to {self.to}: whole after {self.whole_after_s:.1f} s,"
            f" {self.silence_ms:,.0f} ms without forwarding"
        )


@dataclass(slots=True)
class Upgrades:
    """Exchanges nodes of a cluster under load."""

    stage: Stage
    exchanges: list[Exchange] = field(default_factory=list)

    def roll(self, python: str, to: str) -> None:
        """Gives each node another release, the leader last."""
        leader = self._wait_until_whole()
        for node in sorted(self.stage.cluster.nodes, key=lambda node: node.id == leader):
            self._exchange(node, python, to)

    def _exchange(self, node: Node, python: str, to: str) -> None:
        self._may_be_stopped(node)
        leads = " (leads)" if look(self.stage.cluster.nodes).leader == node.id else ""
        usual_ms = usual_spacing_ms(self._arrivals_ms(time.time() * 1000 - 5_000)) or 0.0
        began_s = time.time()
        node.stop()
        if node.exit_code:
            raise ClusterError(f"{node.id} ended with {node.exit_code}: {node.log_tail()}")
        node.python = python
        node.start()
        self._wait_until_whole()
        whole_after_s = time.time() - began_s
        self.stage.wait(SETTLE_S)
        times_ms = [began_s * 1000, *self._arrivals_ms(began_s * 1000), time.time() * 1000]
        silence_ms = max(0.0, longest_gap(times_ms).length_ms - usual_ms)
        self.exchanges.append(Exchange(f"{node.id}{leads}", to, silence_ms, whole_after_s))
        self.stage.view.note(str(self.exchanges[-1]))

    def _may_be_stopped(self, node: Node) -> None:
        """Asks as an operator does."""
        others = ",".join(each.address for each in self.stage.cluster.nodes)
        command = [sys.executable, "-m", "delaywheel_replica.cli.app", "node", "wait", node.id]
        command += ["--up-to", f"{WHOLE_WITHIN_S:.0f}s", "--server", others]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{node.id} may not be stopped: {done.stdout}{done.stderr}")

    def _arrivals_ms(self, since_ms: float) -> list[float]:
        records = self.stage.records
        first = bisect_left(records, since_ms, key=lambda record: record.received_ms)
        return [record.received_ms for record in records[first:]]

    def _wait_until_whole(self) -> str:
        """Waits until nothing is missing; returns who leads."""
        until_s = time.monotonic() + WHOLE_WITHIN_S
        while (seen := look(self.stage.cluster.nodes)).missing:
            if time.monotonic() > until_s:
                raise ClusterError(f"not whole in time: {'; '.join(seen.missing)}")
            self.stage.wait(0.2)
        return seen.leader


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a run."""

    exchanges: Sequence[Exchange]
    ended: Ended
    shops: Sequence[HalfVerdict]
    worker: Worker
    audited: Audited

    def faults(self) -> list[str]:
        """Returns what should not be."""
        said = [str(each) for each in self.exchanges if each.silence_ms > SILENCE_MS]
        said += [f"the consumer: {fault}" for fault in self.worker.faults()]
        verdict = self.ended.verdict
        said += [f"a cancel: {text} ({n})" for text, n in verdict.cancels_failed.items()]
        for shop in self.shops:
            raised = [f"the shop: {one}" for one in shop.outcomes if one.startswith("raised")]
            said += raised if shop.is_clean else [*raised, shop.text()]
        if not self.ended.is_clean:
            said.append("the run's consumer and what was sent do not agree")
        if not self.audited.is_clean:
            said.append("the books do not balance, or not with the consumers")
        return said


def run(options: argparse.Namespace, folder: Path) -> Report:
    """Runs all of it."""
    chance = random.Random()  # noqa: S311 - no secret
    before, today = installed(options.revision), sys.executable
    settings = {"halves": True, **settings_for(folder)}
    with (
        PlainView(figures_every_s=10.0) as view,
        staged(view, nodes=3, settings=settings, python=before) as stage,
    ):
        view.note(f"three nodes of {options.revision} run, at {options.rate:g} messages a second")
        upgrades, shops = Upgrades(stage), list[HalfVerdict]()
        with working(stage.cluster) as worker:
            stage.send(steady(options.rate, chance))
            stage.send_cancelled(options.cancels)
            with _shop(stage, options.halves, chance, 1) as close:
                upgrades.roll(today, "today's")
                shops.append(close())
            view.note("the way back, without half messages")
            stage.cluster.configure(halves=False)
            upgrades.roll(before, options.revision)
            view.note("once more")
            stage.cluster.configure(halves=True)
            upgrades.roll(today, "today's")
            with _shop(stage, options.halves, chance, 2) as close:
                stage.wait(OPEN_S)
                shops.append(close())
            stage.stop_sending()
            while not stage.is_over():
                stage.tick()
            worker.close()
        ended = stage.ended()
        topics = [TOPIC, consumer.TOPIC, *map(_orders, (1, 2))]
        arrived = ended.verdict.delivered + worker.sent + sum(shop.delivered for shop in shops)
        audited = audit(stage, folder, topics, arrived)
    return Report(upgrades.exchanges, ended, shops, worker, audited)


def _orders(number: int) -> str:
    return f"orders-{number}"


@contextmanager
def _shop(
    stage: Stage, rate_per_s: float, chance: random.Random, number: int
) -> Iterator[Callable[[], HalfVerdict]]:
    """Opens a shop with a topic of its own; what is given closes it, once all is decided."""
    opened = open_shop(
        stage.cluster, rate_per_s, chance, stage.view.note, _orders(number), kills=False
    )
    with opened as shop:
        stage.beside.append(shop.look_after)

        def close() -> HalfVerdict:
            stage.beside.clear()
            stage.view.note("closing the shop: waiting until every half is decided")
            return shop.close()

        yield close


def argument_parser() -> argparse.ArgumentParser:
    """The arguments of `scripts/upgrade-check`."""
    parser = argparse.ArgumentParser(
        prog="scripts/upgrade-check",
        description="Upgrade three nodes one by one from a revision to this tree, back, and once"
        " more, under load, and check by the books that nothing was lost, doubled or early.",
    )
    revision = UPGRADE_FROM.read_text().strip()
    parser.add_argument(
        "--from",
        dest="revision",
        default=revision[:12],
        metavar="REV",
        help="what Git knows, installed once with its own pins (default: packaging/upgrade-from,"
        " %(default)s)",
    )
    for name, rate, what in (
        ("rate", 500, "messages"),
        ("cancels", 50, "messages beside them, each of which is cancelled,"),
        ("halves", 20, "orders with half messages"),
    ):
        parser.add_argument(
            f"--{name}",
            type=float,
            default=float(rate),
            metavar="R",
            help=f"{what} a second (default: {rate})",
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; returns 0 only if every promise was kept."""
    options = argument_parser().parse_args(arguments)
    interrupt_on_signals()
    try:
        with books_folder(None) as folder:
            report = run(options, folder)
    except KeyboardInterrupt:
        return 130
    except (ClusterError, KafkaError, BooksError) as error:
        print(error, file=sys.stderr)
        return 1
    print(*report.exchanges, sep="\n")
    print(verdict_text(report.ended.verdict, report.ended.mirrors))
    print(*(shop.text() for shop in report.shops), sep="\n")
    print(f"the consumer handled {report.worker.sent:,} records, each fifth at its second try")
    print(report.audited.text())
    faults = report.faults()
    print(*(f"NOT as it should be: {fault}" for fault in faults[:20]), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
