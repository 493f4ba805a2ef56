"""Ends the process at a defect, so that a node is never half alive.

The supervisor starts the process again.

| an exception in | ends the process by |
|---|---|
| a thread of ours | ``end_with_any_thread`` |
| a callback of asyncio's loop, which would only log it | ``fatal`` |
"""

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from delaywheel_replica.process.logs import get_logger

_P = ParamSpec("_P")
_R = TypeVar("_R")

_log = get_logger(__name__)


def end_with_any_thread() -> None:
    """Makes an exception in any thread end the process, with exit code 1 and a log line."""
    threading.excepthook = _end_process


def fatal(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a function so that its exceptions end the process, with exit code 1 and a log line."""

    @wraps(call)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, nothing else would notice
            _log.critical("call failed", call=call.__qualname__, exc_info=True)
            os._exit(1)

    return guarded


def _end_process(arguments: threading.ExceptHookArgs) -> None:
    name = arguments.thread.name if arguments.thread is not None else "?"
    error = arguments.exc_value
    _log.critical("thread failed", thread=name, exc_info=error if error is not None else True)
    os._exit(1)
