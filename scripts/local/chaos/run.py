"""Measures failovers of a real cluster under traffic, and checks every message.

The leader is disturbed repeatedly; each time the run waits until nothing is missing, and then for a
random time. The time without forwarding is the longest gap between arrivals at a read_committed
consumer from the disturbance until the cluster was complete again, minus the usual time between
arrivals.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from local.chaos.audit import Audited, audit, settings_for
from local.chaos.disturbing import Disturber, How, Strike
from local.chaos.figures import Disturbance, Summary, as_json, print_summaries
from local.chaos.halves import SETTINGS as HALVES
from local.chaos.halves import TOPIC as ORDERS
from local.chaos.halves import HalfVerdict, open_shop
from local.loopback.child import interrupt_on_signals
from local.loopback.cluster import ClusterError, parse_settings
from local.loopback.kafka_jars import KafkaError
from local.loopback.machine import CpuTime, load_1min
from local.reconciling import BooksError
from local.stage.gaps import longest_gap, usual_spacing_ms
from local.stage.stage import TOPIC, Ended, Stage, staged
from local.stage.traffic import steady
from local.stage.view import LiveView, PlainView, View, verdict_text
from local.stage.wholeness import Look, look

WHOLE_WITHIN_S = 120.0
LOOK_EVERY_S = 0.2
# The backlog of a failover is forwarded within this time after the cluster is complete.
SETTLE_S = 1.0
# Nodes that have just seen trouble wait longer before they stand for election: a disturbance
# sooner after the last one would measure a slower failover than an unexpected one.
CALM_S = 5.0
FIGURES_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Calm:
    """A period without disturbances, in milliseconds.

    Attributes:
        spacing_ms: The usual time between arrivals.
        silence_ms: The longest time between arrivals, minus the usual one.
    """

    spacing_ms: float
    silence_ms: float


class Chaos:
    """Disturbs the leader of a cluster under steady traffic.

    Attributes:
        disturbances: The disturbances so far.
    """

    def __init__(self, stage: Stage, chance: random.Random, *, calm_s: float) -> None:
        """Prepares.

        Args:
            stage: The cluster under traffic.
            chance: Draws the pauses between disturbances.
            calm_s: The shortest time between two disturbances; the longest is twice that.
        """
        self._stage = stage
        self._chance = chance
        self._calm_s = (calm_s, 2 * calm_s)
        self._disturber = Disturber(stage, chance)
        self.disturbances: list[Disturbance] = []

    def run(self, hows: Sequence[How]) -> None:
        """Runs one disturbance of each requested kind.

        Raises:
            ClusterError: The cluster did not recover.
        """
        while not self._stage.records:  # the first message is due some seconds after the start
            self._stage.tick()
        self._wait_until_whole(after_epoch=-1)
        for number, how in enumerate(hows, 1):
            self._disturb(how)
            done = self.disturbances[-1]
            self._stage.view.note(f"{number} of {len(hows)}: {done.line()}")

    def _disturb(self, how: How) -> None:
        calm = self._calm()
        cpu = CpuTime()
        strike = self._disturber.strike(how)
        struck_at = strike.at_ms / 1000
        after = self._wait_until_whole(after_epoch=strike.epoch)
        whole_after_s = time.time() - struck_at
        self._stage.wait(SETTLE_S)
        self.disturbances.append(
            Disturbance(
                how=how,
                node=strike.node,
                leader_after=after.leader,
                struck_at_ms=strike.at_ms,
                silence_ms=self._silence_ms(strike, calm),
                calm_silence_ms=calm.silence_ms,
                spacing_ms=calm.spacing_ms,
                whole_after_s=whole_after_s,
                open_records=strike.open_records,
                load_1min=load_1min(),
                cpu_busy_share=cpu.busy_share(),
            )
        )

    def _calm(self) -> Calm:
        """Waits for a random while, and returns how messages arrive undisturbed."""
        since_ms = time.time() * 1000
        self._stage.wait(self._chance.uniform(*self._calm_s))
        arrivals = [since_ms, *self._arrivals_ms(since_ms)]
        spacing_ms = usual_spacing_ms(arrivals)
        return Calm(spacing_ms, longest_gap(arrivals).length_ms - spacing_ms)

    def _silence_ms(self, strike: Strike, calm: Calm) -> float:
        """Returns the silence until now, which counts even if it has not ended."""
        times_ms = [strike.at_ms, *self._arrivals_ms(strike.at_ms), time.time() * 1000]
        return max(0.0, longest_gap(times_ms).length_ms - calm.spacing_ms)

    def _arrivals_ms(self, since_ms: float) -> Iterator[float]:
        records = self._stage.records
        first = bisect_left(records, since_ms, key=lambda record: record.received_ms)
        return (record.received_ms for record in records[first:])

    def _wait_until_whole(self, *, after_epoch: int) -> Look:
        """Waits until the cluster is complete and has a leader after this epoch."""
        deadline = time.monotonic() + WHOLE_WITHIN_S
        while True:
            seen = look(self._stage.cluster.nodes)
            if not seen.missing and seen.epoch > after_epoch:
                return seen
            if time.monotonic() > deadline:
                what = "; ".join(seen.missing) or f"no node began to lead after {after_epoch}"
                raise ClusterError(f"not whole within {WHOLE_WITHIN_S:.0f} s: {what}")
            self._stage.wait(LOOK_EVERY_S)


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a run."""

    disturbances: Sequence[Disturbance]
    ended: Ended
    is_complete: bool
    halves: HalfVerdict | None = None
    audited: Audited | None = None

    @property
    def is_clean(self) -> bool:
        """Whether the cluster always recovered and kept every promise."""
        halves_are_clean = self.halves is None or self.halves.is_clean
        is_audited = self.audited is None or self.audited.is_clean
        return self.is_complete and self.ended.is_clean and halves_are_clean and is_audited


def play(stage: Stage, options: argparse.Namespace) -> Report:
    """Disturbs under traffic, then waits for the last messages and checks all of them."""
    chance = random.Random()  # noqa: S311 - no secret
    hows = order_of(options.how or ["all"], options.kills, chance, brokers=options.brokers)
    stage.view.note(f"{options.rate:g} messages a second; {len(hows)} disturbances of the leader")
    stage.send(steady(options.rate, chance))
    if options.cancels:
        stage.send_cancelled(options.cancels)
    if not options.halves:
        return _disturb(stage, chance, hows, options)
    with open_shop(stage.cluster, options.halves, chance, stage.view.note) as shop:
        stage.beside.append(shop.look_after)
        report = _disturb(stage, chance, hows, options)
        stage.beside.clear()
        stage.view.note("closing the shop: waiting until every half is decided")
        return replace(report, halves=shop.close())


def _disturb(
    stage: Stage, chance: random.Random, hows: Sequence[How], options: argparse.Namespace
) -> Report:
    chaos = Chaos(stage, chance, calm_s=options.calm)
    is_complete = True
    try:
        chaos.run(hows)
    except ClusterError as error:
        # What was accepted is checked all the same: that is what matters most now.
        stage.view.note(str(error))
        is_complete = False
    stage.stop_sending()
    stage.view.note("waiting for the last messages")
    while not stage.is_over():
        stage.tick()
    return Report(chaos.disturbances, stage.ended(), is_complete)


def order_of(
    hows: Sequence[str], kills: int, chance: random.Random, *, brokers: int = 1
) -> list[How]:
    """Returns the disturbances in mixed order."""
    kinds = list(How) if "all" in hows else [How(name) for name in dict.fromkeys(hows)]
    if brokers == 1:
        kinds = [kind for kind in kinds if kind is not How.LEADERS]
    mixed = [kind for kind in kinds for _ in range(kills)]
    chance.shuffle(mixed)
    return mixed


def argument_parser() -> argparse.ArgumentParser:
    """The arguments of `scripts/chaos`."""
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Disturb the leader of a real cluster under traffic again and again, measure "
        "each failover, and check that each message becomes visible in Kafka once, not early, "
        "byte for byte.",
    )
    parser.add_argument(
        "--kills", type=int, default=20, metavar="K", help="of each kind (default: 20)"
    )
    parser.add_argument(
        "--how",
        action="append",
        choices=[*How, "all"],
        help="node: kill -9 of the leader's node; transaction: the same while many messages are "
        "being committed; pause: its processes stopped for 5 s; server, cleaner: kill -9 of that "
        "process alone; broker: kill -9 of Kafka's, with several of one after the other, by "
        "SIGTERM and kill -9 in turn; both: kill -9 of the leader's node and of a broker; leaders: "
        "each partition's is another broker, with several; may be given again (default: all)",
    )
    parser.add_argument("--nodes", type=int, default=3, metavar="N", help="how many (default: 3)")
    parser.add_argument("--brokers", type=int, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument(
        "--rate", type=float, default=50.0, metavar="R", help="messages a second (default: 50)"
    )
    parser.add_argument(
        "--cancels",
        type=float,
        default=0.0,
        metavar="R",
        help="beside them, so many messages a second of which each is cancelled (default: 0)",
    )
    parser.add_argument(
        "--halves",
        type=float,
        default=0.0,
        metavar="R",
        help="beside them, so many orders a second in a PostgreSQL, each with a half message, by "
        "programs that are killed, as is the database (default: 0)",
    )
    parser.add_argument(
        "--calm",
        type=float,
        default=CALM_S,
        metavar="S",
        help="seconds between two disturbances, at least; up to twice as many (default: 5)",
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="K=V", help="a setting of every node"
    )
    parser.add_argument(
        "--audit",
        type=Path,
        metavar="DIR",
        help="in the end, reconcile the ledger with Kafka on Spark; ledger, tables and page go to "
        "this new or empty folder",
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here as JSON")
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")
    return parser


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> Report:
    """Starts everything, disturbs, ends everything."""
    plain = options.plain or not sys.stdout.isatty()
    view: View = PlainView(figures_every_s=FIGURES_EVERY_S) if plain else LiveView()
    settings = {**(HALVES if options.halves else {}), **settings}
    if options.audit:
        settings = {**settings_for(options.audit.absolute()), **settings}
    sizes = {"nodes": options.nodes, "brokers": options.brokers}
    with view, staged(view, **sizes, settings=settings) as stage:
        report = play(stage, options)
        if not options.audit:
            return report
        topics, arrived = [TOPIC], report.ended.verdict.delivered
        if report.halves is not None:
            topics, arrived = [*topics, ORDERS], arrived + report.halves.delivered
        return replace(report, audited=audit(stage, options.audit.absolute(), topics, arrived))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; 0 only if every promise was kept."""
    parser = argument_parser()
    options = parser.parse_args(arguments)
    counts = (options.kills, options.nodes, options.brokers)
    if min(counts) < 1 or min(options.rate, options.calm) <= 0:
        parser.error("--kills, --nodes, --brokers, --rate and --calm must be above 0")
    if options.brokers == 1 and options.how == [How.LEADERS]:
        parser.error("--how leaders needs several --brokers")
    if options.audit and options.audit.is_dir() and any(options.audit.iterdir()):
        parser.error(f"--audit: {options.audit} is not empty")
    try:
        settings = parse_settings(options.config)
    except ValueError as error:
        parser.error(str(error))
    interrupt_on_signals()
    try:
        report = run(options, settings)
    except KeyboardInterrupt:
        return 130
    except (ClusterError, KafkaError, BooksError) as error:
        print(error, file=sys.stderr)
        return 1
    halves = report.halves
    if options.json:
        figures = as_json(report.disturbances, report.ended, is_complete=report.is_complete)
        given = {"nodes": options.nodes, "brokers": options.brokers}
        given |= {"rate_per_s": options.rate, "calm_s": options.calm}
        figures |= {"halves": None if halves is None else asdict(halves), "clean": report.is_clean}
        options.json.write_text(json.dumps(given | figures, indent=2) + "\n")
    print_summaries(Summary.of_each(report.disturbances))
    print(verdict_text(report.ended.verdict, report.ended.mirrors))
    if halves is not None:
        print(halves.text())
    if report.audited is not None:
        print(report.audited.text())
    return 0 if report.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
