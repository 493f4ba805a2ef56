"""Logging of the node's processes: structlog to stderr, for people or as JSON.

Libraries that use ``logging`` are bridged into the same stream and format.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

from delaywheel_replica.process.inheritance import log_stream


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
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
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
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
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


def _named(names: Mapping[str, str]) -> structlog.typing.Processor:
    """Adds names, which bound context would add for one thread only."""

    def add(
        _logger: WrappedLogger, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event.update(names)
        return event

    return add
