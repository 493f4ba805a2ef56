"""What is wrong in a Trace itself is an error at once; what is told of messages follows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from grpc import StatusCode

from delaywheel import CallFailedError, Handle, Message, RefusedError, TimedOutError
from delaywheel.errors import ClientClosedError
from delaywheel.message import Result
from delaywheel.reasons import Reason
from delaywheel.testing import MemoryService
from delaywheel.trace import Trace
from delaywheel.trace.batch import Rows
from delaywheel.trace.counts import Cell, CellKey
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reports import EventReports
from delaywheel.trace.texts import KeyMode, hashed

KAFKA = {"bootstrap.servers": "127.0.0.1:9"}


class Told:
    """A sink that keeps columns as they would be sent."""

    def __init__(self, options: TraceOptions) -> None:
        self._options = options
        self.batches: list[tuple[str, Rows]] = []
        self.dropped = 0

    def add(self, kind: str, rows: Rows, length_bytes: int) -> None:
        assert length_bytes >= 0
        assert len({len(column) for column in rows.values()}) == 1
        self.batches.append((kind, self._options.prepared(rows)))

    def drop(self, count: int, _why: str) -> None:
        self.dropped += count

    def count(self, cells: Mapping[CellKey, Cell]) -> None:
        pass

    def begin_counts(self) -> None:
        pass

    def flush(self, _timeout_s: float) -> bool:
        return True


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"key": "clear"}, "key 'clear'"),
        ({"key": "hash"}, "needs secret"),
        ({"key": "hash", "secret": b""}, "secret: 0 bytes"),
        ({"key": "hash", "secret": bytes(65)}, "secret: 65 bytes"),
        ({"secret": b"s"}, "secret is for"),
        ({"tags": ""}, "tags"),
        ({"sample": 0}, "sample 0"),
        ({"sample": 1.01}, "sample 1.01"),
        ({"sample": float("nan")}, "sample nan"),
        ({"sample": "1"}, "sample must be a number"),
        ({"kafka": {}}, "bootstrap.servers"),
        ({"kafka": {**KAFKA, "colour": "red"}}, "colour"),
        ({"kafka": {**KAFKA, "acks": "some"}}, "acks"),
    ],
)
def test_what_is_wrong_in_itself_is_an_error_at_once(wrong: Mapping[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        Trace(**{"kafka": KAFKA, **wrong})


def _told(key: KeyMode, message: Message, **options: Any) -> Rows:
    chosen = TraceOptions(key=key, **options)
    told = Told(chosen)
    result = Result(message, Handle("n1.7", 1, message.id, "orders"), None)
    EventReports(told, chosen).sent([result], 0.014, 1)
    [(kind, rows)] = told.batches
    assert kind == "sent"
    return rows


def test_a_sent_message_is_told() -> None:
    headers = {"tags": b"eu,retry-me", "other": None}
    message = Message("orders", b"secret", key=b"42", delay="1h", headers=headers)
    rows = _told("plain", message, tags="tags")
    told = {name: column[0] for name, column in rows.items()}
    assert told.pop("time_ms") > 1_600_000_000_000
    assert told == {
        "id": message.id,
        "due_ms": message.due_ms,
        "topic": "orders",
        "status": "ACCEPTED",
        "key": "42",
        "tags": "eu,retry-me",
        "root": None,
        "cost_us": 14_000,
        "attempts": 1,
        "node": "n1",
    }


def test_keys_are_told_as_the_program_says() -> None:
    message = Message("orders", b"", key=b"k" * 1_000_000, delay="1h")
    assert _told("plain", message)["key"] == ["\\c" + "k" * 200]
    assert message.key is not None
    assert _told("hash", message, secret=b"s")["key"] == [hashed(message.key, b"s")]
    assert _told("none", message)["key"] == [None]
    assert _told("plain", Message("orders", b"", delay="1h"))["key"] == [None]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RefusedError(Reason.QUOTA_EXCEEDED, ""), "QUOTA_EXCEEDED"),
        (RefusedError("NEW_REASON", ""), "NEW_REASON"),
        (RefusedError(Reason.NO_LEADER, "", outcome_known=False), "UNKNOWN"),
        (TimedOutError("", outcome_known=True), "TIMED_OUT"),
        (TimedOutError("", outcome_known=False), "UNKNOWN"),
        (CallFailedError(StatusCode.UNAUTHENTICATED, "", outcome_known=True), "UNAUTHENTICATED"),
        (ClientClosedError(), "CLOSED"),
    ],
)
def test_what_was_not_accepted_says_why(error: Any, status: str) -> None:
    options = TraceOptions()
    told = Told(options)
    reports = EventReports(told, options)
    message = Message("orders", b"", level="30s")
    reports.sent([Result(message, None, error)] * 101, 1.0, 3)
    [(_, rows)] = told.batches
    assert rows["status"] == [status] * 100
    assert (rows["due_ms"][0], rows["node"][0], told.dropped) == (None, None, 1)


def test_a_defect_of_the_trace_is_no_failure_of_a_send(caplog: pytest.LogCaptureFixture) -> None:
    options = TraceOptions()
    reports = EventReports(None, options)  # type: ignore[arg-type]
    message = Message("orders", b"", delay="1h")
    reports.sent([Result(message, None, ClientClosedError())], 1.0, 1)
    reports.changed("CANCEL", [("orders", message.id, None, 1, "CANCELLED", None)], 1.0)
    assert len(caplog.records) == 2


_ENDS = """
import sys
from delaywheel import Client
from delaywheel.trace.batch import decode
from delaywheel.trace.options import TraceOptions
from delaywheel.trace.reporter import Reporter
from delaywheel.trace.reports import EventReports

class Printed:
    def clusters(self):
        return ["shop"]
    def has_topic(self, topic):
        return False
    def send(self, topic, key, value, on_end):
        print(decode(value)[1]["status"], flush=True)
        on_end("")
    def poll(self, timeout_s):
        pass
    def close(self):
        pass

options = TraceOptions()
reporter = Reporter(Printed, options.prepared, share=1.0, kafka={})
client = Client(sys.argv[1], trace=EventReports(reporter, options))
pending = [client.produce_async("orders", b"", delay="1h") for _ in range(3)]
"""


def test_what_is_sent_at_the_programs_end_is_told() -> None:
    with MemoryService(start=datetime.now(UTC)) as service:
        program = [sys.executable, "-c", _ENDS, service.address]
        ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout.count("'ACCEPTED'") == 3, ended.stderr
