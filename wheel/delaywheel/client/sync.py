"""The client for threads."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, Final, Self, Unpack
from weakref import finalize

from delaywheel.client.calls import Calls
from delaywheel.client.changing.named_changes import rolled_back
from delaywheel.client.changing.references import half_named, half_reference, new_due
from delaywheel.client.exchange.answers import (
    Cancelled,
    Rescheduled,
    RescheduleResult,
    StoredMessage,
)
from delaywheel.client.exchange.channel import Tls
from delaywheel.client.exchange.pending import PendingResult
from delaywheel.client.exchange.question import Id, message_ref
from delaywheel.client.exchange.settings import DEFAULT_QUEUE, ExchangeSettings, Queue
from delaywheel.client.lifetime import ForkGuard, close_in_background
from delaywheel.client.operations import Operations
from delaywheel.client.profiles import reached
from delaywheel.client.searching import FilterOptions, FoundMessages, ManyCancelled
from delaywheel.client.sync_sender import Sender
from delaywheel.client.transport.port import finished
from delaywheel.client.transport.threads import ThreadTransport
from delaywheel.errors import ClientClosedError, DelaywheelError, TimedOutError
from delaywheel.identity import parse_addresses
from delaywheel.levels import Duration
from delaywheel.message import (
    Handle,
    Message,
    MessageOptions,
    PastDue,
    Result,
    checked_messages,
    clock_of,
)
from delaywheel.transactions.half import (
    DEFAULT_HOLD,
    HALF_TIMEOUT_S,
    CommitOutcome,
    Half,
    Halves,
    RollbackOutcome,
    half_message,
    half_of,
)

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.reports import EventReports
    from delaywheel.ways.spans import Spans


class Client:
    """Sends messages to delaywheel; thread-safe, for the whole life of a program.

    Each message becomes visible in its Kafka topic at its due. A failed attempt is repeated with
    the same id and due, at another address if there is one, until the deadline; `outcome_known` of
    the error raised in the end says whether the message may have been accepted.

    Calls raise RefusedError, TimedOutError or CallFailedError; MessageInvalidError means that
    nothing was sent. Their `timeout` is in seconds, for all attempts; None: the client's.

    If the program forks, make the client after forking: gRPC does not survive it. If the program
    ends without `close`, what `produce_async` has taken is sent first, within `timeout`.

    Args:
        addresses: `"host:port,host:port"` or a sequence; one live node names the others. Requests
            stay with a node until it fails, or for half a minute. None: those of the profile, else
            of `DELAYWHEEL_SERVER`, else `127.0.0.1:7420`.
        timeout: Seconds for a call with all its attempts. A client that has never reached a node
            fails after 2 s if no address accepts connections.
        attempt_timeout: Seconds after which an attempt that hangs is abandoned for another one.
        past_due: `"deliver"`: a due that has passed when its message is first sent becomes now.
            `"reject"`: such a message is refused, DUE_PASSED.
        tls: None: the files of the profile; plain text, if there is none.
        profile: A table of `~/.config/delaywheel/profiles.toml`; None: if `addresses` is None too,
            that of `DELAYWHEEL_PROFILE`, else `DELAYWHEEL_CLIENT_…`.
        trace: Whom it tells what becomes of messages (`delaywheel.trace`); None: that of the
            profile. `close` waits for its events to be written, 2 s at most.
        spans: Makes spans of OpenTelemetry of its requests (`delaywheel.ways.spans`).

    Example:
        ::

            with Client("delay-1:7420,delay-2:7420") as client:
                handle = client.produce(
                    "orders", b"still in the basket?", key=b"42", delay="30m"
                )
                client.cancel(handle)
    """

    def __init__(  # noqa: PLR0913 - what a program may say of its client
        self,
        addresses: str | Sequence[str] | None = None,
        *,
        timeout: float = 30.0,
        attempt_timeout: float = 5.0,
        past_due: PastDue = "deliver",
        queue: Queue = DEFAULT_QUEUE,
        tls: Tls | None = None,
        profile: str | None = None,
        trace: "EventReports | None" = None,
        spans: "Spans | None" = None,
    ) -> None:
        addresses, tls, trace = reached(addresses, tls, profile, trace)
        parsed = parse_addresses(addresses)
        clock = self._clock = clock_of(parsed)
        settings = ExchangeSettings(
            past_due, timeout, attempt_timeout, queue, tls, clock, trace, spans
        )
        self._fork_guard: Final = ForkGuard()
        self._deadline_s: Final = settings.deadline_s
        transport = ThreadTransport()
        self._calls: Final = Calls(parsed, settings, transport)
        self._operations: Final = Operations(self._calls, settings, transport)
        # Neither knows the client, so that one that is dropped goes.
        deliver, stop = self._operations.deliver_all, self._calls.stop
        self._sender: Final = Sender(
            queue, timeout, lambda messages, until_s: finished(deliver(messages, until_s))
        )
        self._closed = False
        self._dropped: Final = finalize(
            self, close_in_background, self._sender, lambda: finished(stop())
        )
        self._dropped.atexit = False

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        timeout: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> Handle:
        """Sends one message and waits until it is acknowledged; the options are those of `Message`.

        They are key, headers, id, partition, timestamp, and one of delay, deliver_at and level.
        Raises MessageInvalidError (nothing was sent), RefusedError, TimedOutError after `timeout`
        seconds (None: the client's), or CallFailedError; all have `outcome_known`.

        Example:
            ::

                client.produce("orders", b"…", level="30s", headers={"trace": b"7f"})
                client.produce("orders", None, deliver_at=datetime(2031, 1, 1, tzinfo=UTC))
        """
        self._check_open()
        message = Message(topic, value, clock=self._clock, **options)
        [result] = finished(self._operations.deliver([message], self._deadline_s(timeout)))
        return result.unwrap()

    def begin(
        self,
        topic: str,
        value: bytes | None,
        *,
        group: str,
        hold: Duration = DEFAULT_HOLD,
        timeout: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> Half:
        """Sends a half message: it is delivered if a local transaction commits, or not at all.

        Nobody sees it until it is committed; with a delay, it is delivered at its due. If neither
        `commit` nor `rollback` is heard before the end of its hold, the group is asked. The end of
        its block commits nothing: an error may have been caught in it.

        Args:
            group: Who is asked what became of the transaction: the name of a Kafka consumer group.
            hold: How long nobody is asked, from now on: longer than local transactions take, 10 s
                at most.
            **options: As for `produce`, but no level; without a delay and a due, the message is due
                when it is committed.

        Example:
            ::

                with client.begin("orders", text, group="shop", delay="30m") as half:
                    with db:
                        db.execute("insert into orders …")
                        barrier.record(db, half)
                    half.commit()

        Raises:
            RefusedError: HALVES_OFF: the service takes no half messages.
            TimedOutError: It was not acknowledged in time, or before the end of its hold: begin no
                local transaction with it.
        """
        self._check_open()
        half = half_message(topic, value, group, hold, options, self._clock)
        deadline_s = self._operations.begun_by_s(hold, timeout)
        pending = self._sender.put(half, deadline_s)
        handle = pending.result(max(0.0, deadline_s - monotonic()))
        return self._half(half, handle)

    def begin_many(
        self,
        messages: Iterable[Message],
        *,
        group: str,
        hold: Duration = DEFAULT_HOLD,
        timeout: float | None = None,
    ) -> Halves:
        """Sends half messages that go with one local transaction; see `begin`.

        They are begun, and committed, in requests of 1,000. None has a level; one that is due by
        now is due at its commit. Either all are begun, or none: then those that were accepted are
        rolled back, or dropped by their check, and the error of the first that was not is raised.

        Example:
            ::

                lines = [Message("orders", text, delay="30m") for text in texts]
                with client.begin_many(lines, group="shop") as halves:
                    with db:
                        for half in halves:
                            barrier.record(db, half)
                    halves.commit()
        """
        self._check_open()
        many = [
            half_of(message, group, hold, self._clock) for message in checked_messages(messages)
        ]
        by_s = self._operations.begun_by_s(hold, timeout)
        begun = finished(self._operations.begin_many(many, by_s, self._half))
        return Halves(begun, self._commit_halves)

    def _half(self, message: Message, handle: Handle) -> Half:
        return Half(message, handle, self._commit_half, self._cancel_half)

    def _commit_half(self, half: Half) -> CommitOutcome:
        self._check_open()
        reference = half_reference(half, half.handle)
        deadline_s = self._deadline_s(HALF_TIMEOUT_S)
        return finished(self._operations.commits.change(reference, deadline_s)).outcome

    def _commit_halves(self, halves: Sequence[Half]) -> list[CommitOutcome | DelaywheelError]:
        self._check_open()
        named = [(half, half.handle) for half in halves]
        return finished(self._operations.commit_many(named))

    def _cancel_half(self, half: Half) -> RollbackOutcome:
        self._check_open()
        named, deadline_s = half_named(half, half.handle), self._deadline_s(HALF_TIMEOUT_S)
        return rolled_back(finished(self._operations.rollbacks.change(named, deadline_s)))

    def produce_many(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Result]:
        """Sends many messages and waits for all; returns one result each, in order.

        The error of none is raised: each is accepted or refused separately. They are split into
        requests of at most 1,000 messages and 2 MiB, `Queue.in_flight` of them under way at once.
        """
        self._check_open()
        many, deadline_s = checked_messages(messages), self._deadline_s(timeout)
        return finished(self._operations.deliver_many(many, deadline_s))

    def produce_async(
        self,
        topic: str,
        value: bytes | None,
        **options: Unpack[MessageOptions],
    ) -> PendingResult:
        """Queues one message to be sent in the background, together with others.

        Blocks only while the queue is full (see `Queue`); if that raises TimedOutError, nothing was
        queued. The client's timeout starts now, and includes the wait for room. Examine every
        result, one way or another: an error that is never examined is a lost message.

        Example:
            ::

                pending = [client.produce_async("orders", text, level="10m") for text in texts]
                handles = [one.result() for one in pending]
        """
        self._fork_guard.check()
        message = Message(topic, value, clock=self._clock, **options)
        return self._sender.put(message, self._deadline_s(None))

    def cancel(
        self,
        handle: Handle | str | None = None,
        *,
        topic: str | None = None,
        id: Id | None = None,
        due: datetime | None = None,
        timeout: float | None = None,
    ) -> Cancelled:
        """Cancels a pending message, named by its handle or by its topic, id and due.

        Its outcome CANCELLED means that it is never delivered. Cancels that threads wait for at the
        same time are sent together. After CANCEL_UNKNOWN it may have an effect: ask again.
        """
        self._check_open()
        message = message_ref(handle, topic, id, due)
        return finished(self._operations.cancels.change(message, self._deadline_s(timeout)))

    def get(
        self,
        handle: Handle | str | None = None,
        *,
        topic: str | None = None,
        id: Id | None = None,
        due: datetime | None = None,
        find_place: bool = False,
        timeout: float | None = None,
    ) -> StoredMessage | None:
        """Returns a stored message; None if it was never stored, or is finished and deleted.

        Name it by its handle, or by its topic, id and due. With `find_place`, its record is looked
        for in Kafka if it is done (`StoredMessage.place`): the answer may take 3 s.
        """
        self._check_open()
        message = message_ref(handle, topic, id, due)
        return finished(self._operations.get(message, timeout, find_place=find_place))

    def reschedule(
        self,
        handle: Handle | str | None = None,
        *,
        to: datetime | None = None,
        delay: Duration | None = None,
        topic: str | None = None,
        id: Id | None = None,
        due: datetime | None = None,
        timeout: float | None = None,
    ) -> Rescheduled:
        """Gives a pending message another due: it is delivered at one of the two, never at both.

        Name it by its handle, or by its topic, id and present `due`. The new due is `to`, or
        `delay` from now; one that has passed, or is nearer than half a second, means half a second
        from now. By its handle from before a reschedule it gets no other due again: the answer has
        the due, and the handle, that it has since then.

        After RESCHEDULE_UNKNOWN, or without an answer in time, it may have an effect: ask again
        with the same `to`. (What was asked for with a `delay` keeps the first due that was
        written.)
        """
        self._check_open()
        new = new_due(message_ref(handle, topic, id, due), to, delay, self._clock)
        return finished(self._operations.reschedules.change(new, self._deadline_s(timeout)))

    def reschedule_many(
        self,
        dues: Iterable[tuple[Handle | str, datetime | Duration]],
        *,
        timeout: float | None = None,
    ) -> list[RescheduleResult]:
        """Gives many pending messages other dues, or delays from now; see `reschedule`.

        1,000 are named in one request. Returns what became of each, in order: examine `error`, or
        `unwrap` it. MessageInvalidError: a handle or a due is invalid, and nothing was sent.

        Example:
            ::

                for result in client.reschedule_many((handle, "1h") for handle in handles):
                    print(result.unwrap().handle)
        """
        self._check_open()
        return finished(self._operations.reschedule_many(dues, timeout))

    def search(
        self,
        topic: str | None = None,
        *,
        limit: int = 100,
        timeout: float | None = None,
        **options: Unpack[FilterOptions],
    ) -> FoundMessages:
        """Finds pending messages that meet all conditions; seconds are searched one by one.

        The conditions are those of `FilterOptions`, and the topic; None: any. Its cost grows with
        what is pending between `due_from` and `due_to`: there is no index. The timeout applies to
        each page.
        """
        self._check_open()
        return finished(self._operations.search(topic, limit, timeout, options))

    def cancel_many(
        self,
        topic: str | None = None,
        *,
        handles: Iterable[Handle | str] | None = None,
        limit: int = 1_000,
        dry_run: bool = False,
        timeout: float | None = None,
        **options: Unpack[FilterOptions],
    ) -> ManyCancelled:
        """Cancels pending messages, each on its own: those named, or all that meet all conditions.

        The latter are found as by `search`; a range of dues alone is not enough (FILTER_MISSING).
        The call may be repeated: it finds the same messages again until they are due, and reports
        earlier cancels as cancelled, beyond the limit. The timeout applies to each page, of up to
        1,000; after TimedOutError some may be cancelled.

        Example:
            ::

                client.cancel_many("reminders", header=("trip", b"7"))
                client.cancel_many(handles=[result.handle for result in results])
        """
        self._check_open()
        operation = self._operations.cancel_many
        return finished(operation(topic, handles, limit, timeout, options, dry_run=dry_run))

    def flush(self, timeout: float | None = None) -> None:
        """Waits until everything that `produce_async` has taken so far has its result.

        Raises TimedOutError if a message has none yet; it is still under way.
        """
        self._fork_guard.check()
        if not self._sender.flush(self._deadline_s(timeout)):
            raise TimedOutError("some messages are still under way", outcome_known=False)

    def close(self, timeout: float | None = None) -> None:
        """Accepts no further messages, waits for those of `produce_async`, and closes.

        Messages that have no result when the time is over get an error as their result. Closing
        twice is harmless.
        """
        self._closed = True
        if not self._fork_guard.is_same_process():
            return
        self._sender.close()
        self._sender.flush(self._deadline_s(timeout))
        finished(self._calls.stop())
        self._sender.join()
        finished(self._operations.flush_trace())
        self._dropped.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self._fork_guard.check()
        if self._closed:
            raise ClientClosedError
