"""Handles SIGHUP: has the node's settings read again, and informs its processes.

Like the supervisor it uses the standard library alone: another process reads and checks them.
"""

import json
import os
import subprocess
import sys
from typing import Final, NamedTuple

from delaywheel_replica.process.inheritance import RESOLVED_VARIABLE, SOURCES_VARIABLE

_COMMAND: Final = (sys.executable, "-P", "-m", "delaywheel_replica.node_config")


class Reread(NamedTuple):
    """The result of reading the settings again.

    Attributes:
        taken: What the node's processes take over.
        kept: What has changed as well, and only a restart takes over.
        fault: Why the settings stay as they are; None: they do not.
    """

    taken: list[str]
    kept: list[str]
    fault: str | None = None


class Reload:
    """Reloads the settings that can change while the node runs.

    Attributes:
        settings_fd: A file in memory with the settings last reloaded, for the node's processes.
    """

    def __init__(self) -> None:
        self.settings_fd = os.memfd_create("settings")
        self._output_fd = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._again = False
        self.pidfd = -1

    def begin(self) -> str | None:
        """Starts to read; returns why not, if it does not."""
        if SOURCES_VARIABLE not in os.environ:
            return "where they were read from is not known"
        if self._process is not None:  # it may have read the file already
            self._again = True
            return None
        self._output_fd = os.memfd_create("reread")
        try:
            process = subprocess.Popen(
                _COMMAND, stdin=subprocess.DEVNULL, stdout=self._output_fd, process_group=0
            )
            self._process, self.pidfd = process, os.pidfd_open(process.pid)
        except OSError as error:
            self.close()
            return str(error)
        return None

    def end(self) -> Reread:
        """Returns the settings once the process has ended; later children get them too."""
        assert self._process is not None
        code = self._process.wait()
        content = os.pread(self._output_fd, os.fstat(self._output_fd).st_size, 0).decode()
        self.close()
        if code != 0:
            return Reread([], [], content.strip() or f"exit code {code}")
        read = json.loads(content)
        if read["taken"]:
            known = json.loads(os.environ[RESOLVED_VARIABLE])
            os.environ[RESOLVED_VARIABLE] = json.dumps({**known, **read["settings"]})
            document = json.dumps(read["settings"]).encode()
            os.pwrite(self.settings_fd, document, 0)
            os.ftruncate(self.settings_fd, len(document))
        return Reread(read["taken"], read["kept"])

    def wanted_again(self) -> bool:
        """Whether another signal came meanwhile; true only once."""
        again, self._again = self._again, False
        return again

    def close(self) -> None:
        """Stops reading, if under way."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self._output_fd >= 0:
            os.close(self._output_fd)
            self._output_fd = -1
