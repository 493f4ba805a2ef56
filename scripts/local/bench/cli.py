"""The arguments of scripts/bench."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from local.bench.jobs import VALUE_BYTES
from local.bench.page import write_page
from local.bench.report import print_report
from local.bench.running import Options, Runner
from local.bench.stand import Stand
from local.bench.workloads import USUAL, WORKLOADS, Far, Halves, Steady
from local.loopback.child import interrupt_on_signals
from local.loopback.cluster import ClusterError
from local.loopback.kafka_jars import KafkaError
from local.stage.distance import Distance

SECONDS, SHORT_SECONDS = 20.0, 5.0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def argument_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    listed = "\n".join(f"  {name:15} {each.description}" for name, each in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure delaywheel beside Kafka itself, in rounds.",
        epilog=f"workloads (if none is named: {', '.join(USUAL)}):\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="*", help="see below; each has its own cluster")
    parser.add_argument("--nodes", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--brokers", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how many (default: 5)")
    parser.add_argument(
        "--seconds", type=float, help="of each part of a round (default: 20; with --short: 5)"
    )
    parser.add_argument(
        "--cadence-ms", type=float, default=25, help="of Kafka's transactions (default: 25)"
    )
    parser.add_argument(
        "--short", action="store_true", help="one round of 5 s, nothing is warmed: no figures"
    )
    parser.add_argument(
        "--alone", action="store_true", help="steady rates without Kafka's own figures beside"
    )
    parser.add_argument(
        "--secure",
        action="store_true",
        help="beside, a second cluster: mutual TLS on all ports, grants with a quota (steady-…)",
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write all figures here")
    parser.add_argument("--page", type=Path, metavar="F", help="write an HTML page here")
    return parser


def _parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and the names of the workloads."""
    parser = argument_parser()
    asked = parser.parse_args(arguments)
    names = asked.workload or list(USUAL)
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"no such workload: {', '.join(unknown)}")
    options = options_of(asked)
    given = (asked.nodes, asked.brokers, options.rounds, options.seconds, asked.cadence_ms)
    if min(given) <= 0:
        parser.error("--nodes, --brokers, --rounds, --seconds and --cadence-ms must be above 0")
    if asked.secure and not all(isinstance(WORKLOADS[name].kind, Steady) for name in names):
        parser.error("--secure is for workloads at a steady rate")
    return asked, names


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the requested measurements."""
    asked, names = _parsed(arguments)
    options = options_of(asked)
    interrupt_on_signals()
    document: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "value_bytes": VALUE_BYTES,
        "cadence_ms": asked.cadence_ms,
        "workloads": [],
    }
    try:
        for name in names:
            for nodes in WORKLOADS[name].nodes or (asked.nodes,):
                document["workloads"].append(_measured(name, nodes, asked, options))
    except KeyboardInterrupt:
        code = 130
    except (ClusterError, KafkaError) as error:
        _say(str(error))
        code = 1
    else:
        code = 0
    # Earlier measurements are not lost.
    if asked.json:
        asked.json.write_text(json.dumps(document, indent=2) + "\n")
    if asked.page:
        write_page(asked.page, document)
    print_report(document)
    return code


def options_of(asked: argparse.Namespace) -> Options:
    """Returns how to measure, by the arguments."""
    seconds = SHORT_SECONDS if asked.short else SECONDS
    return Options(
        rounds=1 if asked.short else asked.rounds,
        seconds=seconds if asked.seconds is None else asked.seconds,
        warm=not asked.short,
        alone=asked.alone,
    )


def _measured(name: str, nodes: int, asked: argparse.Namespace, options: Options) -> dict[str, Any]:
    """Measures a workload, in a network of its own if all is to be far from each other.

    Raises:
        ClusterError: It failed; in a network of its own, it has said how.
    """
    kind = WORKLOADS[name].kind
    if not isinstance(kind, Far) or not kind.one_way_ms:
        return _measure(name, nodes, asked, options)
    # In a process of its own: whatever threads are here, gRPC's say, stay in the network of before.
    spawning = multiprocessing.get_context("spawn")
    answer, theirs = spawning.Pipe(duplex=False)
    with Distance(kind.one_way_ms):
        child = spawning.Process(target=_answer, args=(theirs, name, nodes, asked, options))
        child.start()
        theirs.close()
        try:
            document: dict[str, Any] = answer.recv()
        except EOFError:
            raise ClusterError(f"{name} failed") from None
        except BaseException:
            child.terminate()
            raise
        finally:
            child.join()
    return document


def _answer(
    to: Connection, name: str, nodes: int, asked: argparse.Namespace, options: Options
) -> None:
    interrupt_on_signals()
    to.send(_measure(name, nodes, asked, options))


def _measure(name: str, nodes: int, asked: argparse.Namespace, options: Options) -> dict[str, Any]:
    workload = WORKLOADS[name]
    _say(f"{name}: {workload.description}; {nodes} node(s), {asked.brokers} broker(s)")
    with Stand(
        nodes,
        workload.span_s,
        asked.cadence_ms / 1000,
        _say,
        brokers=asked.brokers,
        topics=workload.topics,
        programs=workload.senders.programs,
        is_secure=asked.secure,
        has_halves=isinstance(workload.kind, Halves),
        is_traced=workload.is_traced,
    ) as stand:
        runner = Runner(stand, options, _say, topics=workload.topics)
        warmth_ms = runner.warm()
        measured = runner.run(workload)
    return {
        "name": name,
        "description": workload.description,
        "nodes": nodes,
        "brokers": asked.brokers,
        "is_secure": asked.secure,
        "pending": workload.pending,
        "warmth_ms": warmth_ms,
        **measured,
    }


if __name__ == "__main__":
    sys.exit(main())
