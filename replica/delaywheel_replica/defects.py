"""A defect on any thread ends its process, so that a node is never half alive.

The supervisor starts the process again.
"""

import os
import threading

import structlog

_log = structlog.get_logger(__name__)


def end_with_any_thread() -> None:
    """From now on an exception that ends a thread ends the process with 1, after a line of log."""
    threading.excepthook = _end_process


def _end_process(arguments: threading.ExceptHookArgs) -> None:
    name = arguments.thread.name if arguments.thread is not None else "?"
    error = arguments.exc_value
    _log.critical("thread failed", thread=name, exc_info=error if error is not None else True)
    os._exit(1)
