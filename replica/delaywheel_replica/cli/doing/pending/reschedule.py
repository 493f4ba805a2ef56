"""`delaywheel reschedule`: another due for a pending message."""

from __future__ import annotations

import sys
from datetime import datetime

from delaywheel import Client, RescheduleOutcome
from delaywheel_replica.cli.failures import Failure
from delaywheel_replica.cli.telling.tables import print_json
from delaywheel_replica.cli.values import iso


def reschedule(
    handle: str | None,
    *,
    message_id: bytes | None,
    at: datetime | None,
    to: datetime,
    as_json: bool,
    server: str,
    timeout_s: float,
) -> None:
    """Gives it, and prints the handle that the message has from now on."""
    with Client(server, timeout=timeout_s) as client:
        told = client.reschedule(handle, id=message_id, deliver_at=at, to=to)
    if as_json:
        print_json(
            {
                "outcome": told.outcome.value,
                "handle": None if told.handle is None else str(told.handle),
                "due_ms": told.due_ms,
            }
        )
    if told.outcome is not RescheduleOutcome.RESCHEDULED or told.due_ms is None:
        raise Failure(told.outcome.value, "the message has no other due")
    if not as_json:
        print(told.handle)
        print(f"due {iso(told.due_ms)}", file=sys.stderr)
