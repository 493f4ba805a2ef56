"""How the job is: for its log, and over HTTP as `/healthz` and `/metrics`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from delaywheel_audit.session import CouldNotRun

_SAID_AGAIN_S: Final = 60.0
_LATE_S: Final = 60.0
"""A job that is farther behind is not healthy."""


class IndexHealth:
    """What other threads say of the job.

    Attributes:
        registry: Its metrics.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._waits_for = ""
        self._said_s = -_SAID_AGAIN_S
        self._has_all_until = time.time()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"delaywheel_trace_index_{name}", text, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"delaywheel_trace_index_{name}", text, registry=self.registry)

        self._events = counter("events", "Events that were written, doubled ones too.")
        self._bad = counter("bad_records", "Records that could not be read.")
        self._merged = gauge("merged_timestamp_seconds", "When files were merged last.")
        self._waiting = gauge("waiting", "1: it waits for Kafka or for the index's place.")
        lag = gauge("lag_seconds", "How long ago the index had all that was in Kafka.")
        lag.set_function(self.lag_s)

    def lag_s(self) -> float:
        """Returns how long ago the index had all that was in Kafka."""
        return max(0.0, time.time() - self._has_all_until)

    def has_all_until(self, unix_s: float) -> None:
        """Says that all is written that Kafka had at that time."""
        self._has_all_until = max(self._has_all_until, unix_s)

    def wrote(self, events: int, bad: int) -> None:
        """Says that a batch was written."""
        self._events.inc(events)
        self._bad.inc(bad)

    def merged(self) -> None:
        """Says that files were merged."""
        self._merged.set(time.time())

    def waits(self, why: str) -> None:
        """Says that the job waits; once a minute on standard error."""
        with self._lock:
            is_new = not self._waits_for
            self._waits_for = why
            self._waiting.set(1)
            if not is_new and time.monotonic() - self._said_s < _SAID_AGAIN_S:
                return
            self._said_s = time.monotonic()
        say(f"waiting: {why}")

    def goes_on(self) -> None:
        """Says that the job waits no more."""
        with self._lock:
            waited, self._waits_for = self._waits_for, ""
            self._waiting.set(0)
        if waited:
            say("going on")

    def fault(self) -> str:
        """Returns why the job is not healthy; empty: it is."""
        if self._waits_for:
            return self._waits_for
        return f"{self.lag_s():.0f} s behind" if self.lag_s() > _LATE_S else ""


def say(line: str) -> None:
    """Prints a line for people."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def serving(health: IndexHealth, address: tuple[str, int] | None) -> Iterator[None]:
    """Serves health and metrics; None: nowhere.

    Raises:
        CouldNotRun: LISTEN_FAILED.
    """
    if address is None:
        yield
        return

    class _Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            fault = health.fault()
            if self.path == "/metrics":
                self._answer(200, "text/plain; version=0.0.4", generate_latest(health.registry))
            elif self.path == "/healthz":
                self._answer(503 if fault else 200, "text/plain", f"{fault or 'ok'}\n".encode())
            else:
                self._answer(404, "text/plain", b"/healthz or /metrics\n")

        def _answer(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            """Says nothing: whoever asks knows."""

    try:
        server = ThreadingHTTPServer(address, _Handler)
    except OSError as error:
        raise CouldNotRun(
            "LISTEN_FAILED", f"--metrics-listen {address[0]}:{address[1]}: {error}"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
