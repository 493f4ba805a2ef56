"""Functions around handlers: each is called with the message, or batch, and with what comes next.

    def timed(message, call_next):
        begun_s = time.monotonic()
        try:
            return call_next(message)
        finally:
            print(message.topic, time.monotonic() - begun_s)

The first of a list is the outermost. An exception that leaves it counts as the handler's; if it
does not call `call_next`, and returns, the message is done. For coroutines it is a coroutine
function, and awaits `call_next`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

Handler: TypeAlias = Callable[[Any], Any]
Middleware: TypeAlias = Callable[[Any, Handler], Any]


def wrapped(handle: Handler, middleware: Sequence[Middleware]) -> Handler:
    """Returns a handler with all middleware around it."""
    for one in reversed(middleware):
        handle = _around(one, handle)
    return handle


def _around(one: Middleware, call_next: Handler) -> Handler:
    return lambda message: one(message, call_next)


def check_middleware(middleware: Sequence[Middleware], *, is_awaited: bool) -> None:
    """Checks that middleware fits the handlers that it is to stand around.

    Raises:
        TypeError: It is no function, or not awaited as they are.
    """
    for one in middleware:
        if not callable(one):
            raise TypeError(f"middleware {one!r}: not a function")
        if is_coroutine_function(one) is not is_awaited:
            kind = "a coroutine function" if is_awaited else "a plain function"
            raise TypeError(f"middleware {one!r}: {kind} is needed around these handlers")


def is_coroutine_function(function: Callable[..., object]) -> bool:
    """Whether the result of a function, or of an object that can be called, is to be awaited."""
    called = getattr(type(function), "__call__", None)  # noqa: B004 - is it a coroutine function?
    return iscoroutinefunction(function) or iscoroutinefunction(called)
