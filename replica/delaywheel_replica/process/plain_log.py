"""The supervisor's log, and what its children write to standard error beside theirs.

It uses the standard library alone, as the supervisor does, and the format of the other processes
(logs.py). Those log to the node's standard error itself. Whatever else they write there, gRPC's
lines, the traceback of a process that cannot start, a C library's last words, comes through a pipe
of the supervisor's: so it outlives the process, and as JSON each is an event like any other.
A line is at most `_LINE_AT_MOST` characters, none of which controls a terminal, as strangers may
have chosen some. gRPC's are limited by the place in its source that they are from (line_limit.py):
strangers choose how often those come.

| a line | level |
|---|---|
| of gRPC and others that use Abseil | its own; an error counts as a warning: what matters is in the
|                                    | node's own log |
| of a traceback, or of last words   | error |
| any other                          | warning |
"""

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from delaywheel_replica.process.line_limit import LineLimit, cut

_LEVELS: Final = ("debug", "info", "warning", "error")
_READ_BYTES: Final = 1 << 16

_LINE_AT_MOST: Final = 2_000
_CONTROLS: Final = {
    number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160)) if chr(number) != "\t"
}

_HELD_S: Final = 0.5
"""A traceback is written line by line."""

_ABSEIL: Final = re.compile(r"([IWEF])\d{4} \S+ +\d+ (\S+:\d+)\] ")
_ABSEIL_LEVELS: Final = {"I": "info", "W": "warning", "E": "warning", "F": "error"}
_FAILED: Final = ("Traceback (", "Fatal Python error", "terminate called")
_MORE: Final = re.compile(r"[ \t]|$|\w[\w.]*(Error|Exception|Exit)\b")
"""How a line begins that belongs to the one before it, as those of a traceback."""


class PlainLog:
    """Writes events with fields to standard error."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Takes the node's settings; without any it writes for people."""
        self.as_json = settings.get("log_format") == "json"
        self._names = {
            name: settings[f"{name}_id"] for name in ("node", "cluster") if f"{name}_id" in settings
        }
        self.set_level(settings.get("log_level", "info"))

    def set_level(self, level: str) -> None:
        """Sets the level from which events are written."""
        self._least = _LEVELS.index(level)

    def say(
        self, event: str, level: str = "warning", *, process: str = "node", **more: Any
    ) -> None:
        """Writes one event; fields that are None are left out."""
        if _LEVELS.index(level) < self._least:
            return
        timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        fields = {name: value for name, value in more.items() if value is not None}
        if self.as_json:
            named = {**self._names, "process": process, "level": level, "timestamp": timestamp}
            line = json.dumps({"event": event, **fields, **named}, default=str)
        else:
            said = " ".join(
                f"{name}={value}" for name, value in {**fields, "process": process}.items()
            )
            line = f"{timestamp} [{level:<9}] {event:<30} {said}"
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - its only way to talk


class ChildOutput:
    """The pipe that is one child's standard error, over all its restarts.

    Attributes:
        read_fd: Readable when there is something.
        write_fd: What the child gets as its standard error.
    """

    def __init__(self, process: str, log: PlainLog) -> None:
        """Opens the pipe; the child need not live yet."""
        self._process, self._log = process, log
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self._unfinished = b""
        self._held, self._held_s = "", 0.0
        self._limit = LineLimit()

    @property
    def due_s(self) -> float | None:
        """When there is something to log, by the monotonic clock; None: when something has come."""
        held_s = self._held_s + _HELD_S if self._held else None
        return min((s for s in (held_s, self._limit.due_s) if s is not None), default=None)

    def pass_on(self, *, ended: bool = False) -> None:
        """Logs what has come; a traceback once it is whole, a line that has no end at the end."""
        try:
            come = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            come = b""
        lines, _, self._unfinished = (self._unfinished + come).rpartition(b"\n")
        if ended or len(self._unfinished) > _READ_BYTES:
            lines, self._unfinished = lines + b"\n" + self._unfinished, b""
        for each in lines.split(b"\n") if lines else ():
            line = cut(each.decode(errors="replace").translate(_CONTROLS), _LINE_AT_MOST)
            if (
                self._held.startswith(_FAILED)
                and _MORE.match(line)
                and len(self._held) < _READ_BYTES
            ):
                self._held += f"\n{line}"
            else:
                self._let_go()
                self._held, self._held_s = line, time.monotonic()
        is_whole = not self._held.startswith(_FAILED)
        if ended or is_whole or time.monotonic() >= self._held_s + _HELD_S:
            self._let_go()
        for kind, count in self._limit.counted(ended=ended).items():
            self._log.say("lines left out", process=self._process, kind=kind, count=count)

    def _let_go(self) -> None:
        text, self._held = self._held.rstrip(), ""
        if text:
            self._say(text)

    def _say(self, text: str) -> None:
        abseil = _ABSEIL.match(text)
        said = text
        if abseil is not None:
            level, source, said = _ABSEIL_LEVELS[abseil[1]], abseil[2], text[abseil.end() :]
            if not self._limit.take(source, said):
                return
        else:
            level, source = "error" if text.startswith(_FAILED) else "warning", None
        if not self._log.as_json:  # people read it as it came
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - as PlainLog's
            return
        self._log.say("standard error", level, process=self._process, text=said, source=source)
