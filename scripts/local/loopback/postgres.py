"""A PostgreSQL of its own on a Unix socket, for programs that have their orders there."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from local.loopback.child import end_child, start_child

START_S = 60.0
OWNER = "postgres"


def find_postgres() -> Path | None:
    """Returns the folder of PostgreSQL's programs; None if it is not on this machine."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: path.parts)
    on_path = shutil.which("initdb")
    programs = [*found, *([Path(on_path)] if on_path else [])]
    return programs[-1].parent if programs else None


def has_postgres() -> bool:
    """Whether both the server and its driver are on this machine."""
    return find_postgres() is not None and importlib.util.find_spec("psycopg") is not None


class LocalPostgres:
    """A server that ends with the thread that started it, and whose folder goes with it.

    Attributes:
        dsn: How to connect.
    """

    def __init__(self, programs: Path) -> None:
        # Short, as the names of sockets have to be.
        self._folder = Path(tempfile.mkdtemp(prefix="dw-pg-"))
        self._programs = programs
        self.dsn = f"host={self._folder} dbname=postgres user={OWNER}"
        self._as_owner: list[str] = []
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            owner = pwd.getpwnam(OWNER)
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
            self._as_owner = [
                *("setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}"),
                *("--clear-groups", "--pdeathsig", "KILL"),
            ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            *(str(self._programs / "initdb"), "--pgdata", str(self._folder / "data")),
            *("--username", OWNER, "--auth", "trust", "--encoding", "UTF8", "--no-sync"),
        ]
        subprocess.run([*self._as_owner, *command], check=True, stdout=subprocess.DEVNULL, cwd="/")
        self.start()
        return self

    def start(self) -> None:
        """Starts the server, also after `kill`."""
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._folder),
            "fsync": "off",  # it is never the machine that fails
            "max_connections": "60",
            "track_commit_timestamp": "on",
        }
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data")]
        for name, value in settings.items():
            command += ("-c", f"{name}={value}")
        log = self._folder / "log"
        self._process = start_child([*self._as_owner, *command], log=log)
        import psycopg  # noqa: PLC0415 - not everywhere

        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.dsn).close()
            except psycopg.OperationalError:
                assert self._process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        """Ends it at once: what its clients had begun is rolled back by the next start.

        Its own way of that: killed by the system, it leaves processes that keep its memory.
        """
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # what is open is rolled back
            end_child(self._process, patience_s=10.0)
        shutil.rmtree(self._folder, ignore_errors=True)
