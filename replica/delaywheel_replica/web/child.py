"""The page as a third child of a node's supervisor: what the supervisor keeps of it, and its start.

It never counts for the node: it is started once the server takes calls, again when it has ended,
later with each short life, and not any more after exit code 78, which a restart would not change.
The supervisor uses the standard library alone, and so does this module until it is the child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from delaywheel_replica.process.inheritance import (
    ADDRESS_VARIABLE,
    EXIT_HOPELESS,
    LIFE_FD_VARIABLE,
    RESOLVED_VARIABLE,
    SOURCES_VARIABLE,
    exit_with_supervisor,
)

PAGE_COMMAND: Final = (sys.executable, "-P", "-m", "delaywheel_replica.web.child")
_NICE: Final = 10
_SHORT_LIFE_S: Final = 10.0
_BACKOFF_AT_MOST_S: Final = 60.0


class PageChild:
    """The process, over all its restarts.

    Attributes:
        pidfd: Readable once it has ended; negative: it does not run.
        start_at_s: When its next life begins, by the monotonic clock; None: it runs, or never will.
    """

    def __init__(self, command: Sequence[str], life_fd: int, stderr_fd: int) -> None:
        self.pidfd = -1
        self.start_at_s: float | None = 0.0
        self._command: Final = command
        self._life_fd: Final = life_fd
        self._stderr_fd: Final = stderr_fd
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._short_lives = 0

    def start_if_due(self, address: str) -> None:
        """Starts it, for a server that takes calls there."""
        if self.start_at_s is None or time.monotonic() < self.start_at_s:
            return
        self._started_s = time.monotonic()
        own = {ADDRESS_VARIABLE: address, LIFE_FD_VARIABLE: str(self._life_fd)}
        try:
            process = subprocess.Popen(
                self._command,
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stderr=self._stderr_fd,
                pass_fds=(self._life_fd,),
                process_group=0,
            )
            self.pidfd = os.pidfd_open(process.pid)
        except OSError:  # the machine is short of something, which passes
            self._start_later()
            return
        self._process, self.start_at_s = process, None

    def ended(self) -> int:
        """Takes note of its end; returns the exit code."""
        code = self._reap()
        if code != EXIT_HOPELESS:
            self._start_later()
        return code

    def kill(self) -> None:
        """Ends it for good."""
        self.start_at_s = None
        if self._process is not None:
            self._process.kill()
            self._reap()

    def _reap(self) -> int:
        assert self._process is not None
        code = self._process.wait()
        with suppress(OSError):
            os.close(self.pidfd)
        self._process, self.pidfd = None, -1
        return code

    def _start_later(self) -> None:
        now_s = time.monotonic()
        is_short = now_s - self._started_s < _SHORT_LIFE_S
        self._short_lives = self._short_lives + 1 if is_short else 0
        self.start_at_s = now_s + min(2.0**self._short_lives - 1, _BACKOFF_AT_MOST_S)


def words(settings: Mapping[str, Any], file: str | None, address: str) -> list[str]:
    """Returns the command line of a node's page.

    The file is the one that the settings are read from; the server takes calls at the address.
    """
    host, _, port = address.rpartition(":")
    if settings["advertised"] is not None:
        host = settings["advertised"].rpartition(":")[0]
    if settings["token_listen"] is not None:
        port = settings["token_listen"].rpartition(":")[2]
    said = ["web", f"--listen={settings['web_listen']}", f"--host={host}"]
    said.append(f"--server={host}:{port}")
    if file is not None:
        said.append(f"--config={file}")
    if settings["tls_cert"] is not None:
        ca = settings["tls_ca"] or settings["tls_client_ca"]
        said += ["--tls", *([] if ca is None else [f"--tls-ca={ca}"])]
        said += [f"--page-cert={settings['tls_cert']}", f"--page-key={settings['tls_key']}"]
    return [*said, *(["--insecure"] if settings["insecure"] else [])]


def main() -> None:
    """Becomes the command `web`, as a child."""
    exit_with_supervisor()
    os.nice(_NICE)
    settings = json.loads(os.environ.pop(RESOLVED_VARIABLE))
    sources = json.loads(os.environ.pop(SOURCES_VARIABLE, "{}"))
    said = words(settings, sources.get("file"), os.environ[ADDRESS_VARIABLE])
    # Only here: the supervisor needs nothing of it.
    from delaywheel_replica.cli import app  # noqa: PLC0415

    app.main(said)


if __name__ == "__main__":
    main()
