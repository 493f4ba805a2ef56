"""Searches pending messages page by page. No I/O: the clients carry it out."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypedDict

from delaywheel.client.exchange.answers import StoredMessage
from delaywheel.client.exchange.question import Question, cancel_many_question, search_question
from delaywheel.client.references import Id
from delaywheel.message import Handle, checked_id, unix_ms
from delaywheel_proto.v1 import delaywheel_pb2 as pb

_PAGE: Final = 1_000


class FilterOptions(TypedDict, total=False):
    """Conditions on pending messages, all of which must be met.

    Attributes:
        key: the message's own key.
        id: its id, whatever the due.
        header: the name of one of its headers; or the name and that one's value.
        due_from: the earliest due.
        due_to: dues before this one.
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
        cancelled: never delivered; in a dry run: those that somebody cancelled before.
        too_late: nothing was done, they are as good as delivered.
        unknown: withdrawn or not, ask again; in a dry run: those that are pending.
        complete: everything that was asked for was looked at, and could be read. Else there may be
            more: the limit was reached, or the node lacks something for the moment.
    """

    cancelled: tuple[Handle, ...]
    too_late: tuple[Handle, ...]
    unknown: tuple[Handle, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class FoundMessages:
    """The result of a search.

    Attributes:
        messages: pending ones, in the order of seconds, as the answering node sees them.
        complete: everything that was asked for was looked at, and could be read. Else there may be
            more: the limit was reached, or the node lacks something for the moment.
    """

    messages: tuple[StoredMessage, ...]
    complete: bool


def filter_of(topic: str | None, options: FilterOptions) -> pb.Filter:
    """Converts a filter to the protocol's form.

    Raises:
        MessageInvalidError: an id or a due that cannot be.
    """
    header = options.get("header")
    name, value = (header, None) if isinstance(header, str) or header is None else header
    due_from, due_to = options.get("due_from"), options.get("due_to")
    id_ = options.get("id")
    return pb.Filter(
        topic=topic,
        key=options.get("key"),
        id=None if id_ is None else checked_id(id_),
        header=None if name is None else pb.Header(name=name, value=value),
        from_ms=None if due_from is None else unix_ms(due_from),
        to_ms=None if due_to is None else unix_ms(due_to),
    )


class Searching:
    """One search: asks for pages until there are enough messages, or no more pages."""

    def __init__(self, wanted: pb.Filter, limit: int) -> None:
        self._request = pb.SearchRequest(filter=wanted, with_content=True)
        self._limit = limit
        self._found: list[pb.StoredMessage] = []
        self._incomplete = False
        self.done = limit < 1
        """There is nothing more to be asked."""

    def question(self) -> Question[pb.SearchRequest, pb.SearchResponse, pb.SearchResponse]:
        """Returns the question for the next page."""
        self._request.page_size = min(self._limit - len(self._found), _PAGE)
        return search_question(self._request)

    def add(self, page: pb.SearchResponse) -> None:
        """Takes a page."""
        self._found += page.messages
        self._incomplete |= page.looked.incomplete
        self._request.page_token = page.next_page_token
        self.done = not page.next_page_token or len(self._found) >= self._limit

    def found(self) -> FoundMessages:
        """The messages found once done; of one that came twice, the first."""
        first: dict[tuple[bytes, int], pb.StoredMessage] = {}
        for message in self._found:
            first.setdefault((message.id, message.due_ms), message)
        return FoundMessages(
            tuple(map(StoredMessage.of, first.values())),
            not self._request.page_token and not self._incomplete and self._limit > 0,
        )


class CancellingMany:
    """Cancels many messages page by page, until there are enough or no more."""

    def __init__(self, wanted: pb.Filter, limit: int, *, dry_run: bool) -> None:
        self._request = pb.CancelManyRequest(filter=wanted, dry_run=dry_run)
        self._limit = limit
        self._results: dict[str, pb.CancelOutcome.ValueType] = {}
        self._incomplete = False
        self.done = limit < 1
        """There is nothing more to be asked."""

    def question(
        self,
    ) -> Question[pb.CancelManyRequest, pb.CancelManyResponse, pb.CancelManyResponse]:
        """Returns the question for the next page."""
        self._request.limit = min(self._limit - len(self._results), _PAGE)
        return cancel_many_question(self._request)

    def add(self, page: pb.CancelManyResponse) -> None:
        """Takes a page."""
        for result in page.results:
            self._results.setdefault(result.handle, result.outcome)
        self._incomplete |= page.looked.incomplete
        self._request.page_token = page.next_page_token
        self.done = not page.next_page_token or len(self._results) >= self._limit

    def came_to(self) -> ManyCancelled:
        """Returns the result once done."""
        known = {pb.CANCEL_OUTCOME_CANCELLED, pb.CANCEL_OUTCOME_TOO_LATE}
        return ManyCancelled(
            self._of({pb.CANCEL_OUTCOME_CANCELLED}),
            self._of({pb.CANCEL_OUTCOME_TOO_LATE}),
            self._of(set(self._results.values()) - known),
            not self._request.page_token and not self._incomplete and self._limit > 0,
        )

    def _of(self, outcomes: set[pb.CancelOutcome.ValueType]) -> tuple[Handle, ...]:
        return tuple(
            Handle.parse(handle) for handle, one in self._results.items() if one in outcomes
        )
