"""Spans of OpenTelemetry around requests that send, and around attempts of handlers.

docs/TRACE.md, "OpenTelemetry", has their table. They are linked to the sampled spans that messages
name in their header `traceparent`, and no child of them: a message may wait for days. The header is
the caller's: it is read, never written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("spans need opentelemetry-api: install delaywheel[otel]") from missing

from delaywheel.record_headers import last_of
from delaywheel.trace.sent import status_of

if TYPE_CHECKING:  # a program that only sends needs no Kafka
    from delaywheel.consumer.batch import Batch
    from delaywheel.consumer.message import ReceivedMessage
    from delaywheel.message import Result

_LOG: Final = logging.getLogger("delaywheel.ways.spans")
_MOST_LINKS: Final = 128
"""Of a span; exporters drop what is more."""
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_NOWHERE: Final = Context()


class Spans:
    """Makes the spans of a program's clients and consumers. Thread-safe.

    Without a provider of tracers it takes the program's own. docs/TRACE.md, "OpenTelemetry", has an
    example.
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer: Final = trace.get_tracer("delaywheel", tracer_provider=provider)

    def sent(self, results: Sequence[Result], cost_s: float, attempts: int) -> None:
        """Makes the span of a request that has ended; for clients, not for programs."""
        try:
            self._sent(results, cost_s, attempts)
        except Exception:  # noqa: BLE001 - a defect of a span is no failure of what it tells of
            _LOG.exception("a span could not be made")

    def _sent(self, results: Sequence[Result], cost_s: float, attempts: int) -> None:
        ended_ns = time.time_ns()
        messages = [result.message for result in results]
        topics = {message.topic for message in messages}
        span = self._tracer.start_span(
            _name("send", topics),
            kind=trace.SpanKind.CLIENT,
            links=_links(message.headers or () for message in messages),
            attributes={
                **_attributes("delaywheel", "send", topics, len(messages)),
                "delaywheel.attempts": attempts,
            },
            start_time=ended_ns - int(cost_s * 1e9),
        )
        if len(messages) == 1:
            span.set_attribute("messaging.message.id", messages[0].id.hex())
        error = next((result.error for result in results if result.error is not None), None)
        if error is not None:
            span.set_attribute("error.type", status_of(error))
            span.set_status(trace.StatusCode.ERROR, str(error))
        span.end(ended_ns)

    def processing(self, message: ReceivedMessage | Batch) -> AbstractContextManager[object]:
        """Returns a block that is an attempt of a message, or of a batch; put it in the message's.

        An exception that leaves it is noted.
        """
        messages = list(message) if isinstance(message, Sequence) else [message]
        links = _links(one.headers or () for one in messages)
        if not links:
            return nullcontext()
        topics = {one.place.topic for one in messages}
        attributes = _attributes("kafka", "process", topics, len(messages))
        if len(messages) == 1:
            attributes |= _of_message(messages[0])
        return self._tracer.start_as_current_span(
            _name("process", topics),
            kind=trace.SpanKind.CONSUMER,
            links=links,
            attributes=attributes,
        )

    def around(self, message: Any, call_next: Callable[[Any], Any]) -> Any:
        """Middleware around the handlers of `RetryConsumer.run` and `run_batches`."""
        with self.processing(message):
            return call_next(message)

    async def awaited(self, message: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        """Middleware around the handlers of `AsyncRetryConsumer`."""
        with self.processing(message):
            return await call_next(message)


def _name(operation: str, topics: set[str]) -> str:
    return f"{operation} {next(iter(topics))}" if len(topics) == 1 else operation


def _attributes(system: str, operation: str, topics: set[str], count: int) -> dict[str, Any]:
    """Returns what spans of messages have, by OpenTelemetry's conventions."""
    attributes: dict[str, Any] = {
        "messaging.system": system,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }
    if len(topics) == 1:
        (attributes["messaging.destination.name"],) = topics
    if count > 1:
        attributes["messaging.batch.message_count"] = count
    return attributes


def _of_message(message: ReceivedMessage) -> dict[str, Any]:
    place = message.place
    attributes: dict[str, Any] = {
        "messaging.destination.partition.id": str(place.partition),
        "messaging.kafka.offset": place.offset,
        "messaging.message.body.size": len(message.value or b""),
        "delaywheel.attempt": message.attempt,
    }
    if (id_ := message.header("dw-id")) is not None:
        attributes["messaging.message.id"] = id_.decode(errors="replace")
    return attributes


def _links(headers_of: Iterable[Sequence[tuple[str, bytes | None]]]) -> list[trace.Link]:
    """Returns links to the sampled spans that messages name, each once."""
    found: dict[tuple[int, int], trace.Link] = {}
    for headers in headers_of:
        parent = last_of(headers, "traceparent")
        if parent is None:
            continue
        told = {"traceparent": parent.decode(errors="replace")}
        if (state := last_of(headers, "tracestate")) is not None:
            told["tracestate"] = state.decode(errors="replace")
        context = trace.get_current_span(_PROPAGATOR.extract(told, _NOWHERE)).get_span_context()
        if context.is_valid and context.trace_flags.sampled:
            found[context.trace_id, context.span_id] = trace.Link(context)
            if len(found) >= _MOST_LINKS:
                break
    return [*found.values()]
