"""Whether the kernel killed a process of the node since there was no memory, and when it did last.

The kernel says so of a control group: in `memory.events` (version 2) or `memory.oom_control`. Who
is killed cannot write it down, so the supervisor does, into the data folder, where it outlives the
supervisor as well. Not found out is the end of a whole container: its group is gone with it, and
whoever runs it says so (Kubernetes: OOMKilled).
"""

import json
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

FILE: Final = "node.oom"
GROUPS: Final = Path("/sys/fs/cgroup")
_OF_PROCESS: Final = Path("/proc/self/cgroup")
_COUNT: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class MemoryKill(NamedTuple):
    """The last one: of "server" or "cleaner", in Unix milliseconds."""

    process: str
    at_ms: int


class MemoryKills:
    """Tells for want of memory from other kills, for the supervisor."""

    def __init__(self, data: Path) -> None:
        self._file = data / FILE
        self._count = _counted()

    def note(self, process: str, code: int, at_ms: int) -> bool:
        """Notes the end of a process; returns whether the kernel killed it for its memory."""
        before, self._count = self._count, _counted()
        if code != -signal.SIGKILL or self._count <= before:
            return False
        self._file.write_text(json.dumps(MemoryKill(process, at_ms)._asdict()) + "\n")
        return True


def last_kill(data: Path) -> MemoryKill | None:
    """Returns the last one that was noted in a data folder."""
    try:
        return MemoryKill(**json.loads((data / FILE).read_text()))
    except (OSError, ValueError, TypeError):  # none, or half written when the disk was full
        return None


def _counted() -> int:
    """Returns how many processes of this control group were killed so; 0: nobody says it."""
    try:
        groups = _OF_PROCESS.read_text().splitlines()
    except OSError:
        return 0
    paths = {kinds: path.lstrip("/") for _, kinds, path in (line.split(":", 2) for line in groups)}
    for kinds, folder, name in (("memory", "memory", "oom_control"), ("", "", "events")):
        # A container may see its own group as the root, whatever it is called outside.
        for path in (paths.get(kinds, ""), ""):
            file = GROUPS / folder / path / f"memory.{name}"
            with suppress(OSError):
                if found := _COUNT.search(file.read_text()):
                    return int(found[1])
    return 0
