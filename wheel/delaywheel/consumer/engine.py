"""The thread behind a consumer: it fetches, commits, and takes part in the group.

Handlers run on the caller's threads, for as long as they like: this thread keeps polling Kafka
meanwhile, so the group does not consider the consumer dead. What it fetches is bounded; beyond the
bound, partitions are paused.

| what happens | what is done |
|---|---|
| partitions are revoked, or the end is near | nothing more is handed out; what is in hand may be |
|   | settled, for `drain`; what is settled is committed; the rest is forgotten |
| partitions are lost | they are forgotten |
| partitions are assigned | the committed offsets are read, once no transaction is open there |
| a transaction fails, or perhaps failed | all is forgotten; a new producer ends what the old one |
|   | had begun; then the committed offsets show what happened |
| Kafka is away | the same again, a little later each time |
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from delaywheel.consumer.book import Book, Counts
from delaywheel.consumer.message import (
    Batch,
    ConsumerError,
    Outcome,
    ReceivedMessage,
    SettledError,
    Settlement,
    State,
)
from delaywheel.consumer.order import KeyOrder, whole_lanes
from delaywheel.consumer.policy import DeadLetterReason, Policy
from delaywheel.consumer.port import Broker, KafkaAway, insist
from delaywheel.consumer.records import Incoming, Partition, Trip, unpack_retry
from delaywheel.consumer.settings import Settings
from delaywheel.levels import Duration

_LOG = logging.getLogger("delaywheel.consumer")

FETCH_RECORDS = 500
FETCH_S = 0.1

_T = TypeVar("_T")


class Engine:
    """One consumer's thread, and the desk where its messages are settled."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        *,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """Does nothing before `start`."""
        self._settings = settings
        self._broker = broker
        self._clock_ms = clock_ms
        self._retry_topics = frozenset(names.retry for names in settings.topics)
        self._book = Book(max_held=settings.max_held, max_held_bytes=settings.max_held_bytes)
        self._order = KeyOrder() if settings.ordered else None
        self._changed = threading.Condition()
        self._policy: Policy | None = None
        self._membership: bytes | None = None
        self._ours: Sequence[Partition] = ()
        self._must_recover = False
        self._called_back = False
        self._paused = False
        self._is_source_paused = False
        self._is_paused_by_caller = False
        self._is_draining = False
        self._is_stopping = False
        self._has_ended = False
        self._wants_commit = False
        self._next_commit_s = 0.0
        self._trouble: str | None = None
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="delaywheel-consumer", daemon=True)

    # What callers ask for, on any thread.

    @property
    def counts(self) -> Counts:
        """The numbers of records by outcome."""
        return self._book.counts

    @property
    def trouble(self) -> str | None:
        """Why nothing can be read or committed now; None if it can."""
        return self._trouble

    @property
    def partitions(self) -> list[Partition]:
        """The partitions that are assigned now."""
        with self._changed:
            return self._book.partitions

    @property
    def has_ended(self) -> bool:
        """Whether nothing will ever be handed out again."""
        return self._is_stopping or self._has_ended

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def listen(self, listener: Callable[[], None]) -> None:
        """Sets a callback for the thread: records may be available, or none ever will be."""
        with self._changed:
            self._listeners.append(listener)

    def hand_out(self, most: int) -> Batch:
        """Returns the longest-waiting records, up to this number; empty if none are available now.

        Raises:
            ConsumerError: The consumer cannot continue.
        """
        batch = Batch()
        with self._changed:
            self._raise_error()
            if self._is_draining or self._is_stopping or self._is_paused_by_caller:
                return batch
            while len(batch) < most and (message := self._book.hand_out()) is not None:
                if self._is_for_a_handler(message):
                    batch.append(message)
        return batch

    def wait(self, timeout_s: float) -> None:
        """Returns when records may be available, or after this time."""
        with self._changed:
            if self._can_hand_out() or self.has_ended:
                return
            self._changed.wait(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Waits until settled records are committed, as far as can be; returns whether all are."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._book.can_cut and not self._has_ended:
                self._wants_commit = True
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, FETCH_S))
            self._raise_error()
        return True

    def pause(self, *, on: bool) -> None:
        """Pauses or resumes handing out and fetching."""
        with self._changed:
            self._is_paused_by_caller = on
            self._notify()

    def stop(self) -> None:
        """Requests the end. Takes no lock: signal handlers may call it."""
        self._is_stopping = True

    def join(self) -> None:
        """Waits for the thread to end.

        Raises:
            ConsumerError: It failed.
        """
        self.join_quietly()
        self._raise_error()

    def join_quietly(self) -> None:
        """Waits for the thread to end, whether it failed or not."""
        if self._thread.ident is not None:
            self._thread.join()

    # The desk: see message.py.

    def done(self, message: ReceivedMessage) -> bool:
        """See `ReceivedMessage.done`."""
        return self._settle(message, Settlement(Outcome.DONE))

    def retry(
        self,
        message: ReceivedMessage,
        after: Duration | None,
        error: BaseException | str | None,
    ) -> bool:
        """See `ReceivedMessage.retry`."""
        assert self._policy is not None
        return self._settle(message, self._policy.retry(message, after, error, self._clock_ms()))

    def dead(
        self, message: ReceivedMessage, reason: str, error: BaseException | str | None
    ) -> bool:
        """See `ReceivedMessage.dead`."""
        assert self._policy is not None
        return self._settle(message, self._policy.dead(message, reason, error))

    def fail(self, message: ReceivedMessage, error: Exception) -> bool:
        """See `ReceivedMessage.fail`."""
        assert self._policy is not None
        meaning = self._policy.meaning(error)
        if meaning == "retry":
            self.retry(message, None, error)
        elif meaning == "dead":
            self.dead(message, DeadLetterReason.NOT_RETRIABLE, error)
        return meaning is not None

    def _settle(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        with self._changed:
            is_ours = self._note(message, settlement)
            if self._is_draining:
                self._changed.notify_all()
        return is_ours

    def _is_for_a_handler(self, message: ReceivedMessage) -> bool:
        """Whether a record is to be handed out now; if not, it is settled here or held back."""
        assert self._policy is not None
        now_ms = self._clock_ms()
        turn = True if self._order is None else self._order.admit(message, now_ms)
        if turn is False:
            self._book.hold_back(message)
            return False
        if turn is not True:
            self._note(message, self._policy.park(message, turn))
            return False
        settlement = self._policy.at_hand_out(message, now_ms)
        if settlement is not None:
            self._note(message, settlement)
        return settlement is None

    def _note(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        """Records an outcome, and decides whose turn it is then."""
        if message.is_settled:
            raise SettledError(f"{message!r} was settled before")
        if self._order is not None and message.state is not State.FORGOTTEN:
            written, freed = self._order.settled(message, settlement)
            settlement = settlement._replace(order=written)
            if freed:
                self._book.put_back(freed)
                self._notify()
        return self._book.settle(message, settlement)

    # The thread.

    def _run(self) -> None:
        try:
            self._begin()
            while not self._is_stopping:
                self._turn()
            self._end()
        except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
            self._error = error
        finally:
            with self._changed:
                self._book.forget(self._book.partitions)
                self._has_ended = True
                self._notify()
            try:
                self._broker.close()
            except Exception:  # noqa: BLE001 - whatever it was, this is the end
                _LOG.exception("closing the Kafka clients failed")

    def _begin(self) -> None:
        start = self._insist("Kafka does not answer", self._broker.start)
        if start is None:
            return
        self._policy = Policy(
            self._settings, ingress_topic=start.ingress_topic, most_bytes=start.ingress_max_bytes
        )
        if not self._renewed():
            return
        self._broker.subscribe(
            on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )

    def _turn(self, *, fetches: bool = True) -> None:
        """Fetches once, and commits if it is time."""
        self._regulate(fetches=fetches)
        now_s = time.monotonic()
        wait_s = FETCH_S
        if self._book.can_cut:
            wait_s = max(0.0, min(FETCH_S, self._next_commit_s - now_s))
        self._called_back = False
        # While it is full nothing is fetched; but this call also serves the group.
        most = max(1, min(FETCH_RECORDS, self._book.room))
        records = self._broker.fetch(most, wait_s)
        if self._called_back and records:
            # They may have been fetched before the call or after it: read them again.
            if self._book.partitions:
                self._broker.assign(self._book.positions)
                self._paused = self._is_source_paused = False
            records = ()
        self._take(records)
        if self._must_recover:
            self._recover()
        elif self._wants_commit or time.monotonic() >= self._next_commit_s:
            self._commit()

    def _take(self, records: Sequence[Incoming]) -> None:
        if not records:
            return
        messages = [self._message(record) for record in records]
        with self._changed:
            for message in messages:
                self._book.take(message)
            self._notify()

    def _message(self, record: Incoming) -> ReceivedMessage:
        if record.place.topic in self._retry_topics:
            trip, headers = unpack_retry(record)
        else:
            trip, headers = Trip(1, record.place), record.headers
        return ReceivedMessage(self, record, trip, headers)

    def _regulate(self, *, fetches: bool) -> None:
        """Pauses what is assigned while enough is held, or the caller has paused."""
        with self._changed:
            stop = self._book.is_full or self._is_paused_by_caller or not fetches
            go = self._book.has_room and not self._is_paused_by_caller and fetches
            partitions = self._book.partitions
        if stop and not self._paused:
            self._broker.pause(partitions)
            self._paused = True
        elif go and self._paused:
            self._broker.resume(partitions)
            self._paused = self._is_source_paused = False
        self._regulate_sources(partitions)

    def _regulate_sources(self, partitions: Sequence[Partition]) -> None:
        """While too much is away, reads only returning records: waiting keeps the order then."""
        if self._order is None or self._paused:
            return
        bound = self._settings.max_away_bytes
        sources = [one for one in partitions if one.topic not in self._retry_topics]
        if self._order.away_bytes >= bound and not self._is_source_paused:
            self._broker.pause(sources)
            self._is_source_paused = True
        elif self._order.away_bytes * 2 <= bound and self._is_source_paused:
            self._broker.resume(sources)
            self._is_source_paused = False

    def _commit(self) -> None:
        """Commits settled records, in as many transactions as that takes."""
        while not self._must_recover:
            with self._changed:
                cut = self._book.cut()
                self._wants_commit = False
            if cut is None:
                break
            membership = self._membership
            failure = (
                "the consumer is no longer a member of its group"
                if membership is None
                else self._broker.commit(cut.records, cut.offsets, membership)
            )
            with self._changed:
                if failure is None:
                    self._book.committed(cut)
                    self._trouble = None
                else:
                    self._fail(failure)
                self._changed.notify_all()
            if not cut.is_full:
                break
        self._next_commit_s = time.monotonic() + self._settings.commit_every_ms / 1000

    def _fail(self, failure: str) -> None:
        """Stops handing out and settling until Kafka has shown what happened."""
        _LOG.warning("a transaction failed, its records are read again: %s", failure)
        self._trouble = failure
        self._must_recover = True
        self._book.counts.failed_commits += 1
        self._book.forget(self._book.partitions)

    def _recover(self) -> None:
        """Ends what the old producer had begun, and continues from the committed offsets."""
        # `fetch` reports a rebalance that is under way, and then assigns again.
        if self._ours:
            self._assigned(self._ours)
        else:
            self._renewed()

    def _renewed(self) -> bool:
        def renew() -> bool:
            self._broker.renew_producer()
            return True

        is_renewed = self._insist("no transactional producer", renew) is not None
        self._must_recover = not is_renewed
        return is_renewed

    def _assigned(self, partitions: Sequence[Partition]) -> None:
        self._called_back = True
        self._ours = list(partitions)
        if self._must_recover:
            self._renewed()
        self._membership = self._broker.membership()
        if self._order is not None:
            partitions = whole_lanes(self._settings, partitions)
        positions = self._insist("no committed offsets", lambda: self._find(partitions))
        # Only now: every transaction of an earlier owner has ended, and is visible.
        lanes = [
            one
            for one in partitions
            if self._order is not None and one.topic not in self._retry_topics
        ]
        away = self._insist("the order topics cannot be read", lambda: self._broker.away(lanes))
        if positions is None or away is None:  # the end was asked for
            positions, away = dict.fromkeys(partitions), {}
        self._broker.assign(positions)
        self._paused = self._is_source_paused = False
        with self._changed:
            self._book.assign(positions)
            for lane, known in away.items():
                assert self._order is not None
                self._order.assign(lane, self._settings.names_of(lane.topic).order, known)
        _LOG.info("assigned: %s", list(map(str, partitions)))

    def _find(self, partitions: Sequence[Partition]) -> dict[Partition, int | None]:
        """Returns where to read on.

        If a group begins at the end, that position is committed before it is used: later records
        are not skipped, even if this consumer dies at once.
        """
        positions = self._broker.committed(partitions)
        if self._settings.start == "latest":
            new = [
                partition
                for partition, position in positions.items()
                if position is None and partition.topic not in self._retry_topics
            ]
            if new and self._membership is not None:
                ends = self._broker.ends(new)
                failure = self._broker.commit((), ends, self._membership)
                if failure is not None:
                    self._broker.renew_producer()
                    raise KafkaAway(failure)
                positions.update(ends)
        return positions

    def _revoked(self, partitions: Sequence[Partition]) -> None:
        self._called_back = True
        self._drain(partitions)
        self._commit()
        self._lost(partitions)

    def _lost(self, partitions: Sequence[Partition]) -> None:
        self._called_back = True
        with self._changed:
            self._book.forget(partitions)
            if self._order is not None:
                self._order.forget(partitions)
            self._changed.notify_all()
        self._ours = [one for one in self._ours if one not in partitions]

    def _drain(self, partitions: Sequence[Partition]) -> None:
        """Waits until records in hand are settled, for a bounded time."""
        deadline = time.monotonic() + self._settings.drain_ms / 1000
        with self._changed:
            self._is_draining = True
            while self._book.in_hand(partitions) and time.monotonic() < deadline:
                self._changed.wait(FETCH_S)
            self._is_draining = False

    def _end(self) -> None:
        """Ends gracefully: stays in the group until records in hand are settled."""
        deadline = time.monotonic() + self._settings.drain_ms / 1000
        with self._changed:
            self._notify()
        while self._book.in_hand(self._book.partitions) and time.monotonic() < deadline:
            self._turn(fetches=False)
        if not self._must_recover:
            self._commit()

    def _insist(self, what: str, ask: Callable[[], _T]) -> _T | None:
        """Asks until Kafka answers; None if the end was requested meanwhile."""

        def note(trouble: str | None) -> None:
            self._trouble = None if trouble is None else f"{what}: {trouble}"

        return insist(ask, note, lambda: self._is_stopping)

    def _can_hand_out(self) -> bool:
        return self._book.has_waiting and not (self._is_draining or self._is_paused_by_caller)

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def _raise_error(self) -> None:
        if self._error is not None:
            if isinstance(self._error, ConsumerError):
                raise self._error
            raise RuntimeError("the consumer's thread has ended") from self._error
