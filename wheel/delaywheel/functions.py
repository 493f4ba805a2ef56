"""Functions that programs give: a plain one is called, a coroutine function awaited.

The other kind never runs, and nobody hears of it: what a coroutine function returns when it is
called has not begun. So each is looked at twice:

| where a plain function is called | then |
|---|---|
| is given a coroutine function, or one with `yield` | TypeError, when it is given |
| a function returns a coroutine, which nobody has begun | FunctionKindError, once it was called |
| a handler returns what may still run: an awaitable, a generator, a future | the same |

| where a coroutine function is awaited | then |
|---|---|
| is given another function | TypeError, when it is given |
| the coroutine ends with what may still run, as above | FunctionKindError |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from inspect import isasyncgenfunction, iscoroutine, iscoroutinefunction, isgeneratorfunction
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Final

_MAY_RUN: Final = (Awaitable, GeneratorType, AsyncGeneratorType, Future)


class FunctionKindError(TypeError):
    """A program's function has returned what is still to run, and nobody would wait for it.

    In a consumer it is an outcome of no record, whatever `retry_on` and `dead_on` say: the record
    stays unsettled, and is delivered again.
    """


def is_coroutine_function(function: Callable[..., object]) -> bool:
    """Whether the result of a function, or of an object that can be called, is to be awaited."""
    return any(map(iscoroutinefunction, _called(function)))


def check_plain(what: str, function: object) -> None:
    """Raises TypeError for what has to be awaited or iterated over, or is no function."""
    if not callable(function):
        raise TypeError(f"{what}={function!r}: not a function")
    if is_coroutine_function(function):
        raise TypeError(f"{what}={function!r}: a coroutine function, and a plain one is needed")
    if any(isgeneratorfunction(one) or isasyncgenfunction(one) for one in _called(function)):
        raise TypeError(f"{what}={function!r}: it has yield, so calling it runs nothing")


def check_awaited(what: str, function: object) -> None:
    """Raises TypeError unless it is a coroutine function."""
    if not callable(function) or not is_coroutine_function(function):
        raise TypeError(
            f"{what}={function!r}: not a coroutine function; wrap what returns an awaitable in one"
        )


def check_begun(function: object, result: object) -> None:
    """Closes a coroutine that a function returned, and raises FunctionKindError: nobody runs it."""
    if iscoroutine(result):
        result.close()
        raise FunctionKindError(f"{function!r} returned a coroutine, which nobody awaits here")


def check_ended(function: object, result: object) -> None:
    """Raises FunctionKindError if what a handler returned may still run."""
    check_begun(function, result)
    if isinstance(result, _MAY_RUN):
        raise FunctionKindError(f"{function!r} returned {result!r}: nobody waits for that here")


def _called(function: Callable[..., object]) -> tuple[Any, Any]:
    return function, getattr(type(function), "__call__", None)  # noqa: B004 - is it a coroutine?
