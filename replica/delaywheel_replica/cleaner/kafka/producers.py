"""The leader's transactional producers, on confluent-kafka.

confluent-kafka cannot combine delivery callbacks with transactions, so failures are detected where
they show:

| what failed | where it shows |
|---|---|
| a record that the client refuses (no such partition, too large) | `produce` raises; the |
|   | transaction is none the worse, the record is named |
| a header's name with U+0000, which the client would cut off there | found here: named as well |
| a batch that the broker refuses; a partition that cannot be added | after the flush `produce` |
|   | raises `_STATE`: it can only be aborted. `commit_transaction` then says why, and sends no |
|   | EndTxn |
| a record that failed inside the client: its topic went away | `commit_transaction` raises |
|   | `_INCONSISTENT` after its own flush, before it sends an EndTxn |
| the same partition again, after a refused batch | as a refused batch: an aftermath; the abort |
|   | heals it |
| no answer | `flush` leaves records behind, or `_TIMED_OUT` |
| fenced | any call: `_FENCED`, fatal |

So it is always known whether an EndTxn may be under way; core/protocol/transaction_outcomes.py
decides what that means. The clients send requests again within a call. Whether they may have done
so with an EndTxn is seen by the time that it took: of a commit, which is asked for once all records
are answered, from there; of an abort, since the transaction began, as records may be repeated too.

Records for many partitions take their time: the client sends a request for each, and a broker that
is busy, or was just started, takes milliseconds for each. So a flush does not end while answers
come: after its time it goes on until none has come for `ANSWER_MS`. A candidacy would only make the
next leader begin with the same records. Nor does a flush, or a commit, end while Kafka answers
questions: a broker that leaves has its partitions and coordinators moved, for seconds where brokers
are busy, and no other node would fare better. What went to a partition that takes nothing is given
up, since that may last. So does a transaction outlast a broker that was killed, until Kafka has
missed it (`MissedBrokers`).

Where Kafka throttles, it answers and then takes nothing for the time that it says
(core/protocol/producer_quota.py): no record is handed over before that time has passed, so that
none is under way then, and a transaction that cannot wait so long can be aborted with a known end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from confluent_kafka import KafkaError, KafkaException, Producer, ThrottleEvent
from confluent_kafka.admin import AdminClient

from delaywheel.kafka_admin import MissedBrokers
from delaywheel.transactional import (
    LEADER_TIMEOUT_MS,
    MAX_CALL_MS,
    TRANSACTION_TIMEOUT_MS,
    fatal_errors_as_they_are,
    words_of,
)
from delaywheel_replica.cleaner.kafka.client_log import LOGGER, error_of
from delaywheel_replica.cleaner.outside.ports import (
    ANSWER_MS,
    IDS,
    UNTAKEN,
    KafkaCallEnd,
    Record,
    RefusedRecord,
)
from delaywheel_replica.core.election.repeating import (
    ALONE_BACKOFF_MS,
    MOST_BACKOFF_MS,
    EndTimes,
    may_be_repeated,
)
from delaywheel_replica.core.protocol.producer_quota import THROTTLED
from delaywheel_replica.core.protocol.transaction_outcomes import (
    VERDICTS,
    Call,
    LibraryAnswer,
    TransactionState,
    answer_of,
)
from delaywheel_replica.kafka_settings import KafkaSettings

ROOM_S = 2.0
"""How long a full queue of the client may take to drain."""

ABORT_MS = 2_000

THROTTLED_S = 7.0
"""How long after its beginning a transaction may still be throttled: it must yet be committed."""

CLOSE_S = 1.0
"""How long a client that is closed may take to report what became of its records."""

LOOKED_UP = 32
"""The most topics that are looked up one by one: a thousand take seconds, and all of them 44 ms."""

_INIT_S = 0.2
"""How often an init that is not answered looks whether the term has ended."""

_LOOK_S = 0.1
"""How often a flush looks whether answers have come."""

MOVES_S = 5.0
"""So long after its beginning a transaction with messages waits for answers, though none has come:
moves of partitions take less, and what a silent topic holds up should not wait longer. One of our
records alone waits for as long as it may: there is no such topic to be found."""

MISSED_S = 18.0
"""The same, with messages or without, where a broker is away and Kafka has not missed it yet: for
its session of 9 s, and on busy machines some seconds more. Its copies count as in sync meanwhile,
so what has any there is answered to nobody. Below the brokers' own abort, `LEADER_TIMEOUT_MS`."""

ASK_S = 0.5
"""After so long without one Kafka is asked a question."""

ANSWER_S = 1.0
"""How long Kafka has for the answer."""

_ABORTABLE = KafkaError._STATE
_DELIVERY_FAILED = KafkaError._INCONSISTENT
_REFUSED = frozenset(
    {KafkaError._UNKNOWN_PARTITION, KafkaError._INVALID_ARG, KafkaError.MSG_SIZE_TOO_LARGE}
)


class _Throttle:
    """Until when Kafka throttles a client; this alone is what the client knows of us.

    If it knew its producer, both would live on after their end, until the garbage collector comes
    by. A client whose init was not answered goes on with it for as long as it lives: a minute
    later, when its broker was back, one has fenced the leader of its own process.
    """

    def __init__(self) -> None:
        self.until_s = 0.0

    def note(self, event: ThrottleEvent) -> None:
        """Notes that a broker throttles; called while the client is polled."""
        self.until_s = max(self.until_s, time.monotonic() + event.throttle_time)


class TransactionalProducer:
    """One transactional id from init to end, with one transaction at a time.

    Once a call of a transaction fails, what follows is skipped, up to its `commit` or `abort`.

    Args:
        ends: Decides how soon requests are sent again, and learns; None: nothing is.
        questions: Decide whether a transaction that is not answered in the time of its calls is
            waited for; None: it is not.

    Attributes:
        answered_ms: When Kafka last answered the running transaction, or a question meanwhile, as
            far as that was seen; by the monotonic clock. For any thread.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        transactional_id: str,
        *,
        ends: EndTimes | None = None,
        questions: LeaderProducers | None = None,
        least_backoff_ms: int = 0,
        purpose: str = "leader",
        log_level: int,
    ) -> None:
        self._ends = ends
        self._questions = questions
        backoff_ms = MOST_BACKOFF_MS if ends is None else ends.backoff_ms
        self._backoff_ms = max(backoff_ms, least_backoff_ms)
        own = settings.producer(
            transactional_id,
            backoff_ms=self._backoff_ms,
            timeout_ms=TRANSACTION_TIMEOUT_MS if questions is None else LEADER_TIMEOUT_MS,
            purpose=purpose,
            log_level=log_level,
        )
        self._throttle = _Throttle()
        self._producer = Producer({**own, "throttle_cb": self._throttle.note}, logger=LOGGER)
        # Its init has begun, has not been answered, and goes on in the client.
        self.is_pending = False
        self._failed: KafkaCallEnd | None = None
        self._abortable = False
        # It is to be aborted although every record was taken: only the abort may be repeated.
        self._is_answered = False
        self._has_messages = False
        # A broker was away during the transaction, and Kafka had not missed it.
        self._outlasts = False
        self._began_s = 0.0
        # Read by another thread, so it is only set.
        self.answered_ms: int | None = None

    @property
    def throttled_until_s(self) -> float:
        """Until when Kafka has said that it throttles, by the monotonic clock. For any thread."""
        return self._throttle.until_s

    @property
    def failed(self) -> bool:
        """Whether the running transaction is known to be unable to commit."""
        return self._failed is not None

    @property
    def abortable(self) -> bool:
        """Whether the client itself refuses to commit the running transaction."""
        return self._abortable

    def init(self, timeout_ms: int) -> KafkaCallEnd:
        """Fences older producers of this id and ends their transactions; may be called again."""
        try:
            self._producer.init_transactions(timeout_ms / 1000)
        except KafkaException as exception:
            self.is_pending = error_of(exception).retriable()
            return _ended(Call.INIT, error_of(exception))
        self.is_pending = False
        return KafkaCallEnd(VERDICTS[Call.INIT, LibraryAnswer.OK])

    def begin(self) -> None:
        """Opens a transaction."""
        self._failed, self._abortable, self.answered_ms = None, False, None
        self._is_answered = self._has_messages = self._outlasts = False
        self._began_s = time.monotonic()
        try:
            self._producer.begin_transaction()
        except KafkaException as exception:
            self._failed = _ended(Call.BEGIN, error_of(exception))

    def write(self, records: Iterable[Record], *, are_ours: bool = False) -> list[RefusedRecord]:
        """Hands records over; returns those that the client refuses."""
        refused: list[RefusedRecord] = []
        self._has_messages |= not are_ours
        if self._failed is not None:
            return refused
        for index, record in enumerate(records):
            try:
                self._hand_over(record)
            except BufferError:
                # The client's queue is full: once it has drained, there is room.
                has_room = self.flush(int(ROOM_S * 1000))
                error = self._produce_into_empty(record) if has_room else None
            except KafkaException as exception:
                error = self._take_error(error_of(exception))
            else:
                continue
            if self.failed:
                break
            if error is not None:
                refused.append(RefusedRecord(index, error.name()))
        return refused

    def write_own(self, records: Iterable[Record]) -> None:
        """Hands over records without which the transaction must not be committed."""
        for refused in self.write(records, are_ours=True):
            self._failed = KafkaCallEnd(TransactionState.ABORT, refused.reason)

    def flush(self, timeout_ms: int) -> bool:
        """Waits for the brokers to answer every record; returns whether all answers came.

        Waits longer while answers come, or Kafka answers questions: see `_latest_s`.
        """
        if self.failed:
            return False
        try:
            with fatal_errors_as_they_are():
                unanswered = self._wait_for_answers(timeout_ms / 1000)
        except KafkaException as exception:
            self._failed = _ended(Call.FLUSH, error_of(exception))
            return False
        if unanswered:
            verdict = VERDICTS[Call.FLUSH, LibraryAnswer.TIMED_OUT]
            cause = f"no answer to {unanswered} records"
            if self._is_untaken():
                cause = f"{UNTAKEN}: {cause}, some for a partition that takes nothing"
            self._failed = KafkaCallEnd(verdict, cause)
            return False
        return self._wait_out()

    def _wait_out(self) -> bool:
        """Waits until Kafka takes more; returns whether the transaction can wait for so long."""
        left_s = self.throttled_until_s - time.monotonic()
        if self.throttled_until_s > self._began_s + THROTTLED_S and left_s > 0:
            cause = f"{THROTTLED}: Kafka takes nothing for {left_s:.1f} s, for a quota of its own"
            self._failed = KafkaCallEnd(TransactionState.ABORT, cause)
            self._is_answered = True
            return False
        if left_s > 0:
            time.sleep(left_s)
        return True

    def _wait_for_answers(self, timeout_s: float) -> int:
        """Returns how many records have no answer."""
        now_s = time.monotonic()
        until_s, before, ask_s = now_s + timeout_s, None, now_s + ASK_S
        while True:
            unanswered = self._producer.flush(max(0.0, min(_LOOK_S, until_s - now_s)))
            now_s = time.monotonic()
            until_s = max(until_s, min(self.throttled_until_s + ANSWER_MS / 1000, self._latest_s))
            if before is not None and unanswered < before:
                until_s = max(until_s, self._answered(self._latest_s))
                ask_s = now_s + ASK_S
            elif unanswered and now_s >= ask_s:
                if self._is_untaken():
                    self._answered(now_s)
                    return unanswered
                until_s = max(until_s, self._asked(has_messages=self._has_messages))
                now_s = time.monotonic()
                ask_s = now_s + ASK_S
            if not unanswered or now_s >= until_s:
                return unanswered
            before = unanswered

    @property
    def _latest_s(self) -> float:
        """Until when the transaction may wait for Kafka."""
        return self._began_s + (MISSED_S if self._outlasts else MAX_CALL_MS / 1000)

    def _asked(self, *, has_messages: bool = False) -> float:
        """Asks Kafka a question; returns until when its answer lets the transaction wait."""
        questions = self._questions
        if questions is None or not questions.answers():
            return 0.0
        self._outlasts |= questions.misses_broker()
        is_short = has_messages and not self._outlasts
        return self._answered(self._began_s + MOVES_S if is_short else self._latest_s)

    def _answered(self, latest_s: float) -> float:
        """Notes that Kafka has answered; returns until when that lets the transaction wait."""
        now_s = time.monotonic()
        self.answered_ms = round(now_s * 1000)
        return min(now_s + ANSWER_MS / 1000, latest_s)

    def _is_untaken(self) -> bool:
        return self._questions is not None and self._questions.is_untaken()

    def commit(self, last: Record, timeout_ms: int) -> KafkaCallEnd:
        """Ends the transaction with `last` as its last record."""
        if self.flush(timeout_ms):
            self.write_own([last])
            self.flush(timeout_ms)
        ended = self._failed or self._commit(timeout_ms)
        if ended.verdict is not TransactionState.ABORT:
            return ended
        cause = self.cause() or ended.cause
        return KafkaCallEnd(self.abort().verdict, cause)

    def cause(self) -> str | None:
        """Why the transaction failed, in Kafka's words."""
        if not self._abortable:
            return None if self._failed is None else self._failed.cause
        try:
            # Sends nothing: librdkafka refuses it with the error that caused the state.
            self._producer.commit_transaction(ABORT_MS / 1000)
        except KafkaException as exception:
            return words_of(error_of(exception))
        raise AssertionError("a transaction that could only be aborted was committed")

    def abort(self) -> KafkaCallEnd:
        """Drops everything written."""
        since_s = time.monotonic() if self._is_answered else self._began_s
        try:
            self._producer.abort_transaction(ABORT_MS / 1000)
        except KafkaException as exception:
            return _ended(Call.ABORT, error_of(exception))
        return self._ended_well(Call.ABORT, time.monotonic() - since_s)

    def close(self) -> None:
        """Drops what has no answer, and hears what the client still has to say.

        No record, and nothing that it would report, is left when the client itself goes: with
        thousands of unanswered records a cleaner ended with glibc's "double free", why was not
        found. For any thread, also while another call is under way: that ends soon.
        """
        with contextlib.suppress(KafkaException), fatal_errors_as_they_are():
            self._producer.purge()
            self._producer.flush(CLOSE_S)

    def warm(self, topics: Iterable[str], timeout_ms: int) -> bool:
        """Has the client look up topics, so that it knows their current partitions.

        Many of them are looked up with all others, in one call: the leader waits meanwhile.
        """
        names = [*topics]
        try:
            if len(names) > LOOKED_UP:
                self._producer.list_topics(timeout=timeout_ms / 1000)
                return True
            for topic in names:
                self._producer.list_topics(topic, timeout=timeout_ms / 1000)
        except KafkaException:
            return False
        return True

    def _produce_into_empty(self, record: Record) -> KafkaError | None:
        """Produces when nothing else is queued: a record that does not fit now never will."""
        try:
            self._hand_over(record)
        except BufferError:
            return KafkaError(KafkaError._QUEUE_FULL)
        except KafkaException as exception:
            return self._take_error(error_of(exception))
        return None

    def _hand_over(self, record: Record) -> None:
        topic, key, value, headers, partition, timestamp_ms = record
        self._producer.produce(
            topic,
            value=value,
            key=key,
            headers=headers,  # type: ignore[arg-type]  # its list is typed as invariant
            partition=partition,
            timestamp=max(timestamp_ms, 0),
        )

    def _take_error(self, error: KafkaError) -> KafkaError | None:
        if error.code() in _REFUSED:
            return error
        self._failed = _ended(Call.PRODUCE, error)
        self._abortable = error.code() == _ABORTABLE
        return None

    def _commit(self, timeout_ms: int) -> KafkaCallEnd:
        began_s = time.monotonic()
        try:
            self._wait_for_end(timeout_ms / 1000)
        except KafkaException as exception:
            error = error_of(exception)
            failed_before_end = error.code() == _DELIVERY_FAILED
            return _ended(Call.FLUSH if failed_before_end else Call.COMMIT, error)
        took_s = time.monotonic() - began_s
        if self._ends is not None:
            self._ends.add(round(took_s * 1000))
        with contextlib.suppress(KafkaException), fatal_errors_as_they_are():
            self._producer.poll(0)  # whether its last record was throttled
        return self._ended_well(Call.COMMIT, took_s)

    def _wait_for_end(self, timeout_s: float) -> None:
        """Commits; a call that has ended in time-out is taken up by the next one."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                self._producer.commit_transaction(max(0.0, min(ASK_S, until_s - time.monotonic())))
            except KafkaException as exception:
                is_late = error_of(exception).code() == KafkaError._TIMED_OUT
                if is_late:
                    until_s = max(until_s, self._asked())
                if not is_late or time.monotonic() >= until_s:
                    raise
            else:
                return

    def _ended_well(self, call: Call, took_s: float) -> KafkaCallEnd:
        if not may_be_repeated(took_s * 1000, self._backoff_ms):
            return KafkaCallEnd(VERDICTS[call, LibraryAnswer.OK])
        cause = f"{call.value} took {took_s:.3f} s and may have been repeated"
        return KafkaCallEnd(VERDICTS[call, LibraryAnswer.OK_RETRIED], cause)


class LeaderProducers:
    """The producers of all transactional ids, implementing `ProducersPort`."""

    def __init__(self, settings: KafkaSettings, ends: EndTimes | None = None) -> None:
        self._settings = settings
        self._ends = EndTimes() if ends is None else ends
        self.is_untaken: Callable[[], bool] = lambda: False
        self.alone: int | None = None
        self._admin = AdminClient(settings.admin(), logger=LOGGER)
        self._missed = MissedBrokers()
        self._producers: dict[int, TransactionalProducer] = {}
        self._guard = threading.Lock()
        self._is_destroyed = False

    @property
    def answered_ms(self) -> int | None:
        """When Kafka last answered a running transaction, or will, as it throttles; likewise."""
        times_ms = [producer.answered_ms for producer in [*self._producers.values()]]
        times_ms.append(self.throttled_until_ms)
        return max((at_ms for at_ms in times_ms if at_ms is not None), default=None)

    @property
    def throttled_until_ms(self) -> int | None:
        """Until when Kafka has said that it throttles one of them. For any thread."""
        until_s = max((one.throttled_until_s for one in [*self._producers.values()]), default=0.0)
        return round(until_s * 1000) or None

    def init(self, number: int, timeout_ms: int) -> KafkaCallEnd:
        """Makes a new producer of this id, which fences the older ones. For any thread.

        One whose init is not answered yet goes on instead: it could fence the new one.
        """
        assert 0 <= number < IDS
        name = self._settings.names.leader_id(number)
        with self._guard:
            if self._is_destroyed:
                return KafkaCallEnd(TransactionState.UNKNOWN, "the term has ended")
            known = self._producers.get(number)
            if known is None or not known.is_pending:
                self._producers[number] = TransactionalProducer(
                    self._settings,
                    name,
                    ends=self._ends,
                    questions=self,
                    least_backoff_ms=ALONE_BACKOFF_MS if number == self.alone else 0,
                    log_level=4,
                )
            producer = self._producers[number]
        if known is not None and known is not producer:
            _close_soon([known])
        ended = self._inited(producer, timeout_ms)
        if number == 0:
            self.answers()  # so it is connected when it matters
        return ended

    def _inited(self, producer: TransactionalProducer, timeout_ms: int) -> KafkaCallEnd:
        """Inits a producer; gives up soon after the term's end, so that it can be closed."""
        until_s = time.monotonic() + timeout_ms / 1000
        while True:
            left_s = until_s - time.monotonic()
            ended = producer.init(round(max(0.0, min(left_s, _INIT_S)) * 1000))
            if not producer.is_pending or self._is_destroyed or left_s <= _INIT_S:
                return ended

    def answers(self) -> bool:
        """Whether Kafka says that it has the control topic, on connections of its own.

        A broker takes nothing from a connection before it has answered what came before. A control
        topic that has gone is not waited for: it may come back empty.
        """
        control = self._settings.names.control
        try:
            found = self._admin.list_topics(control, timeout=ANSWER_S)
        except KafkaException:
            return False
        self._missed.note(found.brokers)
        return found.topics[control].error is None

    def misses_broker(self) -> bool:
        """Whether, as of the last answer, Kafka believes a broker to live that is away."""
        return self._missed.look()

    def begin(self, number: int) -> None:
        """Opens a transaction."""
        self._producers[number].begin()

    def write(self, number: int, records: Iterable[Record]) -> list[RefusedRecord]:
        """Hands records over, in order."""
        return self._producers[number].write(records)

    def write_own(self, number: int, records: Iterable[Record]) -> None:
        """Hands over records without which the transaction must not be committed."""
        self._producers[number].write_own(records)

    def flush(self, number: int, timeout_ms: int) -> bool:
        """Waits until the brokers have every record, and take more."""
        return self._producers[number].flush(timeout_ms)

    def commit(self, number: int, last: Record, timeout_ms: int) -> KafkaCallEnd:
        """Ends the transaction with `last` as its last record."""
        return self._producers[number].commit(last, timeout_ms)

    def warm(self, topics: Iterable[str], timeout_ms: int) -> bool:
        """Has all clients look up the topics."""
        names = list(topics)
        return all(producer.warm(names, timeout_ms) for producer in [*self._producers.values()])

    def destroy(self) -> None:
        """Closes all producers.

        On another thread (see `wait_closed`): the client's own may be waiting for a broker.
        """
        with self._guard:
            self._is_destroyed = True
            producers = list(self._producers.values())
            self._producers.clear()
        _close_soon(producers)


_closing: list[threading.Thread] = []
_closing_guard = threading.Lock()


def _close_soon(producers: list[TransactionalProducer]) -> None:
    closing = threading.Thread(target=_close, args=[producers], name="close", daemon=True)
    with _closing_guard:
        _closing.append(closing)
        closing.start()


def _close(producers: list[TransactionalProducer]) -> None:
    while producers:
        producers.pop().close()  # and destroyed, unless another call is still under way
    with _closing_guard:
        _closing.remove(threading.current_thread())


def wait_closed(timeout_s: float) -> bool:
    """Waits until all producers are closed that are to be.

    A process that ends before takes its memory from under the client's threads.
    """
    deadline_s = time.monotonic() + timeout_s
    with _closing_guard:
        closing = [*_closing]
    for thread in closing:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return not any(thread.is_alive() for thread in closing)


def _ended(call: Call, error: KafkaError) -> KafkaCallEnd:
    answer = answer_of(error.name(), requires_abort=error.txn_requires_abort())
    return KafkaCallEnd(VERDICTS[call, answer], words_of(error))
