"""`delaywheel cancel`: one pending message, or all that match the conditions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Unpack

from delaywheel import CancelOutcome, Client
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_proto.v1.delaywheel_pb2_grpc import DelayWheelStub
from delaywheel_replica.cli.asking.confirming import confirm, show
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.doing.pending.search import Conditions, add_looked, wanted_of
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.printing import shapes
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
    many = _Many(wanted_of(conditions), limit, server, timeout_s)
    if not yes or dry_run:
        found = many.ask_for_all(dry_run=True)
        if not as_json:
            show(_listed(found))
        pending = sum(row.outcome == pb.CANCEL_OUTCOME_UNSPECIFIED for row in found.results)
        if dry_run or not pending:
            _print(found, as_json=as_json, dry_run=True)
            if not dry_run:
                _check(found)
            return
        confirm(f"Cancel {counted(pending, 'message')}?", yes=yes)
    answer = many.ask_for_all(dry_run=False)
    _print(answer, as_json=as_json, dry_run=False)
    _check(answer)


def _check(answer: pb.CancelManyResponse) -> None:
    """Raises if a message may be delivered, or may not have been seen."""
    not_cancelled = sum(
        row.outcome not in {pb.CANCEL_OUTCOME_CANCELLED, pb.CANCEL_OUTCOME_RESCHEDULED}
        for row in answer.results
    )
    not_cancelled += len(_gone_elsewhere(answer))
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
    outcome, moved_ms = cancelled.outcome, cancelled.due_ms
    if as_json:
        print_json({"outcome": outcome.value, "rescheduled_to_ms": moved_ms})
    if outcome is not CancelOutcome.CANCELLED:
        raise CommandFailure(outcome.value, _words(outcome, moved_ms))
    if not as_json:
        say(f"CANCELLED: {_words(outcome, moved_ms)}")


def _words(outcome: CancelOutcome, moved_ms: int | None) -> str:
    match outcome:
        case CancelOutcome.CANCELLED:
            return "it is never delivered"
        case CancelOutcome.TOO_LATE:
            return "nothing was done: it is about to be delivered, or was"
        case CancelOutcome.ALREADY_DELIVERED:
            return "it is not cancelled: it is in its topic already, or a dead letter"
        case CancelOutcome.NOT_FOUND:
            return "no such message was accepted"
        case CancelOutcome.RESCHEDULED:
            return (
                "it is not cancelled: it was rescheduled to "
                f"{'another due' if moved_ms is None else iso(moved_ms)}, and has another handle"
            )


class _Many:
    """The results of a search, printed or cancelled page by page."""

    def __init__(
        self, wanted: pb.Filter, limit: int | None, server: Nodes, timeout_s: float
    ) -> None:
        self._wanted = wanted
        self._limit = limit
        self._server = server
        self._timeout_s = timeout_s

    def ask_for_all(self, *, dry_run: bool) -> pb.CancelManyResponse:
        """Fetches all pages up to the limit, and joins them."""
        whole = pb.CancelManyResponse()
        for page in self._pages(dry_run=dry_run):
            whole.results.extend(page.results)
            whole.halves += page.halves
            add_looked(whole.looked, page.looked)
        return whole

    def _pages(self, *, dry_run: bool) -> Iterator[pb.CancelManyResponse]:
        request = pb.CancelManyRequest(filter=self._wanted, dry_run=dry_run)
        left = sys.maxsize if self._limit is None else self._limit

        def call(stub: DelayWheelStub) -> pb.CancelManyResponse:
            return stub.CancelMany(request, timeout=self._timeout_s)

        while left > 0:
            request.limit = min(left, _MESSAGES_PER_CALL)
            page = ask(self._server, call)
            yield page
            left -= sum(not row.cancelled_before for row in page.results)
            request.page_token = page.next_page_token
            if not page.next_page_token:
                return


def _gone_elsewhere(answer: pb.CancelManyResponse) -> set[str]:
    """Returns ids and topics of rescheduled messages that were not found at their new dues."""
    moved = pb.CANCEL_OUTCOME_RESCHEDULED
    outcomes = [(row.handle.split(":", 2)[2], row.outcome) for row in answer.results]
    found = {id_ for id_, outcome in outcomes if outcome != moved}
    return {id_ for id_, outcome in outcomes if outcome == moved} - found


def _listed(found: pb.CancelManyResponse) -> Iterator[str]:
    pending = [row for row in found.results if row.outcome == pb.CANCEL_OUTCOME_UNSPECIFIED]
    for row in pending[:_SHOWN]:
        yield f"{row.handle}  {iso(row.due_ms)}  {row.topic}"
    if len(pending) > _SHOWN:
        yield f"and {len(pending) - _SHOWN:,} more"


def _print(answer: pb.CancelManyResponse, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        print_json(shapes.cancelled_many(answer, dry_run=dry_run))
        return
    before = sum(row.cancelled_before for row in answer.results)
    cancelled = sum(row.outcome == pb.CANCEL_OUTCOME_CANCELLED for row in answer.results)
    if not dry_run:
        say(f"{cancelled - before:,} CANCELLED")
    if before:
        say(f"{before:,} cancelled before")
    for outcome, words in (
        (pb.CANCEL_OUTCOME_TOO_LATE, "too late: nothing was done"),
        (pb.CANCEL_OUTCOME_ALREADY_DELIVERED, "delivered before"),
        (pb.CANCEL_OUTCOME_UNSPECIFIED, "pending" if dry_run else "not known: ask again"),
    ):
        number = sum(row.outcome == outcome for row in answer.results)
        if number or words == "pending":
            say(f"{number:,} {words}")
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
