"""Runs a workload on a cluster: warms up, fills, measures rounds, computes figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final

from local.bench.figures import Extent, differences, ratios
from local.bench.jobs import At, Bulk, Job, Paced, Sent, Waiters
from local.bench.rounds import disturbances, in_turn, run_rounds, warm_up
from local.bench.sending import CLUSTER_ID
from local.bench.stand import BULK, SECURE, Part, Stand
from local.bench.usage import Watch
from local.bench.workloads import (
    HOUR_S,
    Accept,
    Burst,
    Changes,
    Consume,
    Far,
    Halves,
    Highest,
    Idle,
    Restart,
    Senders,
    Steady,
    Topics,
    Viewing,
    Workload,
)
from local.loopback.cluster import ClusterError
from local.loopback.node import send_signal
from local.stage.changing import CALLS, ENDS, SENDS, change
from local.stage.tally import Spread
from local.viewing.page import AT_REST, VIEWERS, PageStand

FILL_S: Final = 20.0
AT_ONCE_MS: Final = (0, 1_000)
"""How far ahead dues are if nothing has to be accepted before."""
_AHEAD_MS: Final = (1_000, 1_001)
"""How far ahead messages beside halves are due."""
_TRANSACTION_MS: Final = (300, 301)
"""How long after its begin a half is committed: a busy machine has answered the begin by then."""
_WARM_RATE_PER_S: Final = 2_000
_LEAD_S: Final = 4.0
_AT_REST_S: Final = 2.0
BEFORE_KILL_S: Final = 3.0
_BESIDE_PER_S: Final = 40
_BESIDE_MS: Final = (60_000, 61_000)
CALM_P99_MS: Final = 200.0
"""The lateness above which a second after the leader was killed is not calm."""

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure workloads.

    Attributes:
        rounds: How many undisturbed rounds.
        seconds: The length of each part of a round.
        warm: Whether to warm the broker.
        alone: Whether to leave out Kafka's own figures beside a steady rate.
    """

    rounds: int
    seconds: float
    warm: bool
    alone: bool = False


class Runner:
    """Runs measurements on one stand."""

    def __init__(
        self, stand: Stand, options: Options, say: Callable[[str], None], *, topics: Topics
    ) -> None:
        """Puts the parts together."""
        self._topics = topics
        self._stand = stand
        self._options = options
        self._say = say

    def warm(self) -> list[float]:
        """Warms everything up; returns the broker's CPU ms for each transaction, by window."""
        # First Kafka alone: its first records for a thousand topics take seconds.
        self._stand.do("plain", self._job(_WARM_RATE_PER_S, 2, AT_ONCE_MS))
        for kind in self._ours():
            self._stand.do(kind, self._job(_WARM_RATE_PER_S, 2, (50, 500)))
        if not self._options.warm:
            return []

        def window(seconds: float) -> float:
            part = self._stand.do("floor", self._job(_WARM_RATE_PER_S, seconds, AT_ONCE_MS))
            brokers = [used.cpu_s for name, used in part.used.items() if name.startswith("broker")]
            return sum(brokers) * 1000 / max(1, part.sent.transactions)

        return warm_up(window, self._say)

    def run(self, workload: Workload) -> Document:
        """Fills the wheels and measures all rounds; returns the figures as JSON values."""
        filled = self._fill(workload.pending, workload.span_s) if workload.pending else []
        kind = workload.kind
        if isinstance(kind, Highest):
            measured = self._highest(kind)
        elif isinstance(kind, Restart):
            measured = self._restart()
        elif isinstance(kind, Changes | Consume):
            measured = self._programs(kind, workload.senders)
        elif isinstance(kind, Far):
            measured = self._far(kind)
        elif isinstance(kind, Viewing):
            measured = self._viewed(kind)
        elif isinstance(kind, Idle):
            measured = self._rounds([("ours", None)])
        elif isinstance(kind, Steady | Halves):
            measured = self._at_a_rate(kind, workload)
        elif isinstance(kind, Accept):
            bulk, before = Bulk(kind, self._options.seconds), self._length_bytes()
            beside = [("ingress" if workload.by_ingress else "plain", bulk)]
            measured = self._rounds([*beside, ("ours", bulk)])
            if not measured["void"]:
                kept = (one[of] for one in measured["rounds"] for of in one if of != "plain")
                messages = sum(part["messages"] for part in kept)
                measured["disk_bytes_a_message"] = (self._length_bytes() - before) / messages
        else:
            measured = self._bursts(kind)
        return {"filled": filled, **measured}

    def _ours(self) -> tuple[str, ...]:
        return ("ours", "secure") if self._stand.secured else ("ours",)

    def _at_a_rate(self, kind: Steady | Halves, workload: Workload) -> Document:
        """Measures messages at a rate beside others."""
        if isinstance(kind, Halves):
            ways = {
                "ours": (_AHEAD_MS, Waiters.SEND),
                "at_once": (_TRANSACTION_MS, Waiters.SEND_WHEN_DUE),
                "halves": (_TRANSACTION_MS, Waiters.COMMIT_WHEN_DUE),
            }
            return self._rounds(
                [
                    (name, replace(self._paced(kind.rate_per_s, ahead_ms), waiters=waiters))
                    for name, (ahead_ms, waiters) in ways.items()
                ]
            )
        theirs = self._job(kind.rate_per_s, self._options.seconds, AT_ONCE_MS)
        ours = self._paced(kind.rate_per_s, kind.ahead_ms)
        ours = replace(ours, senders=workload.senders)
        beside: list[tuple[str, Job]] = [("plain", theirs), ("floor", theirs)]
        if workload.by_ingress:
            beside = [("ingress", ours)]
        elif workload.is_traced:
            beside = [("traced", ours)]
        elif self._options.alone:
            beside = []
        measured = self._rounds([*beside, *((kind, ours) for kind in self._ours())])
        if workload.kills_leader:
            measured["killed"] = self._kill_leader(ours)
        return measured

    def _paced(self, rate_per_s: int, ahead_ms: tuple[int, int]) -> Paced:
        """Returns a load that lasts until all parts have run at it for the requested time."""
        return self._job(rate_per_s, ahead_ms[1] / 1000 + self._options.seconds, ahead_ms)

    def _job(self, rate_per_s: int, seconds: float, ahead_ms: tuple[int, int]) -> Paced:
        return Paced(rate_per_s, seconds, ahead_ms, self._topics)

    def _kill_leader(self, job: Paced) -> Document:
        """Kills the leading node with all its processes, once as much is due as is sent."""
        struck_ms = 0.0

        def strike() -> None:
            nonlocal struck_ms
            leader = self._stand.cluster.leader()
            if leader is None:
                raise ClusterError("no node leads")
            send_signal(leader.pids(), signal.SIGKILL)
            struck_ms = time.time() * 1000
            self._say(f"killed {leader.id}, which led")

        part = self._stand.struck(job, strike, job.lead_s + BEFORE_KILL_S)
        after = [each for each in part.over_time if (each.second + 1) * 1000 > struck_ms]
        late = [each for each in after if each.p99_ms > CALM_P99_MS]
        calm_ms = (late[-1].second + 1) * 1000 if late else struck_ms
        return {
            "latest_ms": max((each.max_ms for each in after), default=0.0),
            "calm_after_s": (calm_ms - struck_ms) / 1000,
            "over_time": [asdict(second) for second in part.over_time],
        }

    def _rounds(self, parts: list[tuple[str, Job | None]]) -> Document:
        def measure(number: int) -> dict[str, Part]:
            measured = {}
            for kind, job in in_turn(parts, number):
                self._say(f"round {number + 1}: {kind}")
                if job is None:
                    measured[kind] = self._stand.rest(self._options.seconds)
                else:
                    measured[kind] = self._stand.do(kind, job)
            return measured

        return self._in_rounds(measure)

    def _bursts(self, kind: Burst) -> Document:
        sparse = Bulk(Accept((600, 3_600)), 3)
        lead_s = _LEAD_S + 1.5 * kind.messages / self._stand.do("ours", sparse).sent.per_s

        def measure(number: int) -> dict[str, Part]:
            parts = {}
            for of, ahead_s in in_turn([("floor", 2.0), ("ours", lead_s)], number):
                self._say(f"round {number + 1}: {of}, due in {ahead_s:.0f} s")
                from_ms = (int(time.time() + ahead_s) + 1) * 1000
                parts[of] = self._stand.do(of, At(kind.messages, from_ms))
            return parts

        return self._in_rounds(measure)

    def _in_rounds(self, measure: Callable[[int], dict[str, Part]]) -> Document:
        done = run_rounds(self._options.rounds, measure, _disturbed)
        for why in done.void:
            self._say(f"a round is void: {why}")
        figures = [{kind: as_document(part) for kind, part in one.items()} for one in done.kept]
        return {"rounds": figures, "void": done.void, "ratios": compared(figures)}

    def _highest(self, kind: Highest) -> Document:
        """Raises the rate while it holds; the last one that held counts."""
        tried: list[Document] = []
        rate, highest = float(kind.from_per_s), 0
        holds = True
        while holds:
            self._say(f"{rate:,.0f} a second")
            job = self._paced(int(rate), Steady(int(rate)).ahead_ms)
            try:
                part = self._stand.do("ours", job)
            except ClusterError as error:
                tried.append({"rate_per_s": int(rate), "holds": False, "why": str(error)})
                break
            lateness = part.lateness
            assert lateness is not None
            kept_pace = part.sent.per_s >= 0.98 * rate
            holds = kept_pace and lateness.p99_ms <= kind.p99_ms and not _disturbed({"": part})
            tried.append({"rate_per_s": int(rate), "holds": holds, **as_document(part)})
            highest = int(rate) if holds else highest
            rate *= kind.step
        return {"tried": tried, "highest_per_s": highest}

    def _restart(self) -> Document:
        """Kills the first node with all its processes."""
        cluster, times_s = self._stand.cluster, []
        for number in range(self._options.rounds):
            node = cluster.nodes[0]
            send_signal(node.pids(), signal.SIGKILL)
            began = time.monotonic()
            while node.running:
                time.sleep(0.01)
            cluster.wait_until_accepting()
            times_s.append(time.monotonic() - began)
            self._say(f"restart {number + 1}: messages are taken after {times_s[-1]:.1f} s")
            time.sleep(self._options.seconds)
        extent = Extent.of(times_s)
        return {"restarts_s": times_s, "extent_s": asdict(extent) if extent else None}

    def _far(self, kind: Far) -> Document:
        """Measures what distance makes slower; the cluster ends with what the kill has left."""
        bulk, steady = Bulk(Accept((60, HOUR_S)), self._options.seconds), Steady(kind.rate_per_s)
        ours = self._paced(steady.rate_per_s, steady.ahead_ms)
        return {
            "accepted_per_s": self._stand.do("ours", bulk).sent.per_s,
            **self._rounds([("ours", ours)]),
            "changed": self._changes(Changes(kind.cancels_per_s), Senders()),
            "caught_up": self._catch_up(bulk),
            "killed": self._kill_leader(ours),
        }

    def _catch_up(self, missed: Bulk) -> Document:
        """Kills a node that does not lead, and starts it again once the others have taken much."""
        cluster, leader = self._stand.cluster, self._stand.cluster.leader()
        away = next(node for node in reversed(cluster.nodes) if node is not leader)
        send_signal(away.pids(), signal.SIGKILL)
        messages = self._stand.send(missed).messages
        cluster.watch()
        began_s = time.monotonic()
        cluster.wait_until_in_sync()
        took_s = time.monotonic() - began_s
        self._say(f"{away.id} has {messages:,} messages that it missed after {took_s:.1f} s")
        return {"messages": messages, "took_s": took_s}

    def _viewed(self, kind: Viewing) -> Document:
        """Measures the operators' page."""
        job = self._paced(kind.rate_per_s, Steady(kind.rate_per_s).ahead_ms)
        with PageStand(self._stand.cluster, self._stand.beside, self._say) as page:

            def measure(number: int) -> dict[str, Part]:
                parts = {}
                for name, viewers in in_turn([*{**AT_REST, **VIEWERS}.items()], number):
                    self._say(f"round {number + 1}: {name}, {viewers} viewers")
                    with page.seen(name, viewers):
                        parts[name] = (
                            self._stand.rest(self._options.seconds)
                            if name in AT_REST
                            else self._stand.do("ours", job)
                        )
                return parts

            measured = self._in_rounds(measure)
            seconds = kind.unread_s if self._options.warm else self._options.seconds
            return {
                **measured,
                "memory_bytes": page.memory_bytes,
                "unread": page.unread(seconds),
                "browsed": page.browsed(BULK, kind.second),
            }

    def _programs(self, kind: Changes | Consume, beside: Senders) -> Document:
        """Measures what programs do beside sending."""
        if isinstance(kind, Changes):
            return {"changed": self._changes(kind, beside)}
        return {"consumed": self._consume(kind)}

    def _consume(self, kind: Consume) -> list[list[Document]]:
        """Measures programs that read, each in a process of its own."""
        command = [sys.executable, "-m", "local.costs.consumer_cost", "--json"]
        command += ["--kafka", self._stand.cluster.kafka, "--cluster", CLUSTER_ID]
        command += ["--records", str(kind.records), "--calls", str(kind.calls)]
        figures = []
        for number in range(self._options.rounds):
            self._say(f"round {number + 1}")
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ClusterError(f"the reading program ended: {done.stderr.strip()[-500:]}")
            figures.append([json.loads(line) for line in done.stdout.splitlines()])
        return figures

    def _changes(self, kind: Changes, beside: Senders) -> list[Document]:
        """Measures calls that change messages; this process makes them.

        Other programs, one at each node, send a little beside those that are measured: what this
        process itself has to do delays its own calls.
        """
        addresses = [node.address for node in self._stand.cluster.nodes]
        figures = []
        for number in range(self._options.rounds):
            self._say(f"round {number + 1}")
            watch = Watch({**self._stand.pids(), "caller": os.getpid()})
            spent = Spent(watch)
            time.sleep(_AT_REST_S)
            began_s = time.monotonic()
            seconds = self._options.seconds
            others = Others(
                self._stand,
                Paced(_BESIDE_PER_S * beside.programs, seconds, _BESIDE_MS, senders=beside),
                SENDS if kind.way == "none" else CALLS,
            )

            def note(moment: str, spent: Spent = spent, others: Others = others) -> None:
                spent.note(moment)
                others.note(moment)

            figures.append(change(addresses, BULK, kind, seconds, note).document())
            took_s = time.monotonic() - began_s + _AT_REST_S
            figures[-1]["others_took"] = others.took()
            figures[-1]["cpu_us"] = spent.cpu_us(kind.rate_per_s)
            figures[-1]["cpu_share"] = {
                name: used.cpu_s / took_s for name, used in watch.read().items()
            }
        return figures

    def _fill(self, pending: int, span_s: int) -> list[Document]:
        """Creates pending messages; returns how many a second were accepted as they grew."""
        figures, done = [], 0
        how = Accept((600, span_s - 60), "raw", 4)
        while done < pending:
            sent = self._stand.do("ours", Bulk(how, FILL_S)).sent
            done += sent.messages
            figures.append({"pending": done, "per_s": round(sent.per_s)})
            self._say(f"filling: {done:,} pending, {sent.per_s:,.0f} a second")
        return figures

    def _length_bytes(self) -> float:
        """Returns the median length of a node's files; each node has them all."""
        nodes = self._stand.cluster.nodes
        files = (path for node in nodes for path in node.data.rglob("*") if path.is_file())
        return sum(path.stat().st_size for path in files) / len(nodes)


class Others:
    """Programs that send a little beside what is measured, one at each node, and await each."""

    def __init__(self, stand: Stand, job: Paced, moment: str) -> None:
        """Prepares; they begin at that moment of the load."""
        self._stand, self._job, self._moment = stand, job, moment
        self._end: Callable[[], dict[str, Sent]] = dict

    def note(self, moment: str) -> None:
        """Begins, if this is the moment."""
        if moment == self._moment and self._job.senders.clients:
            self._end = self._stand.begin_beside(self._job)

    def took(self) -> Document:
        """Waits for them; returns how long `produce` took, by node."""
        leader = self._stand.cluster.leader()
        leads = None if leader is None else leader.id
        return {
            name + " (leads)" * (name == leads): asdict(Spread.of(sent.times_ms))
            for name, sent in self._end().items()
        }


class Spent:
    """CPU of all processes at the moments of a load; the first of them is rest."""

    def __init__(self, watch: Watch) -> None:
        """Begins, at rest."""
        self._watch = watch
        self._at = [("rest", *self._now())]

    def note(self, moment: str) -> None:
        """Notes what was spent until now."""
        self._at.append((moment, *self._now()))

    def cpu_us(self, rate_per_s: int) -> dict[str, float] | None:
        """Returns what a message costs beyond rest, and a call beyond the messages beside it."""
        if [moment for moment, _, _ in self._at] != ["rest", SENDS, CALLS, ENDS]:
            return None
        shares = [
            (cpu_s - cpu_before_s) / (at_s - before_s)
            for (_, before_s, cpu_before_s), (_, at_s, cpu_s) in pairwise(self._at)
        ]
        message, call = (1e6 * (more - less) / rate_per_s for less, more in pairwise(shares))
        return {"message": message, "call": call}

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), sum(used.cpu_s for used in self._watch.read().values())


def _disturbed(parts: dict[str, Part]) -> str:
    found = [disturbances(part.cost) for part in parts.values() if part.cost is not None]
    return "; ".join(filter(None, found))


def as_document(part: Part) -> Document:
    """Returns a part of a round as JSON values."""
    messages, groups = part.messages, sum(part.groups.values())
    in_one_second = len(part.over_time) == 1
    return {
        "messages": part.sent.messages,
        "per_s": round(part.sent.per_s) if messages else 0,
        "seconds": part.seconds,
        "transactions": part.sent.transactions,
        "lateness": asdict(part.lateness) if part.lateness else None,
        "last_s": part.last_ms / 1000 - part.over_time[0].second if in_one_second else None,
        "over_time": [asdict(second) for second in part.over_time],
        "cpu_share": {name: used.cpu_s / part.seconds for name, used in part.used.items()},
        "cpu_us_a_message": {
            name: used.cpu_s * 1e6 / messages for name, used in part.used.items() if messages
        },
        "switches_per_s": {name: used.switches / part.seconds for name, used in part.used.items()},
        "switches_a_group": {
            name: used.switches / groups for name, used in part.used.items() if groups
        },
        "groups": part.groups,
        "cpu_over_time": part.cpu,
        "busy_share": part.cost.cpu_busy_share if part.cost else None,
    }


def our_cpu_share(part: Mapping[str, Any], kind: str = "ours") -> float:
    """Returns the CPU share of the processes of all nodes and of the SDK; 1 is one core.

    Args:
        part: A part of a round.
        kind: `secure`: of the second cluster's.
    """
    shares: Mapping[str, float] = part["cpu_share"]
    return sum(
        share
        for name, share in shares.items()
        if name.startswith(SECURE) == (kind == "secure")
        and ("sender ours" in name or name.endswith((" server", " cleaner", " node")))
    )


def compared(rounds: list[Document]) -> Document:
    """Compares our figures with Kafka's own, or ingress with the SDK, over all rounds."""
    figures: Document = {}
    ours = [one["ours"] for one in rounds]
    cpu = Extent.of([our_cpu_share(one) for one in ours])
    figures["cpu_share"] = asdict(cpu) if cpu else None
    if rounds and "ingress" in rounds[0]:
        _compare(figures, [one["ingress"] for one in rounds], "SDK", ours)
    for kind in ("halves", "secure", "traced"):
        if rounds and kind in rounds[0]:
            others = [one[kind] for one in rounds]
            _compare(figures, others, "without", ours)
            shares = [our_cpu_share(one, kind) for one in others]
            cpu = ratios(shares, [our_cpu_share(one) for one in ours])
            figures["cpu_share / without"] = asdict(cpu) if cpu else None
    for kind in ("watched", "crowd"):
        if rounds and kind in rounds[0]:
            _compare(figures, [one[kind] for one in rounds], f"nobody looks, {kind}", ours)
    if rounds and "at_once" in rounds[0]:
        committed, sent = ([one[kind] for one in rounds] for kind in ("halves", "at_once"))
        _compare(figures, committed, "due when sent", sent)
    for other in ("plain", "floor"):
        if rounds and other in rounds[0]:
            _compare(figures, ours, other, [one[other] for one in rounds])
    return figures


def _compare(figures: Document, ours: list[Document], other: str, theirs: list[Document]) -> None:
    """Puts the ratios of figures, and the differences of times, into a document."""
    if figure := _rate_figure(ours[0]):
        rates = ratios([one[figure] for one in ours], [one[figure] for one in theirs])
        figures[f"{figure} / {other}"] = asdict(rates) if rates else None
    for figure in ("p50_ms", "p99_ms") if ours[0]["lateness"] else ():
        values = [[one["lateness"][figure] for one in side] for side in (ours, theirs)]
        for sign, how in (("/", ratios), ("-", differences)):
            extent = how(values[0], values[1])
            figures[f"{figure} {sign} {other}"] = asdict(extent) if extent else None


def _rate_figure(part: Document) -> str | None:
    """Returns the figure for speed; None if the rate was given."""
    if part["last_s"]:
        return "last_s"
    return None if part["lateness"] else "per_s"
