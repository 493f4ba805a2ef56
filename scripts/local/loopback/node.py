"""One node on loopback, run as users do: `delaywheel serve` with a configuration file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from local.loopback.child import await_end, start_child

STOP_TIMEOUT_S = 40.0
# A node that dies over and over is restarted more and more slowly.
RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 5.0)
STEADY_AFTER_S = 10.0
# As the ready file names them; the supervisor first, so that it restarts nothing that is killed.
PROCESSES = ("pid", "server_pid", "cleaner_pid")


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to those of the processes that are alive."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it died with its parent, as it should


def to_toml(settings: Mapping[str, Any]) -> str:
    """Formats settings as TOML: plain values first, then one table for each mapping."""
    plain = {name: value for name, value in settings.items() if not isinstance(value, Mapping)}
    tables = {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in plain.items()]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


class Node:
    """One node: its files and the supervisor process that runs it.

    Attributes:
        python: That of the environment whose delaywheel it runs.
    """

    def __init__(
        self, node_id: str, folder: Path, *, port: int, peer_port: int, metrics_port: int
    ) -> None:
        """Prepares; nothing runs before `start`."""
        self.id = node_id
        self.python = sys.executable
        self.address = f"127.0.0.1:{port}"
        self.peer_address = f"127.0.0.1:{peer_port}"
        self.metrics_address = f"127.0.0.1:{metrics_port}"
        self.data = folder / node_id
        self.log = folder / f"{node_id}.log"
        self.config = folder / f"{node_id}.toml"
        self._process: subprocess.Popen[bytes] | None = None
        # Which was asked to end.
        self._asked: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._quick_deaths = 0

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Writes the configuration file; None unsets a setting."""
        self.data.mkdir(0o750, parents=True, exist_ok=True)
        own = {
            "node_id": self.id,
            "listen": self.address,
            "metrics_listen": self.metrics_address,
            "data_dir": str(self.data),
        }
        known = {**own, **settings}
        self.config.write_text(to_toml({n: v for n, v in known.items() if v is not None}))

    @property
    def command(self) -> list[str]:
        """Returns the command that a user would run."""
        program = [self.python, "-m", "delaywheel_replica.cli.app"]
        return [*program, "serve", "--config", str(self.config)]

    def start(self) -> None:
        """Starts the node, which accepts calls a little later."""
        self._started_at = time.monotonic()
        # Another environment's code is its own, whatever path we were given.
        apart = {} if self.python == sys.executable else {"PYTHONPATH": ""}
        self._process = start_child(self.command, log=self.log, environment=apart)

    @property
    def exit_code(self) -> int | None:
        """The node's exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        """Whether its supervisor is alive."""
        return self._process is not None and self._process.poll() is None

    def row(self) -> dict[str, Any]:
        """Returns the node's row of the ready file, without ids of absent processes."""
        pids: dict[str, int | None] = dict.fromkeys(PROCESSES)
        run = self._run_file()
        if run is not None:
            pids = {name: run.get(name) for name in pids}
        return {"id": self.id, "address": self.address, "data": str(self.data), **pids}

    def _run_file(self) -> dict[str, Any] | None:
        """Returns the supervisor's report on its processes, unless it is from an earlier run."""
        try:
            run: dict[str, Any] = json.loads((self.data / "node.run").read_text())
        except (OSError, ValueError):
            return None
        current = self._process is not None and self.running and run["pid"] == self._process.pid
        return run if current else None

    @property
    def is_up(self) -> bool:
        """Whether both processes run and the address accepts connections."""
        run = self._run_file()
        return run is not None and all(
            run.get(name) for name in ("server_pid", "cleaner_pid", "address")
        )

    def restart_if_due(self) -> bool:
        """Restarts a dead node if it is time; returns whether it did."""
        lived_s = time.monotonic() - self._started_at
        if self.running:
            if lived_s > STEADY_AFTER_S:
                self._quick_deaths = 0
            return False
        if lived_s < RESTART_DELAYS_S[min(self._quick_deaths, len(RESTART_DELAYS_S) - 1)]:
            return False
        self._quick_deaths += 1
        self.start()
        return True

    def pids(self, names: Iterable[str] = PROCESSES) -> list[int]:
        """Returns the ids of its running processes."""
        row = self.row()
        return [row[name] for name in names if row[name] is not None]

    def kill(self) -> None:
        """Ends every process of the node with SIGKILL, the supervisor first."""
        send_signal(self.pids(), signal.SIGKILL)

    def ask_to_stop(self) -> None:
        """Begins a clean stop without waiting."""
        process = self._process
        if process is not None and process is not self._asked and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            self._asked = process  # a second signal would have it killed

    def stop(self) -> None:
        """Stops the node cleanly, or by force if that takes too long."""
        if self._process is not None:
            self.ask_to_stop()
            await_end(self._process, patience_s=STOP_TIMEOUT_S)

    def log_tail(self) -> str:
        """Returns the end of its processes' output."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""
