"""Spans: one a request, one an attempt of a sampled message; linked, and as long as the work."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from delaywheel import Client, Message, RefusedError
from delaywheel.testing import MemoryService
from delaywheel.ways.spans import Spans

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"00-{TRACE}-b7ad6b7169203331-01".encode()
NOT_SAMPLED = f"00-{TRACE}-b7ad6b7169203332-00".encode()
BROKEN = b"00-\xff-b7ad6b7169203331-01"


class Seen:
    """A provider, and the spans that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def take(self) -> list[ReadableSpan]:
        spans = [*self._exporter.get_finished_spans()]
        self._exporter.clear()
        return spans


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def service() -> Iterator[MemoryService]:
    with MemoryService(topics=["orders", "bills"]) as one:
        yield one


def linked(span: ReadableSpan) -> list[str]:
    return [f"{link.context.trace_id:032x}" for link in span.links]


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_span_of_its_caller_and_is_linked(
    service: MemoryService, seen: Seen
) -> None:
    tracer = seen.provider.get_tracer("test")
    with Client(service.address, spans=Spans(seen.provider)) as client:
        with tracer.start_as_current_span("checkout") as caller:
            headers = {"traceparent": SAMPLED}
            client.produce("orders", b"", delay="7d", headers=headers)
        many = [Message(topic, b"", delay="7d") for topic in ("orders", "bills")]
        client.produce_many(many)
        with pytest.raises(RefusedError):
            client.produce("nowhere", b"", delay="1s")
    one, _, both, refused = seen.take()
    assert (one.name, one.kind) == ("send orders", SpanKind.CLIENT)
    assert one.parent is not None
    assert one.parent.span_id == caller.get_span_context().span_id
    assert linked(one) == [TRACE]
    assert 0 <= seconds(one) < 3_600
    assert one.attributes is not None
    assert one.attributes["messaging.destination.name"] == "orders"
    assert len(str(one.attributes["messaging.message.id"])) == 32
    assert (both.name, linked(both)) == ("send", [])
    assert both.attributes is not None
    assert both.attributes["messaging.batch.message_count"] == 2
    assert refused.attributes is not None
    assert refused.attributes["error.type"] == "TOPIC_UNKNOWN"
    assert refused.status.status_code is StatusCode.ERROR


def test_an_attempt_of_a_sampled_message_is_a_span_as_long_as_its_handler(
    service: MemoryService, seen: Seen
) -> None:
    spans = Spans(seen.provider)
    tracer = seen.provider.get_tracer("test")
    consumer = service.consumer("orders", group="g", retry=("1h",), middleware=[spans.around])
    with service.client() as client:
        for parent in (SAMPLED, NOT_SAMPLED, BROKEN, None):
            headers = {} if parent is None else {"traceparent": parent}
            client.produce("orders", b"v", delay="6d", headers=headers)

    def handle(message: object) -> None:
        with tracer.start_as_current_span("charge"):
            if message.attempt == 1:  # type: ignore[attr-defined]
                raise ConnectionError("no answer")

    service.advance("6d")
    consumer.run(handle)
    service.advance("1h")
    consumer.run(handle)
    ended = seen.take()
    attempts = [span for span in ended if span.name.startswith("process")]
    assert [span.name for span in attempts] == ["process orders", "process orders-retry-g"]
    assert [linked(span) for span in attempts] == [[TRACE], [TRACE]]
    assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.UNSET]
    assert [(span.attributes or {})["delaywheel.attempt"] for span in attempts] == [1, 2]
    own = [span for span in ended if span.name == "charge"]
    parents = [span.parent.span_id for span in own if span.parent is not None]
    assert parents == [span.context.span_id for span in attempts]
    assert len(own) == 8
    assert all(span.parent is None and seconds(span) < 3_600 for span in attempts)


def test_a_batch_is_one_span_and_links_are_bounded(service: MemoryService, seen: Seen) -> None:
    spans = Spans(seen.provider)
    consumer = service.consumer("orders", group="g", middleware=[spans.around])
    parents = [f"00-{number // 2 + 1:032x}-{1:016x}-01".encode() for number in range(500)]
    many = [Message("orders", b"", delay="1s", headers={"traceparent": one}) for one in parents]
    with Client(service.address, spans=spans) as client:
        client.produce_many(many)
    [sent] = seen.take()
    assert len(sent.links) == 128
    service.advance("1s")
    batches: list[int] = []
    consumer.run_batches(lambda batch: batches.append(len(batch)), 500)
    found = seen.take()
    counts = [(span.attributes or {}).get("messaging.batch.message_count") for span in found]
    assert (counts, sum(batches)) == (batches, 500)
    assert all(
        0 < len(span.links) <= min(128, count) for span, count in zip(found, batches, strict=True)
    )


async def test_coroutines_have_spans_too(service: MemoryService, seen: Seen) -> None:
    spans = Spans(seen.provider)
    consumer = service.async_consumer("orders", group="g", middleware=[spans.awaited])
    with service.client() as client:
        client.produce("orders", b"v", delay="1s", headers={"traceparent": SAMPLED})
    service.advance("1s")

    async def handle(_message: object) -> None:
        return

    await consumer.run(handle)
    assert [span.name for span in seen.take()] == ["process orders"]


def test_a_defect_of_a_span_is_no_failure_of_a_send(
    service: MemoryService, caplog: pytest.LogCaptureFixture
) -> None:
    spans = Spans()
    spans._tracer = None  # type: ignore[misc, assignment]
    with Client(service.address, spans=spans) as client:
        client.produce("orders", b"", delay="1s")
    assert [(one.name, one.levelno) for one in caplog.records] == [
        ("delaywheel.ways.spans", logging.ERROR)
    ]


def test_what_is_no_spans_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="spans must be Spans, not bool"):
        Client("127.0.0.1:1", spans=True)  # type: ignore[arg-type]


def test_nothing_of_it_is_imported_unless_it_is_used() -> None:
    code = (
        "import sys, delaywheel, delaywheel.consumer, delaywheel.trace\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "import delaywheel.ways.spans\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    own = "import sys, delaywheel.ways.spans\nassert 'confluent_kafka' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", own], check=True)
