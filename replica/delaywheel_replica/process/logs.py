"""Logging of the node's processes: structlog to stderr, for people or as JSON.

Libraries that use ``logging`` are bridged into the same stream and format. What they say, and what
is said of strangers (`stranger_refused`, `limited`), is limited by kind, as strangers choose how
often (line_limit.py); our other lines are all written. No text in a line is longer than
`_FIELD_AT_MOST`, and no traceback than `_TRACEBACK_AT_MOST`.
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from threading import Timer
from traceback import walk_tb
from typing import Any, Final, Literal, TextIO

from delaywheel_replica.process.inheritance import log_stream
from delaywheel_replica.process.line_limit import LineLimit, cut


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Makes a module appear as not installed while it is imported."""
    before = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]  # makes the import system treat it as absent
    try:
        yield
    finally:
        del sys.modules[package]
        if before is not None:
            sys.modules[package] = before


# structlog imports rich if it is installed, to format tracebacks in a way that we do not use: a
# tenth of the CPU that a node's processes need to start. So only this module imports structlog.
with _hidden("rich"):
    import structlog
    from structlog.tracebacks import ExceptionDictTransformer
    from structlog.typing import WrappedLogger

# Without local variables: they may contain callers' messages, and formatting them takes the event
# loop half a second.
_TRACEBACKS: Final = ExceptionDictTransformer(show_locals=False)

get_logger: Final = structlog.get_logger  # noqa: TID251 - all other modules import it from here

LINES_AS_THEY_ARE: Final = ("delaywheel.audit",)
"""Loggers whose lines are JSON already, whatever the format and level of all others."""

_LIMITED: Final = "delaywheel.limited"
_FIELD_AT_MOST: Final = 4_000
_TRACEBACK_AT_MOST: Final = 12_000

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def set_up_logging(
    process: str, *, node: str, cluster: str, log_format: LogFormat, level: LogLevel
) -> None:
    """Gives all log lines of this process one format, with the process's name.

    Those of JSON also name node and cluster: collectors mix the lines of many nodes.
    """
    stream = log_stream()
    names = {"process": process}
    if log_format == "json":
        names |= {"node": node, "cluster": cluster}
    shared: list[structlog.typing.Processor] = [
        _named(names),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor
    if log_format == "json":
        shared.append(structlog.processors.ExceptionRenderer(_TRACEBACKS))
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=_short_traceback
        )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = _Handler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _short,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)
    lines = logging.StreamHandler(stream)
    lines.setFormatter(logging.Formatter("%(message)s"))
    for name in LINES_AS_THEY_ARE:
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [lines], False
        logger.setLevel(logging.INFO)


def set_level(level: LogLevel) -> None:
    """Sets the level from which this process logs."""
    logging.getLogger().setLevel(level.upper())


def limited() -> Any:
    """Returns a logger for what strangers may cause as often as they like."""
    return get_logger(_LIMITED)


def stranger_refused(port: str, reason: str, text: str) -> None:
    """Logs that somebody was refused at a setting's port before it said who it is, and why."""
    limited().warning("stranger refused", port=port, reason=reason, text=cut(text))


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines; those of libraries and of strangers as a limit allows."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._limit: Final = LineLimit()
        self._timer: Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, or counts it. Its caller holds the lock."""
        kind = _kind_of(record)
        if kind is None or self._limit.take(kind, _text_of(record)):
            super().emit(record)
        elif self._timer is None and self._limit.due_s is not None:
            self._timer = Timer(max(0.0, self._limit.due_s - time.monotonic()), self._tell)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Tells what is counted so far: the process ends."""
        self._tell()
        super().close()

    def _tell(self) -> None:
        with self.lock:  # type: ignore[union-attr]  # only a handler that was never made has none
            self._timer = None
            counts = self._limit.counted(ended=True)
        for kind, count in counts.items():
            get_logger(__name__).warning("lines left out", kind=kind, count=count)


def _kind_of(record: logging.LogRecord) -> str | None:
    """Returns of which kind a line is that strangers may cause; None: they do not."""
    if not isinstance(record.msg, dict):  # of a library; its arguments are not filled in
        return cut(f"{record.name}: {record.msg}")
    if record.name != _LIMITED:
        return None
    named = (record.msg.get(name) for name in ("event", "port", "reason"))
    return " ".join(str(name) for name in named if name is not None)


def _text_of(record: logging.LogRecord) -> str:
    """Returns what tells lines of a kind apart: what they say, and where an error is from."""
    said = record.msg.get("text") if isinstance(record.msg, dict) else record.getMessage()
    error = record.exc_info[1] if record.exc_info else sys.exc_info()[1]
    if error is None:
        return cut(str(said))
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return cut(f"{type(error).__name__} {places[-1:]} {said}")


def _short(
    _logger: WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Cuts the texts of a line, and those of an exception within it."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = cut(value, _FIELD_AT_MOST)
    for error in event.get("exception") or ():
        if isinstance(error, dict):
            error["exc_value"] = cut(error["exc_value"], _FIELD_AT_MOST)
    return event


def _short_traceback(stream: TextIO, error: structlog.typing.ExcInfo) -> None:
    """Writes a traceback for people: each line of it bounded, and all of it."""
    whole = StringIO()
    structlog.dev.plain_traceback(whole, error)
    lines = (cut(line, _FIELD_AT_MOST // 4) for line in whole.getvalue().split("\n"))
    stream.write(cut("\n".join(lines), _TRACEBACK_AT_MOST))


def _named(names: Mapping[str, str]) -> structlog.typing.Processor:
    """Adds names, which bound context would add for one thread only."""

    def add(
        _logger: WrappedLogger, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event.update(names)
        return event

    return add
