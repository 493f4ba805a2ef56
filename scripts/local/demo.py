"""The demo: thousands of delayed messages through nodes whose leader is killed midway, all checked.

The main thread runs the show (a restarted node lives as long as the thread that started it):
it kills the leader when it is time, lets the cluster restart it and draws the view. A second
thread makes the messages when they are to be sent; the SDK sends them in the background, and
retries while a node is away. A consumer in a process of its own reads what becomes visible.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from delaywheel import Client, Result
from local.child import interrupt_on_signals
from local.cluster import ClusterError, LocalCluster
from local.kafka import KafkaError
from local.mirrors import Mirrors, compare
from local.observer import Observer
from local.tally import Content, Header, Tally, Verdict
from local.view import LiveView, PlainView, Sample, View, verdict_text

TOPIC = "demo"
PARTITIONS = 3
LEAD_S = (0.3, 6.0)
SHOW_EVERY_S = 0.1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A message that was taken is never given up by the demo earlier than this after the last arrival.
PATIENCE_S = 30.0
SEND_TIMEOUT_S = 60.0
MIRRORS_WITHIN_S = 20.0


class Planned(NamedTuple):
    """A message to be made and sent at a time of the run, and its due."""

    send_after_s: float
    due_after_s: float
    content: Content


def plan(messages: int, seconds: float, chance: random.Random) -> list[Planned]:
    """Messages with random dues over these seconds, each sent a random while ahead.

    Among them is what is easily mistaken: null and empty keys, values and header values,
    headers of the same name, and bytes that are no text.
    """
    planned = []
    for number in range(messages):
        due_after_s = chance.uniform(1.0, max(seconds, 1.0))
        send_after_s = max(0.0, due_after_s - chance.uniform(*LEAD_S))
        planned.append(Planned(send_after_s, due_after_s, _content(number, chance)))
    return sorted(planned)


def _content(number: int, chance: random.Random) -> Content:
    key = chance.choice((None, b"", f"order-{number % 997}".encode()))
    value = chance.choice((None, b"", b"\x00\xff" + chance.randbytes(chance.randint(1, 300))))
    if number % 8:
        value = f'{{"order": {number}, "state": "unpaid"}}'.encode()
    headers: list[Header] = [("trace", chance.randbytes(16)), ("attempt", b"1"), ("attempt", b"2")]
    headers += chance.choice(([], [("empty", b"")], [("null", None)]))
    return Content(key, value, tuple(headers))


class Sending:
    """Makes every message when it is time, and sends it in the background, from a thread."""

    def __init__(self, client: Client, planned: Sequence[Planned], tally: Tally) -> None:
        """Prepares; nothing is sent before `start`."""
        self._client = client
        self._planned = planned
        self._tally = tally
        self._thread = threading.Thread(target=self._run, name="sending", daemon=True)
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self.started_at = 0.0

    def start(self) -> None:
        """Begins: the times of the plan count from now."""
        self.started_at = time.time()
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether every message was taken, refused or given up.

        Raises:
            Exception: What went wrong in the thread.
        """
        if self._failure is not None:
            raise self._failure
        return self._tally.accepted + self._tally.not_accepted == len(self._planned)

    def stop(self) -> None:
        """Sends nothing more."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            for planned in self._planned:
                wait_s = self.started_at + planned.send_after_s - time.time()
                if self._stopped.wait(wait_s) if wait_s > 0 else self._stopped.is_set():
                    return
                self._send(planned)
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            self._failure = error

    def _send(self, planned: Planned) -> None:
        due_ms = round((self.started_at + planned.due_after_s) * 1000)
        key, value, headers = planned.content
        pending = self._client.produce_async(
            TOPIC,
            value,
            key=key,
            headers=headers,
            deliver_at=EPOCH + timedelta(milliseconds=due_ms),
        )
        self._tally.sent(pending.message.id, due_ms, planned.content)
        pending.add_done_callback(self._settled)

    def _settled(self, result: Result) -> None:
        if result.handle is not None and result.message.due_ms is not None:
            self._tally.acknowledged(result.message.id, result.message.due_ms)
        else:
            self._tally.not_acknowledged()


class Show:
    """One run of the demo on a cluster that is up."""

    def __init__(
        self,
        cluster: LocalCluster,
        observer: Observer,
        sending: Sending,
        tally: Tally,
        view: View,
    ) -> None:
        """Puts the parts together."""
        self._cluster = cluster
        self._observer = observer
        self._sending = sending
        self._tally = tally
        self._view = view
        self._sample = Sample(cluster.nodes, tally, observer.records)
        self.killed_at_ms: float | None = None

    def run(self, *, kill_after_s: float | None) -> Verdict:
        """Sends, kills, watches until everything has arrived or nothing more comes."""
        self._sending.start()
        quiet_since = time.monotonic()
        arrived = 0
        while not self._is_over(quiet_since):
            time.sleep(SHOW_EVERY_S)
            elapsed_s = time.time() - self._sending.started_at
            if kill_after_s is not None and self.killed_at_ms is None and elapsed_s > kill_after_s:
                self._kill()
            self._cluster.watch()
            self._sample.take(elapsed_s)
            self._view.show(self._sample)
            if len(self._observer.records) != arrived or not self._sending.is_over:
                arrived = len(self._observer.records)
                quiet_since = time.monotonic()
        return self._tally.verdict(self._observer.records, killed_at_ms=self.killed_at_ms)

    def _is_over(self, quiet_since: float) -> bool:
        if not self._sending.is_over:
            return False
        everything = self._sample.delivered >= self._tally.accepted
        return everything or time.monotonic() - quiet_since > PATIENCE_S

    def _kill(self) -> None:
        node = self._cluster.leader()
        if node is None:
            return  # nobody leads just now: at the next look
        row = node.row()
        self.killed_at_ms = time.time() * 1000
        node.kill()
        pids = ", ".join(str(row[name]) for name in ("pid", "server_pid", "cleaner_pid"))
        self._view.note(f"kill -9 of the leader, {node.id}: supervisor, server, cleaner ({pids})")


def compared(cluster: LocalCluster) -> Mirrors:
    """Compares the nodes' slot files, as soon as they are the same or have had the time for it."""
    deadline = time.monotonic() + MIRRORS_WITHIN_S
    while True:
        mirrors = compare([node.data for node in cluster.nodes])
        if not mirrors.differing or time.monotonic() > deadline:
            return mirrors
        cluster.watch()
        time.sleep(SHOW_EVERY_S)


def run(options: argparse.Namespace) -> tuple[Verdict, Mirrors]:
    """Starts everything, runs the show, ends everything."""
    plain = options.plain or not sys.stdout.isatty()
    view: View = PlainView() if plain else LiveView()
    planned = plan(options.messages, options.seconds, random.Random())  # noqa: S311 - no secret
    tally = Tally()
    with view, LocalCluster(nodes=options.nodes, say=view.note) as cluster:
        view.note("waiting until somebody leads and every node takes messages")
        cluster.wait_until_accepting()
        cluster.create_topic(TOPIC, PARTITIONS)
        client = Client(cluster.nodes[0].address, timeout=SEND_TIMEOUT_S)
        with Observer(cluster.kafka, {TOPIC: PARTITIONS}) as observer:
            view.note(f"sending {options.messages:,} messages, due over {options.seconds:g} s")
            sending = Sending(client, planned, tally)
            try:
                verdict = Show(cluster, observer, sending, tally, view).run(
                    kill_after_s=None if options.no_kill else options.seconds / 2
                )
            finally:
                sending.stop()
                client.close(timeout=1)  # after an interruption nothing is waited for
        mirrors = compared(cluster)
        cluster.keep_folder = not verdict.is_clean or bool(mirrors.differing)
        if cluster.keep_folder:
            view.note(f"logs and data are kept in {cluster.folder}")
        else:
            view.note("done; stopping the nodes and the broker")
    return verdict, mirrors


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
        verdict, mirrors = run(options)
    except KeyboardInterrupt:
        return 130
    except (ClusterError, KafkaError) as error:
        print(error, file=sys.stderr)
        return 1
    print(verdict_text(verdict, mirrors))
    return 0 if verdict.is_clean and not mirrors.differing else 1


if __name__ == "__main__":
    sys.exit(main())
