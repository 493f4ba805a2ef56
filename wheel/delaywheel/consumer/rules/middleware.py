"""Functions around handlers: each is called with the message, or batch, and with what comes next.

docs/CONSUMERS.md, "Around handlers", has examples. The first of a list is the outermost. An
exception that leaves it counts as the handler's; if it does not call `call_next`, and returns, the
message is done. For coroutines it is a coroutine function, and awaits `call_next`. What returns
without having run is an error: see `functions.py`.
"""

from __future__ import annotations

import re
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, TypeAlias

from delaywheel.functions import (
    FunctionKindError,
    check_awaited,
    check_ended,
    check_plain,
    is_coroutine_function,
)

Handler: TypeAlias = Callable[[Any], Any]
HandlersByTopic: TypeAlias = Mapping[str, Handler]
"""Handlers by what a consumer was given as its topics: names, and patterns."""
Middleware: TypeAlias = Callable[[Any, Handler], Any]


def wrapped(handle: Handler | HandlersByTopic, middleware: Sequence[Middleware]) -> Handler:
    """Returns a handler, or that of each message's topic, with all middleware around it."""
    for each in _handlers_in(handle):
        check_plain("handle", each)
    called = _by_topic(handle) if isinstance(handle, Mapping) else _ended(handle)
    for one in reversed(middleware):
        called = _ended(one, called)
    return called


def _handlers_in(handle: Handler | HandlersByTopic) -> Iterable[Handler]:
    return handle.values() if isinstance(handle, Mapping) else (handle,)


def _by_topic(handlers: HandlersByTopic) -> Handler:
    called = {topic: _ended(one) for topic, one in handlers.items()}

    def call(message: Any) -> object:
        return _of_topic(called, message.topic)(message)

    return call


def _of_topic(handlers: HandlersByTopic, topic: str) -> Handler:
    """Returns a topic's handler: of its name, or of the first pattern that it matches."""
    if topic in handlers:
        return handlers[topic]
    return next(
        one for name, one in handlers.items() if name.startswith("^") and re.match(name, topic)
    )


def check_topics(handle: Handler | HandlersByTopic, read: Collection[str]) -> None:
    """Raises ValueError unless handlers by topic are of all that is read, and of nothing else."""
    if isinstance(handle, Mapping) and (wrong := sorted(handle.keys() ^ set(read))):
        raise ValueError(f"handlers by topic: {', '.join(wrong)}: one for each topic that is read")


def _ended(function: Callable[..., object], *beside: object) -> Handler:
    def call(message: object) -> object:
        result = function(message, *beside)
        if result is not None:
            check_ended(function, result)
        return result

    return call


def wrapped_awaited(
    handle: Callable[[Any], Awaitable[object]] | HandlersByTopic, middleware: Sequence[Middleware]
) -> Callable[[Any], Coroutine[Any, Any, object]]:
    """As `wrapped`, of coroutine functions."""
    for each in _handlers_in(handle):
        check_awaited("handle", each)

    async def alone(message: Any) -> object:
        function = _of_topic(handle, message.topic) if isinstance(handle, Mapping) else handle
        result = await function(message)
        check_ended(function, result)
        return result

    called: Callable[[Any], Coroutine[Any, Any, object]] = alone
    for one in reversed(middleware):
        called = _awaited_around(one, called)
    return called


def _awaited_around(
    one: Middleware, call_next: Callable[[Any], Coroutine[Any, Any, object]]
) -> Callable[[Any], Coroutine[Any, Any, object]]:
    async def call(message: object) -> object:
        begun: list[Coroutine[Any, Any, object]] = []

        def note(next_message: object) -> Coroutine[Any, Any, object]:
            begun.append(call_next(next_message))
            return begun[-1]

        result = await one(message, note)
        if any(getcoroutinestate(each) == CORO_CREATED for each in begun):
            for each in begun:
                each.close()
            raise FunctionKindError(f"middleware {one!r} does not await what call_next returns")
        check_ended(one, result)
        return result

    return call


def check_middleware(middleware: Sequence[Middleware], *, is_awaited: bool) -> None:
    """Raises TypeError for middleware that is not called, or awaited, as the handlers are."""
    for one in middleware:
        if not callable(one):
            raise TypeError(f"middleware {one!r}: not a function")
        if is_coroutine_function(one) is not is_awaited:
            kind = "a coroutine function" if is_awaited else "a plain function"
            raise TypeError(f"middleware {one!r}: {kind} is needed around these handlers")
        if not is_awaited:
            check_plain("middleware", one)
