"""Spans of OpenTelemetry, for programs that have a tracer; they need no trace topic."""

from delaywheel.otel.spans import Spans

__all__ = ["Spans"]
