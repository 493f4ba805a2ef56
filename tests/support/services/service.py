"""A whole service under test: `scripts/cluster` with real processes, on a given Kafka."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from delaywheel import Client
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.app import main
from local.loopback.cluster import described
from local.loopback.node import PROCESSES, send_signal
from support.server.forked import Forked, fork_program
from support.services.waiting import wait_until

# The window is for machines so busy that a message waits long for its leader.
QUICK = {
    "late_window_seconds": "30",
    "ledger_seal_seconds": "1",
    # What serves them is a quarter of what a server computes to start.
    "metrics_listen": "null",
}
AGAIN = {3, 4}
"""Exit codes of the command line tool: no node answered, or the outcome is unknown."""


def run_cli_at(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line tool against a node, in this process: to load it takes longest."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code = 0
    with (
        patch.dict(os.environ, {"DELAYWHEEL_SERVER": address}),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    out.seek(0)
    err.seek(0)
    return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


class Service:
    """One node (by default) and the supervisor of `scripts/cluster`, in the foreground of a child.

    Attributes:
        kafka: The broker's address.
        data: The cluster's folder: one folder a node below it.
    """

    def __init__(
        self,
        kafka: str,
        data: Path,
        cluster_id: str,
        *,
        config: Mapping[str, str] | None = None,
        topics: Sequence[str] = (),
        restart: bool = True,
        nodes: int = 1,
    ) -> None:
        """Prepares; nothing runs before `start`."""
        self.kafka = kafka
        self.data = data
        self.cluster_id = cluster_id
        self._ready = data.with_name(data.name + ".ready.json")
        self._log = data.with_name(data.name + ".log")
        self._settings = {**QUICK, "cluster_id": cluster_id, **(config or {})}
        self._topics = topics
        self._restart = restart
        self._nodes = nodes
        self._process: Forked | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop()
        if error is not None:
            print(self.logs())  # noqa: T201 - pytest shows it beside the failure

    def start(self, *, wait: bool = True) -> None:
        """Starts the cluster script; returns once every node accepts (unless asked not to wait)."""
        self._ready.unlink(missing_ok=True)
        arguments = [
            *("--nodes", str(self._nodes), "--kafka", self.kafka, "--data", str(self.data)),
            *("--ready-file", str(self._ready), "--no-page"),
            *([] if self._restart else ["--no-restart"]),
            *(f"--topic={topic}" for topic in self._topics),
            *(f"--config={key}={value}" for key, value in self._settings.items()),
        ]
        self._process = fork_program("cluster", arguments, log=self._log)
        wait_until("the node is up", self._try_node)
        if wait:
            self.wait_accepting()

    def stop(self) -> int | None:
        """Ends it as Ctrl-C does; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise

    def said(self) -> str:
        """What the cluster script has printed."""
        return self._log.read_text(errors="replace")

    def node(self) -> dict[str, Any]:
        """The node's row of the ready file."""
        return wait_until("the ready file names the node", self._try_node)

    def _try_node(self) -> dict[str, Any] | None:
        assert self._process is not None
        assert self._process.poll() is None, f"the cluster script ended:\n{self.logs()}"
        if not self._ready.exists():
            return None
        rows: list[dict[str, Any]] = json.loads(self._ready.read_text())["nodes"]
        row = rows[0]
        return row if row["address"] and row["server_pid"] and row["cleaner_pid"] else None

    @property
    def address(self) -> str:
        """Where the node takes calls."""
        return str(self.node()["address"])

    def client(self, **options: Any) -> Client:
        """A client of the node."""
        return Client(self.address, **options)

    def wait_accepting(self) -> None:
        """Waits until the node has a wheel open and a node leads."""

        def leads() -> bool:
            seen = described(self.address)
            if seen is None or not seen.HasField("leader"):
                return False
            return sum(member.accepting for member in seen.members) == self._nodes

        wait_until("the node accepts and leads", leads)

    def status(self) -> pb.DescribeClusterResponse:
        """The node's description of its cluster."""
        return wait_until("the node answers", lambda: described(self.address))

    def answer_of(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs the command line tool, and retries while that may help; it must succeed."""

        def answered() -> subprocess.CompletedProcess[str] | None:
            done = self.run_cli(*arguments, check=False)
            return None if done.returncode in AGAIN else done

        done = wait_until(f"{arguments} is answered", answered)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    def wait_done(self, due_ms: float) -> None:
        """Waits until all messages due by then are done."""

        wait_until("progress passed it", lambda: self.status().progress.due_ms > due_ms)

    def run_cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs the command line tool against the node."""
        done = run_cli_at(self.address, *arguments)
        if check:
            done.check_returncode()
        return done

    def kill(self, *which: str) -> None:
        """Kills processes of the node (`pid`, `server_pid`, `cleaner_pid`) with SIGKILL."""
        node = self.node()
        send_signal([node[name] for name in which or PROCESSES], signal.SIGKILL)

    def kill_and_wait(self, *which: str) -> None:
        """Kills and waits until the replacement accepts."""
        before = self.node()
        self.kill(*which)
        changed = which or ("server_pid",)
        wait_until(
            "the node is restarted",
            lambda: all(self.node()[name] != before[name] for name in changed),
        )
        self.wait_accepting()

    def logs(self) -> str:
        """The end of every log of this service."""
        files = [self._log, *sorted(self.data.rglob("*.log"))]
        return "\n".join(
            f"== {file}\n{file.read_text(errors='replace')[-4000:]}"
            for file in files
            if file.exists()
        )
