"""Searches pending messages page by page. No I/O: the clients carry it out."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypedDict

from delaywheel.client.exchange.answers import CancelOutcome, StoredMessage
from delaywheel.client.exchange.question import Id, Question
from delaywheel.message import Handle, checked_bytes, checked_id, unix_ms
from delaywheel_proto.v1 import delaywheel_pb2 as pb

_PAGE: Final = 1_000


class FilterOptions(TypedDict, total=False):
    """Conditions on pending messages, all of which must be met.

    Attributes:
        header: The name of one of its headers, or a pair of that name and its value.
        due_from: The earliest due.
        due_to: The due must be before this.
    """

    key: bytes
    id: Id
    header: str | tuple[str, bytes]
    due_from: datetime
    due_to: datetime


@dataclass(frozen=True, slots=True)
class ManyCancelled:
    """The result of cancelling many messages.

    Attributes:
        cancelled: Never delivered; in a dry run: already cancelled before.
        too_late: Nothing was done: they are about to be delivered, or their second is deleted.
        unknown: Perhaps cancelled, ask again; in a dry run: those that are pending.
        rescheduled: They have another due by now and were not found at it: ask again.
        complete: False: there may be more, as the limit was reached, or the node is missing
            something for the moment. Of handles: none is unknown.
        already_delivered: In their topics, deferred, or dead letters.
        not_found: Of handles: never accepted.
        halves: Half messages that matched and were left alone: their senders decide.
    """

    cancelled: tuple[Handle, ...]
    too_late: tuple[Handle, ...]
    unknown: tuple[Handle, ...]
    rescheduled: tuple[Handle, ...]
    complete: bool
    already_delivered: tuple[Handle, ...] = ()
    not_found: tuple[Handle, ...] = ()
    halves: int = 0


@dataclass(frozen=True, slots=True)
class FoundMessages:
    """The result of a search, in the order of the messages' seconds.

    There may be more unless it is `complete`: the limit was reached, or the node is missing
    something for the moment.
    """

    messages: tuple[StoredMessage, ...]
    complete: bool


def filter_of(topic: str | None, options: FilterOptions) -> pb.Filter:
    """Converts a filter to the protocol's form; raises MessageInvalidError for an id or a due."""
    header = options.get("header")
    name, value = (header, None) if isinstance(header, str) or header is None else header
    due_from, due_to = options.get("due_from"), options.get("due_to")
    id_ = options.get("id")
    return pb.Filter(
        topic=topic,
        key=checked_bytes("key", options.get("key")),
        id=None if id_ is None else checked_id(id_),
        header=None
        if name is None
        else pb.Header(name=name, value=checked_bytes("the value of header", value)),
        from_ms=None if due_from is None else unix_ms(due_from),
        to_ms=None if due_to is None else unix_ms(due_to),
    )


class Searching:
    """One search: asks for pages until there are enough messages, or no page is left."""

    def __init__(self, wanted: pb.Filter, limit: int) -> None:
        self._request = pb.SearchRequest(filter=wanted, with_content=True)
        self._limit = limit
        self._found: list[pb.StoredMessage] = []
        self._incomplete = False
        self.done = limit < 1
        """Whether there is nothing more to ask."""

    def question(self) -> Question[pb.SearchRequest, pb.SearchResponse, pb.SearchResponse]:
        """Returns the question for the next page."""
        self._request.page_size = min(self._limit - len(self._found), _PAGE)
        return Question(self._request, lambda page: page)

    def add(self, page: pb.SearchResponse) -> None:
        """Adds the messages of a page."""
        self._found += page.messages
        self._incomplete |= page.looked.incomplete
        self._request.page_token = page.next_page_token
        self.done = not page.next_page_token or len(self._found) >= self._limit

    def found(self) -> FoundMessages:
        """The messages found once done; if one came twice, the first."""
        first: dict[tuple[str, bytes, int], pb.StoredMessage] = {}
        for message in self._found:
            first.setdefault((message.topic, message.id, message.due_ms), message)
        return FoundMessages(
            tuple(map(StoredMessage.of, first.values())),
            not self._request.page_token and not self._incomplete and self._limit > 0,
        )


class CancellingMany:
    """Cancels many messages page by page, until there are enough or none is left."""

    def __init__(self, wanted: pb.Filter, limit: int, *, dry_run: bool) -> None:
        self._request = pb.CancelManyRequest(filter=wanted, dry_run=dry_run)
        self._limit = limit
        # Without those cancelled before, which may be all that a repeated call finds at first.
        self._counted = 0
        # By handle and due: what is rescheduled within its second keeps its handle.
        self._results: dict[tuple[str, int], pb.CancelOutcome.ValueType] = {}
        self._incomplete = False
        self._halves = 0
        self.done = limit < 1
        """Whether there is nothing more to ask."""

    def question(
        self,
    ) -> Question[pb.CancelManyRequest, pb.CancelManyResponse, pb.CancelManyResponse]:
        """Returns the question for the next page; a retry reports what was done before."""
        self._request.limit = min(self._limit - self._counted, _PAGE)
        return Question(
            self._request,
            lambda page: page,
            changes=not self._request.dry_run,
            changed=bool(self._results) and not self._request.dry_run,
        )

    def add(self, page: pb.CancelManyResponse) -> None:
        """Adds the results of a page."""
        for result in page.results:
            self._results.setdefault((result.handle, result.due_ms), result.outcome)
            self._counted += not result.cancelled_before
        self._halves += page.halves
        self._incomplete |= page.looked.incomplete
        self._request.page_token = page.next_page_token
        self.done = not page.next_page_token or self._counted >= self._limit

    def outcomes(self) -> Iterator[tuple[str, int, str]]:
        """Yields handle, due and outcome of each message that was found."""
        # A newer service may have others.
        names = {
            pb.CancelOutcome.Value(f"CANCEL_OUTCOME_{one}"): one.value for one in CancelOutcome
        }
        for (handle, due_ms), outcome in self._results.items():
            yield handle, due_ms, names.get(outcome, "UNKNOWN")

    def result(self) -> ManyCancelled:
        """Returns the result once done."""
        moved, delivered = pb.CANCEL_OUTCOME_RESCHEDULED, pb.CANCEL_OUTCOME_ALREADY_DELIVERED
        known = {pb.CANCEL_OUTCOME_CANCELLED, pb.CANCEL_OUTCOME_TOO_LATE, moved, delivered}
        return ManyCancelled(
            self._handles_with({pb.CANCEL_OUTCOME_CANCELLED}),
            self._handles_with({pb.CANCEL_OUTCOME_TOO_LATE}),
            self._handles_with(set(self._results.values()) - known),
            self._handles_with({moved}, but=self._stays()),
            not self._request.page_token and not self._incomplete and self._limit > 0,
            already_delivered=self._handles_with({delivered}),
            halves=self._halves,
        )

    def _stays(self) -> frozenset[tuple[bytes, str]]:
        """Returns ids and topics of messages that were found at their present dues."""
        moved = pb.CANCEL_OUTCOME_RESCHEDULED
        handles = (Handle.parse(text) for (text, _), one in self._results.items() if one != moved)
        return frozenset((handle.id, handle.topic) for handle in handles)

    def _handles_with(
        self,
        outcomes: set[pb.CancelOutcome.ValueType],
        *,
        but: frozenset[tuple[bytes, str]] = frozenset(),
    ) -> tuple[Handle, ...]:
        handles = (
            Handle.parse(text) for (text, _), one in self._results.items() if one in outcomes
        )
        return tuple(handle for handle in handles if (handle.id, handle.topic) not in but)
