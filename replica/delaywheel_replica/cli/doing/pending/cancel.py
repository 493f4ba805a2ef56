"""`delaywheel cancel`: one pending message, or all that match the conditions."""

from __future__ import annotations

import sys
from collections import Counter
from datetime import datetime
from functools import partial
from typing import Unpack

from delaywheel import CancelOutcome, Client
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.confirming import confirm
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.doing.pending.search import Conditions, add_looked, wanted_of
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.printing import shapes
from delaywheel_replica.cli.printing.messages import WHY_UNCHANGED
from delaywheel_replica.cli.printing.tables import print_json
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.quantities import clock, counted, iso

_MESSAGES_PER_CALL = 1_000
_SHOWN = 20


def cancel(
    handle: str | None,
    *,
    due: datetime | None,
    limit: int | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    server: Nodes,
    timeout_s: float,
    **conditions: Unpack[Conditions],
) -> None:
    """Cancels one message, or all that a search finds; exit code 0 only if none is delivered."""
    named = conditions["topic"], conditions["message_id"], due
    given = {name for name, condition in conditions.items() if condition is not None}
    searched = given - {"topic", "message_id"}
    is_one = handle is not None or due is not None
    if (is_one and (searched or dry_run)) or not (is_one or given):
        raise CommandFailure(
            "HANDLE_AMBIGUOUS",
            "name one message, by HANDLE or by --topic, --id and --due, or say what many have",
            ExitCode.USAGE,
        )
    if is_one:
        _cancel_one(handle, *named, as_json=as_json, server=server, timeout_s=timeout_s)
        return
    ask_for_all = partial(_ask_for_all, wanted_of(conditions), limit, server, timeout_s)
    if not yes or dry_run:
        found = ask_for_all(dry_run=True)
        if not as_json:
            _note_pending(found)
        pending = _counts(found)["UNSPECIFIED"]
        if dry_run or not pending:
            _print(found, as_json=as_json, dry_run=True)
            if not dry_run:
                _check(found)
            return
        confirm(f"Cancel {counted(pending, 'message')}?", yes=yes)
    answer = ask_for_all(dry_run=False)
    _print(answer, as_json=as_json, dry_run=False)
    _check(answer)


def _check(answer: pb.CancelManyResponse) -> None:
    """Raises if a message may be delivered, or may not have been seen."""
    counts, gone = _counts(answer), len(_gone_elsewhere(answer))
    not_cancelled = counts.total() - counts["CANCELLED"] - counts["RESCHEDULED"] + gone
    if not_cancelled:
        raise CommandFailure(
            "NOT_ALL_CANCELLED",
            f"{counted(not_cancelled, 'message')} of {len(answer.results):,} may be delivered",
        )
    if answer.looked.incomplete:
        raise CommandFailure("NOT_ALL_EXAMINED", "there may be more messages: ask again")


def _cancel_one(
    handle: str | None,
    topic: str | None,
    message_id: bytes | None,
    due: datetime | None,
    *,
    as_json: bool,
    server: Nodes,
    timeout_s: float,
) -> None:
    with Client(
        server.addresses, tls=server.tls, timeout=timeout_s, trace=server.trace()
    ) as client:
        cancelled = client.cancel(handle, topic=topic, id=message_id, due=due)
    outcome, moved_ms = cancelled.outcome.value, cancelled.due_ms
    if as_json:
        print_json({"outcome": outcome, "rescheduled_to_ms": moved_ms})
    if cancelled.outcome is CancelOutcome.RESCHEDULED:
        to = "another due" if moved_ms is None else iso(moved_ms)
        text = f"it is not cancelled: it was rescheduled to {to}, and has another handle"
        raise CommandFailure(outcome, text)
    if cancelled.outcome is not CancelOutcome.CANCELLED:
        raise CommandFailure(outcome, WHY_UNCHANGED[outcome])
    if not as_json:
        say("CANCELLED: it is never delivered")


def _ask_for_all(
    wanted: pb.Filter, limit: int | None, server: Nodes, timeout_s: float, *, dry_run: bool
) -> pb.CancelManyResponse:
    """Has pages of a search cancelled, or only listed, up to the limit, and joins them."""
    whole = pb.CancelManyResponse()
    request = pb.CancelManyRequest(filter=wanted, dry_run=dry_run)
    left = sys.maxsize if limit is None else limit
    while left > 0:
        request.limit = min(left, _MESSAGES_PER_CALL)
        page = ask(server, lambda stub: stub.CancelMany(request, timeout=timeout_s))
        whole.results.extend(page.results)
        whole.halves += page.halves
        add_looked(whole.looked, page.looked)
        left -= sum(not row.cancelled_before for row in page.results)
        request.page_token = page.next_page_token
        if not page.next_page_token:
            break
    return whole


def _counts(answer: pb.CancelManyResponse) -> Counter[str]:
    names = (pb.CancelOutcome.Name(row.outcome) for row in answer.results)
    return Counter(name.removeprefix("CANCEL_OUTCOME_") for name in names)


def _gone_elsewhere(answer: pb.CancelManyResponse) -> set[str]:
    """Returns ids and topics of rescheduled messages that were not found at their new dues."""
    moved = pb.CANCEL_OUTCOME_RESCHEDULED
    outcomes = [(row.handle.split(":", 2)[2], row.outcome) for row in answer.results]
    found = {id_ for id_, outcome in outcomes if outcome != moved}
    return {id_ for id_, outcome in outcomes if outcome == moved} - found


def _note_pending(found: pb.CancelManyResponse) -> None:
    pending = [row for row in found.results if row.outcome == pb.CANCEL_OUTCOME_UNSPECIFIED]
    for row in pending[:_SHOWN]:
        note(f"{row.handle}  {iso(row.due_ms)}  {row.topic}")
    if len(pending) > _SHOWN:
        note(f"and {len(pending) - _SHOWN:,} more")


def _print(answer: pb.CancelManyResponse, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        print_json(shapes.cancelled_many(answer, dry_run=dry_run))
        return
    counts, before = _counts(answer), sum(row.cancelled_before for row in answer.results)
    if not dry_run:
        say(f"{counts['CANCELLED'] - before:,} CANCELLED")
    if before:
        say(f"{before:,} cancelled before")
    for outcome, words in (
        ("TOO_LATE", "too late: nothing was done"),
        ("ALREADY_DELIVERED", "delivered, deferred or a dead letter before"),
        ("UNSPECIFIED", "pending" if dry_run else "not known: ask again"),
    ):
        if counts[outcome] or words == "pending":
            say(f"{counts[outcome]:,} {words}")
    if elsewhere := len(_gone_elsewhere(answer)):
        say(f"{elsewhere:,} rescheduled, not found at the new due: delivered, or look again")
    if answer.halves:
        note(f"{counted(answer.halves, 'half message')} left alone: their senders decide")
    looked = answer.looked
    if looked.HasField("to_slot"):
        since = clock(looked.to_slot)
        note(f"not examined: messages due from {since} on: --limit")
    if looked.incomplete and dry_run:
        note(f"{looked.node} is missing frames: there may be more")
