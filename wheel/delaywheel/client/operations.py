"""What a client does, written once for threads and for a loop: its transport blocks, or awaits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Final, Protocol, TypeVar

from delaywheel.client.calls import Calls
from delaywheel.client.changing.gathering import GatheredChanges
from delaywheel.client.changing.named_changes import (
    CANCEL,
    COMMIT,
    RESCHEDULE,
    ROLL_BACK,
    AnswerT,
    Change,
    Doubts,
    NamedChanges,
    NamedT,
    OnSettled,
    ResultsT,
    in_calls,
    many_cancelled,
    many_rescheduled,
)
from delaywheel.client.changing.references import (
    half_named,
    half_reference,
    handles_of,
    new_dues,
    references_of,
)
from delaywheel.client.exchange.answers import RescheduleResult, StoredMessage
from delaywheel.client.exchange.batching import split
from delaywheel.client.exchange.delivery import Delivery
from delaywheel.client.exchange.question import Question, get_question
from delaywheel.client.exchange.settings import ExchangeSettings
from delaywheel.client.reporting import ClientReports
from delaywheel.client.searching import (
    CancellingMany,
    FilterOptions,
    FoundMessages,
    ManyCancelled,
    Searching,
    filter_of,
)
from delaywheel.client.transport.port import Method, Transport
from delaywheel.errors import DelaywheelError, RefusedError
from delaywheel.levels import Duration
from delaywheel.message import Handle, Message, Result, clock_ns
from delaywheel.reasons import Reason
from delaywheel.transactions.half import HALF_TIMEOUT_S, CommitOutcome, hold_s
from delaywheel.transactions.verdict import HalfName
from delaywheel_proto.v1 import delaywheel_pb2 as pb

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
HalfT = TypeVar("HalfT", bound=HalfName)


class _Pages(Protocol[RequestT, ResponseT]):
    """What asks for one page after another; see searching.py."""

    done: bool

    def question(self) -> Question[RequestT, ResponseT, ResponseT]: ...
    def add(self, page: ResponseT) -> None: ...


_OF_TIME: Final = frozenset(
    {Reason.DUE_TOO_OLD, Reason.DUE_BEYOND_SPAN, Reason.DUE_PASSED, Reason.HALF_INVALID}
)


class Operations:
    """The operations of `Client` and `AsyncClient`; those with a deadline are parts of them."""

    def __init__(self, calls: Calls, settings: ExchangeSettings, transport: Transport) -> None:
        self._calls: Final = calls
        self._settings: Final = settings
        self._transport: Final = transport
        self.reporting: Final = ClientReports(settings.trace, settings.spans)
        self.cancels: Final = self._gathering(CANCEL)
        self.rollbacks: Final = self._gathering(ROLL_BACK)
        self.reschedules: Final = self._gathering(RESCHEDULE)
        self.commits: Final = self._gathering(COMMIT)

    async def deliver(self, messages: Sequence[Message], deadline_s: float) -> list[Result]:
        """Sends messages that fit one request; returns one result each, in order."""
        delivery, began_s = Delivery(messages), monotonic()
        try:
            levels = await self._calls.levels(messages, deadline_s)
        except DelaywheelError as error:
            delivery.refuse(error)
        else:
            clock = self._settings.clock
            if clock is not clock_ns:
                for message in messages:
                    message.count_by(clock)
            delivery.fix_dues(clock() // 1_000_000, levels, self._settings.past_due)
            await self._calls.run(delivery, lambda stub: stub.DelayProduce, deadline_s)
        self.reporting.sent(delivery.results, began_s, delivery.attempts)
        return [self._with_clocks(result) for result in delivery.results]

    def _with_clocks(self, result: Result) -> Result:
        """Adds to a refusal for its time by how much the clocks differ, if they do."""
        error = result.error
        if not isinstance(error, RefusedError) or error.reason not in _OF_TIME:
            return result
        differ = self._calls.clocks.text
        return result._replace(error=error.with_hint(differ)) if differ else result

    async def deliver_all(self, messages: Sequence[Message], deadline_s: float) -> list[Result]:
        """Sends any number of messages, one request after another."""
        results: list[Result] = []
        for request in await self._split(messages, deadline_s):
            results += await self.deliver(request, deadline_s)
        return results

    async def deliver_many(self, messages: Sequence[Message], deadline_s: float) -> list[Result]:
        """Sends any number of messages, in several requests at once."""
        if not messages:
            return []
        results = await self._transport.side_by_side(
            lambda request: self.deliver(request, deadline_s),
            await self._split(messages, deadline_s),
            self._settings.queue.in_flight,
        )
        return [result for some in results for result in some]

    async def begin_many(
        self,
        halves: Sequence[Message],
        deadline_s: float,
        made: Callable[[Message, Handle], HalfT],
    ) -> list[HalfT]:
        """Begins all of these halves, or none: then raises the error of the first that failed."""
        results = await self.deliver_many(halves, deadline_s)
        held = [(each.message, each.handle) for each in results if each.handle is not None]
        begun = [made(message, handle) for message, handle in held]
        if len(begun) < len(halves):
            named = [
                half_named(half, handle) for half, (_, handle) in zip(begun, held, strict=True)
            ]
            await self._change_many(ROLL_BACK, named, HALF_TIMEOUT_S)  # else its check drops it
            raise next(result.error for result in results if result.error is not None)
        return begun

    async def commit_many(
        self, halves: Sequence[tuple[HalfName, Handle]]
    ) -> list[CommitOutcome | DelaywheelError]:
        """Commits halves that go with one local transaction."""
        references = [half_reference(half, handle) for half, handle in halves]
        committed = await self._change_many(COMMIT, references, HALF_TIMEOUT_S)
        return [one if isinstance(one, DelaywheelError) else one.outcome for one in committed]

    async def get(
        self, message: pb.MessageRef, timeout_s: float | None, *, find_place: bool
    ) -> StoredMessage | None:
        """See `Client.get`."""
        question = get_question(message, find_place=find_place)
        deadline_s = self._settings.deadline_s(timeout_s)
        await self._calls.run(question, lambda stub: stub.GetMessage, deadline_s)
        try:
            return question.answer()
        except RefusedError as refused:
            if refused.reason is Reason.MESSAGE_NOT_FOUND:
                return None
            raise

    async def reschedule_many(
        self, dues: Iterable[tuple[Handle | str, datetime | Duration]], timeout_s: float | None
    ) -> list[RescheduleResult]:
        """See `Client.reschedule_many`."""
        messages = new_dues(dues, self._settings.clock)
        return many_rescheduled(messages, await self._change_many(RESCHEDULE, messages, timeout_s))

    async def search(
        self, topic: str | None, limit: int, timeout_s: float | None, options: FilterOptions
    ) -> FoundMessages:
        """See `Client.search`."""
        searching = Searching(filter_of(topic, options), limit)
        await self._ask_pages(searching, lambda stub: stub.Search, timeout_s)
        return searching.found()

    async def cancel_many(
        self,
        topic: str | None,
        handles: Iterable[Handle | str] | None,
        limit: int,
        timeout_s: float | None,
        options: FilterOptions,
        *,
        dry_run: bool,
    ) -> ManyCancelled:
        """See `Client.cancel_many`."""
        if handles is not None:
            if topic is not None or dry_run or options:
                raise ValueError("either handles, or what the messages have")
            named = handles_of(handles)
            results = await self._change_many(CANCEL, references_of(named), timeout_s)
            return many_cancelled(named, results)
        many = CancellingMany(filter_of(topic, options), limit, dry_run=dry_run)
        began_s = monotonic()
        try:
            await self._ask_pages(many, lambda stub: stub.CancelMany, timeout_s)
        finally:
            if not dry_run:
                self.reporting.cancelled(many.outcomes(), began_s)
        return many.result()

    def _gathering(
        self, change: Change[NamedT, RequestT, ResultsT, AnswerT]
    ) -> GatheredChanges[NamedT, AnswerT]:
        """Returns what sends changes together that are asked for one by one."""
        report = self.reporting.each(change)
        return GatheredChanges(self._transport, partial(self._change, change), report)

    async def _change(
        self,
        change: Change[NamedT, RequestT, ResultsT, AnswerT],
        messages: Sequence[NamedT],
        deadline_s: float,
        on_settled: OnSettled[AnswerT] | None = None,
        doubts: Doubts | None = None,
    ) -> list[AnswerT | DelaywheelError]:
        """Changes messages that fit one call; returns what became of each, in order."""
        changes = NamedChanges(change, messages, on_settled, doubts)
        await self._calls.run(changes, change.method, deadline_s)
        return changes.results

    async def flush_trace(self) -> None:
        """Waits until all events are written, 2 s at most."""
        await self._transport.aside(self.reporting.flush)

    def begun_by_s(self, hold: Duration, timeout_s: float | None) -> float:
        """Until when a begin is tried: not beyond the end of the hold, when its group is asked."""
        return min(self._settings.deadline_s(timeout_s), monotonic() + hold_s(hold))

    async def _split(
        self, messages: Sequence[Message], deadline_s: float
    ) -> list[Sequence[Message]]:
        """Splits messages into requests within the service's limits."""
        if len(messages) == 1:
            return [messages]
        limits = await self._calls.limits(deadline_s)
        return list(split(messages, max_messages=limits.max_messages, max_bytes=limits.max_bytes))

    async def _change_many(
        self,
        change: Change[NamedT, RequestT, ResultsT, AnswerT],
        messages: Sequence[NamedT],
        timeout_s: float | None,
    ) -> list[AnswerT | DelaywheelError]:
        deadline_s, began_s = self._settings.deadline_s(timeout_s), monotonic()
        results = await self._transport.side_by_side(
            lambda some: self._change(change, some, deadline_s),
            in_calls(messages),
            self._settings.queue.in_flight,
        )
        answers = [result for some in results for result in some]
        self.reporting.changed(change, messages, answers, began_s)
        return answers

    async def _ask_pages(
        self,
        pages: _Pages[RequestT, ResponseT],
        method: Method[RequestT, ResponseT],
        timeout_s: float | None,
    ) -> None:
        while not pages.done:
            question = pages.question()
            await self._calls.run(question, method, self._settings.deadline_s(timeout_s))
            pages.add(question.answer())
