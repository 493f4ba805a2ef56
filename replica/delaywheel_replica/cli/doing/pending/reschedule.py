"""`delaywheel reschedule`: another due for a pending message."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from delaywheel import Client, RescheduleOutcome
from delaywheel.message import unix_ms
from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.printing.messages import WHY_UNCHANGED
from delaywheel_replica.cli.printing.tables import print_json
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.quantities import iso

_WHY_NOT: Final = {
    **WHY_UNCHANGED,
    "RESCHEDULED": "its new due is not known: repeat the command",
    "CANCELLED": "it was cancelled, and stays cancelled",
}


def reschedule(  # noqa: PLR0913 - as many as the command has
    handle: str | None,
    *,
    topic: str | None,
    message_id: bytes | None,
    due: datetime | None,
    to: datetime | None,
    delay: timedelta | None,
    as_json: bool,
    server: Nodes,
    timeout_s: float,
) -> None:
    """Gives a pending message another due; prints the message's new handle."""
    if to is None and delay is not None:
        to, delay = datetime.now(UTC) + delay, None
    if to is None or delay is not None:
        raise usage("say its new due: one of --delay and --to")
    with Client(
        server.addresses, tls=server.tls, timeout=timeout_s, trace=server.trace()
    ) as client:
        answer = client.reschedule(handle, topic=topic, id=message_id, due=due, to=to)
    if as_json:
        print_json(
            {
                "outcome": answer.outcome.value,
                "handle": None if answer.handle is None else str(answer.handle),
                "due_ms": answer.due_ms,
            }
        )
    if answer.outcome is not RescheduleOutcome.RESCHEDULED or answer.due_ms is None:
        raise CommandFailure(answer.outcome.value, _WHY_NOT[answer.outcome.value])
    if not as_json:
        say(str(answer.handle))
        note(f"due {iso(answer.due_ms)}")
        if answer.due_ms != unix_ms(to):
            note(
                "not the due asked for: that was too near, or the message was rescheduled before;"
                " by this handle it can be given another due"
            )
