"""The demo: thousands of delayed messages through nodes whose leader is killed, all checked."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

from local.child import interrupt_on_signals
from local.cluster import ClusterError
from local.kafka import KafkaError
from local.stage import Ended, Stage, staged
from local.traffic import plan
from local.view import LiveView, PlainView, View, verdict_text


def play(stage: Stage, options: argparse.Namespace) -> Ended:
    """Sends, kills, watches until everything has arrived or nothing more comes."""
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
    """When it was killed; None: nobody leads just now."""
    node = stage.cluster.leader()
    if node is None:
        return None
    row = node.row()
    killed_at_ms = time.time() * 1000
    node.kill()
    pids = ", ".join(str(row[name]) for name in ("pid", "server_pid", "cleaner_pid"))
    stage.view.note(f"kill -9 of the leader, {node.id}: supervisor, server, cleaner ({pids})")
    return killed_at_ms


def run(options: argparse.Namespace) -> Ended:
    """Starts everything, runs the show, ends everything."""
    plain = options.plain or not sys.stdout.isatty()
    view: View = PlainView() if plain else LiveView()
    with view, staged(view, nodes=options.nodes) as stage:
        return play(stage, options)


def argument_parser() -> argparse.ArgumentParser:
    """The arguments of `scripts/demo`."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Send delayed messages through nodes whose leader is killed midway, and check "
        "that each becomes visible in Kafka once, not early, byte for byte.",
    )
    parser.add_argument("--nodes", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--messages", type=int, default=20_000, help="how many (default: 20000)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="their dues lie within (default: 20)"
    )
    parser.add_argument("--no-kill", action="store_true", help="let every node live")
    parser.add_argument("--plain", action="store_true", help="lines instead of a live view")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; 0 only if nothing was lost, duplicated, early or altered."""
    parser = argument_parser()
    options = parser.parse_args(arguments)
    if options.messages < 1 or options.seconds <= 0 or options.nodes < 1:
        parser.error("--messages, --seconds and --nodes must be above 0")
    interrupt_on_signals()
    try:
        ended = run(options)
    except KeyboardInterrupt:
        return 130
    except (ClusterError, KafkaError) as error:
        print(error, file=sys.stderr)
        return 1
    print(verdict_text(ended.verdict, ended.mirrors))
    return 0 if ended.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
