"""Messages of the Kafka client library in the node's log: one format, repetition limited.

The library writes to stderr on its own, and repeats each broken connection for every broker and
client several times a second. Its lines are details of what the cleaner reports in its own words
(`leadership lost`, `transaction`, the status' `kafka_error`), so their levels are lowered:

| the library says | it is logged as |
|---|---|
| that it cannot continue: FATAL, FENCE | info: it was fenced, reported as `leadership lost` |
| anything else that follows from being fenced | info, likewise |
| error, critical | warning |
| warning | info |
| anything else | debug |

Clients hand over their lines when they are polled, on the polling thread. What a call of theirs
raises is no line, and has its error in it (`error_of`).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from delaywheel_replica.process.logs import get_logger

AGAIN_S: Final = 60.0
"""A repeated line is logged once in this time, with the number of repetitions."""

_MOST_KNOWN: Final = 256
"""The most lines that are remembered; beyond that a repeated line counts as new."""

_FENCED: Final = frozenset({"FATAL", "FENCE"})
_OF_A_FENCED: Final = ("fenced by a newer instance", "with an old epoch")
_DIGITS: Final = re.compile(r"[0-9]+")
_SUPPRESSED: Final = re.compile(r", [0-9]+ identical error\(s\) suppressed")
_THREAD: Final = re.compile(r"^\[thrd:[^\]]*\]:? ")

_log = get_logger(__name__)


class ClientLog(logging.Handler):
    """Takes the records of `LOGGER`."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._guard = threading.Lock()
        # Line without its numbers -> when it was logged, and how often it was repeated since.
        self._said: dict[tuple[str, str], tuple[float, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Logs a line of the library, or counts a repeated one."""
        kind, client, text = _parts(record)
        now = self._monotonic()
        with self._guard:
            key = kind, _DIGITS.sub("#", _SUPPRESSED.sub("", text))
            at, repeated = self._said.get(key, (None, 0))
            if at is not None and now - at < AGAIN_S:
                self._said[key] = at, repeated + 1
                return
            if len(self._said) >= _MOST_KNOWN:
                self._said.clear()
            self._said[key] = now, 0
        more = {"repeated": repeated} if repeated else {}
        level = _level(kind, text, record.levelno)
        _log.log(level, "kafka client says", kind=kind, client=client, text=text, **more)


def error_of(exception: KafkaException) -> KafkaError:
    """Returns the error that the library raises."""
    error = exception.args[0]
    assert isinstance(error, KafkaError)
    return error


def _parts(record: logging.LogRecord) -> tuple[str, str, str]:
    """Returns the library's facility, the client, and the text."""
    args = record.args if isinstance(record.args, tuple) else ()
    if len(args) != 3:
        return "", "", record.getMessage()
    kind, client, text = (str(arg) for arg in args)
    return kind, client, _THREAD.sub("", text)


def _level(kind: str, text: str, level: int) -> int:
    if kind in _FENCED or any(words in text for words in _OF_A_FENCED):
        return logging.INFO
    if level >= logging.ERROR:
        return logging.WARNING
    return logging.INFO if level >= logging.WARNING else logging.DEBUG


def _logger() -> logging.Logger:
    logger = logging.getLogger("delaywheel.kafka")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.handlers[:] = [ClientLog()]
    return logger


LOGGER: Final = _logger()
"""The logger for every client."""
