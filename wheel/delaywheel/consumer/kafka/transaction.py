"""One transaction: begin, records, offsets, end."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from delaywheel.consumer.kafka.failures import NoAnswerInTime, failure_of
from delaywheel.consumer.port import KafkaUnavailable, TransactionFailure
from delaywheel.consumer.records import Partition, Passed
from delaywheel.transactional import MAX_CALL_MS, Outgoing, fatal_errors_as_they_are

CALL_S = MAX_CALL_MS / 1000
LOOK_S = 0.2
"""A refused record is noticed so soon: the client keeps later ones of its partition."""
UNANSWERED_S = 1.0
"""Records without an answer for so long are a reason to ask, and to ask again, why that is so."""

RETRY_BACKOFF_MS = 250
"""How long the client waits before it repeats a request, give or take a fifth."""
_DROPPED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
_END_REPEATED_S = 0.8 * RETRY_BACKOFF_MS / 1000
"""The end of a transaction is not repeated sooner than this."""
_OFFSETS_REPEATED_S = 0.5
"""Nor are offsets: librdkafka's own delay, whatever the backoff."""


def _note(passed: Passed) -> str:
    """Returns what is said beside an offset."""
    said = passed._asdict()
    del said["offset"]
    return json.dumps({name: value for name, value in said.items() if value})


def read_note(offset: int, note: str | None) -> Passed:
    """Returns a committed offset with what is said beside it; other programs may say anything."""
    try:
        said = json.loads(note or "{}")
        return Passed(
            offset,
            str(said.get("topic_id", "")),
            int(said.get("begun_with", 0)),
            str(said.get("transaction", "")),
            int(said.get("deliveries", 0)),
            int(said.get("suspect_until", 0)),
        )
    except (ValueError, TypeError, AttributeError):
        return Passed(offset)


class _CoordinatorAwayError(KafkaUnavailable):
    """The coordinator of this transaction takes no connection, and that of another id does."""


class Transaction:
    """One transaction of a producer; `is_copy_loose` if the client may have repeated its end."""

    def __init__(
        self,
        producer: Producer,
        unable: Callable[[Collection[str]], AbstractSet[str]],
        should_leave: Callable[[], bool],
    ) -> None:
        """Begins nothing; `unable` asks which topics cannot be written to, if Kafka says so soon.

        `should_leave` says whether its coordinator is away, and another id has one.
        """
        self._producer = producer
        self._unable_of = unable
        self._should_leave = should_leave
        self._unable: frozenset[str] = frozenset()
        self._refused: list[tuple[str, KafkaError]] = []
        self._left: Counter[str] = Counter()
        self.is_copy_loose = False

    def commit(
        self,
        records: Sequence[Outgoing],
        offsets: Mapping[Partition, Passed],
        membership: bytes,
        *,
        one_by_one: bool = False,
    ) -> TransactionFailure | None:
        """Writes records and offsets; None: they are committed.

        The client joins records up to its `batch.size`, whatever their topic takes, and never
        splits them; `one_by_one` each is sent before the next one is given.
        """
        passed = [
            TopicPartition(at.topic, at.number, passed.offset, _note(passed))
            for at, passed in offsets.items()
        ]
        is_before_end = True
        try:
            self._producer.begin_transaction()
            for record in records:
                self._write(record)
                if one_by_one:
                    self._flush()
            self._flush()
            began_s = time.monotonic()
            self._send_offsets(passed, membership)
            ending_s = time.monotonic()
            is_before_end = False
            self._producer.commit_transaction(CALL_S)
        except (KafkaException, BufferError, KafkaUnavailable) as exception:
            cause = self._cause_of(exception, passed, membership)
            failure = failure_of(cause, self._refused, is_before_end=is_before_end)
            if isinstance(cause, _CoordinatorAwayError):
                return failure
            unanswered = frozenset(+self._left)
            if unanswered and not self._unable:
                self._unable = unanswered & self._unable_of(unanswered)
            return failure._replace(unanswered=unanswered, unable=self._unable)
        ended_s = time.monotonic()
        self.is_copy_loose = (
            ending_s - began_s >= _OFFSETS_REPEATED_S or ended_s - ending_s >= _END_REPEATED_S
        )
        return None

    def _cause_of(
        self, raised: Exception, passed: list[TopicPartition], membership: bytes
    ) -> Exception:
        """Returns why the records were dropped, if the client says no more of them than that.

        It drops the records of a transaction that has failed otherwise, for want of a right for
        example. What that was, the next call of the transaction is refused with; were it not
        refused, nothing would be committed by it.
        """
        if not self._refused or any(error.code() not in _DROPPED for _, error in self._refused):
            return raised
        self._refused.clear()
        try:
            self._send_offsets(passed, membership)
        except (KafkaException, KafkaUnavailable) as cause:
            return cause
        return raised

    def _write(self, record: Outgoing) -> None:
        self._left[record.topic] += 1

        def note(error: KafkaError | None, _: object) -> None:
            if error is None:
                self._left[record.topic] -= 1
            else:
                self._refused.append((record.topic, error))

        def hand_over() -> None:
            self._producer.produce(
                record.topic,
                value=record.value,
                key=record.key,
                headers=record.headers,  # type: ignore[arg-type]  # its list is typed as invariant
                partition=record.partition,
                on_delivery=note,
            )

        try:
            hand_over()
        except BufferError:
            self._flush()  # the client's queue is full: once that is sent, there is room
            hand_over()

    def _flush(self) -> None:
        """Waits until all records are answered.

        A topic that cannot be written to now would not answer in time, nor would a coordinator that
        is away, and all partitions of the consumer wait meanwhile: so Kafka is asked whether it is
        that.
        """
        began_s = asked_s = time.monotonic()
        while True:
            with fatal_errors_as_they_are():
                unanswered = self._producer.flush(LOOK_S)
            if self._refused:
                raise KafkaUnavailable("a record was refused")
            if not unanswered:
                return
            if time.monotonic() > began_s + CALL_S:
                raise NoAnswerInTime(f"no answer to {unanswered} records")
            if time.monotonic() > asked_s + UNANSWERED_S:
                topics = frozenset(+self._left)
                self._unable = topics & self._unable_of(topics)
                asked_s = time.monotonic()
                if not self._unable:
                    self._leave_if_away()
            if self._unable:
                named = ", ".join(sorted(self._unable))
                raise KafkaUnavailable(
                    f"{named}: no leader, or too few replicas in sync, of a partition"
                )

    def _leave_if_away(self) -> None:
        if self._should_leave():
            raise _CoordinatorAwayError("the coordinator of this transactional id is away")

    def _send_offsets(self, offsets: list[TopicPartition], membership: bytes) -> None:
        """Adds offsets to a transaction, on a thread that may be abandoned.

        The call of librdkafka does not end while the group's coordinator is away, whatever its
        time-out (its issue 5456), and when a single broker was restarted it did not end at all.
        KafkaUnavailable is raised then, and the producer is replaced, which fences the transaction
        that the call belongs to.
        """
        raised: list[Exception] = []
        has_ended = threading.Event()

        def call() -> None:
            try:
                self._producer.send_offsets_to_transaction(offsets, membership, CALL_S)
            except Exception as error:  # noqa: BLE001 - it is raised where the caller waits
                raised.append(error)
            has_ended.set()

        threading.Thread(target=call, name="delaywheel-offsets", daemon=True).start()
        deadline_s = time.monotonic() + CALL_S
        while not has_ended.wait(min(UNANSWERED_S, CALL_S)):
            if time.monotonic() >= deadline_s:
                raise KafkaUnavailable("the coordinator of the group did not answer")
            self._leave_if_away()
        if raised:
            raise raised[0]
