"""Transactional producers on the simulated Kafka, as `ProducersPort` wants them.

Records are sent by the next flush, in one request. The meaning of a report is looked up in
`VERDICTS` when it is needed, so that a test may change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from delaywheel_replica.cleaner.delivery.deferring import partition_of
from delaywheel_replica.cleaner.kafka.producers import ABORT_MS, THROTTLED_S
from delaywheel_replica.cleaner.outside.ports import (
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
from sim.kafka.brokers import Code
from sim.kafka.faults import draw_us
from sim.kafka.line import KafkaLine
from sim.kafka.log import Partition
from sim.machine.scheduler import US_PER_MS, US_PER_S

INIT_RETRY_S = 0.5
"""The pause before librdkafka asks again for an id whose markers are being written."""

BUSY_RETRY_S = 0.02
"""The same for a transaction that cannot begin yet."""

LOOK_S = 0.1
"""How often a client whose records are not answered looks whether they ever will be."""

ADD_RETRY_S = 0.5
"""The same for a partition that no coordinator adds."""


class SimProducers:
    """The producers of all transactional ids, as `ProducersPort` wants them.

    Simulated brokers answer all records of a transaction at once, or once they no longer throttle.
    """

    def __init__(self, line: KafkaLine, ends: EndTimes | None = None) -> None:
        self._line = line
        self._ends = EndTimes() if ends is None else ends
        self._producers: dict[int, SimProducer] = {}
        self._candidacy = 0
        self.is_untaken: Callable[[], bool] = lambda: False
        self.alone: int | None = None

    def init(self, number: int, timeout_ms: int) -> KafkaCallEnd:
        """Makes a new producer of this id, which fences the older ones."""
        assert 0 <= number < IDS
        if not self._producers:
            self._line.kafka.candidacies += 1
            self._candidacy = self._line.kafka.candidacies
        self._line.kafka.inited_again += number in self._producers
        name = self._line.names.leader_id(number)
        producer = SimProducer(
            self._line,
            name,
            self._ends,
            candidacy=self._candidacy,
            is_untaken=self._gives_up,
            least_backoff_ms=ALONE_BACKOFF_MS if number == self.alone else 0,
        )
        self._producers[number] = producer
        return producer.init(timeout_ms)

    def _gives_up(self) -> bool:
        return self.is_untaken()

    def begin(self, number: int) -> None:
        """Opens a transaction; `commit` reports a failure."""
        self._producers[number].begin()

    def write(self, number: int, records: Iterable[Record]) -> list[RefusedRecord]:
        """Hands records over, in order."""
        return self._producers[number].write(records)

    def write_own(self, number: int, records: Iterable[Record]) -> None:
        """Hands over records without which the transaction must not be committed."""
        self._producers[number].write_own(records)

    @property
    def answered_ms(self) -> int | None:
        """When records of a running transaction were last answered, or will be."""
        return self.throttled_until_ms

    @property
    def throttled_until_ms(self) -> int | None:
        """Until when Kafka has said that it throttles one of them."""
        return max((one.throttled_until_ms for one in self._producers.values()), default=0) or None

    def flush(self, number: int, timeout_ms: int) -> bool:
        """Waits until the brokers have what was written, and take more."""
        return self._producers[number].flush(timeout_ms)

    def commit(self, number: int, last: Record, timeout_ms: int) -> KafkaCallEnd:
        """Ends the transaction with `last` as its last record."""
        return self._producers[number].commit(last, timeout_ms)

    def warm(self, topics: Iterable[str], timeout_ms: int) -> bool:
        """Looks topics up, as all producers would at the same time."""
        kafka, names = self._line.kafka, list(topics)
        found = self._line.ask(lambda: [kafka.has(name) for name in names], timeout_ms / 1000)
        return found is not None

    def destroy(self) -> None:
        """Closes all producers without notifying the brokers."""
        self._producers.clear()


class SimProducer:
    """One transactional id, from its init to its end; one transaction at a time."""

    def __init__(
        self,
        line: KafkaLine,
        transactional_id: str,
        ends: EndTimes | None = None,
        candidacy: int = 0,
        is_untaken: Callable[[], bool] = lambda: False,
        least_backoff_ms: int = 0,
    ) -> None:
        self._candidacy = candidacy
        self._is_untaken = is_untaken
        self._line = line
        self._ends = ends
        backoff_ms = MOST_BACKOFF_MS if ends is None else ends.backoff_ms
        self._backoff_ms = max(backoff_ms, least_backoff_ms)
        self._began_us = 0
        self._id = transactional_id
        self._epoch = -1
        self._fatal: KafkaCallEnd | None = None
        self._failed: KafkaCallEnd | None = None
        self._queue: list[tuple[Partition, Record]] = []
        self._added: set[Partition] = set()
        self._throttled_until_us = 0
        self.throttled_until_ms = 0

    def init(self, timeout_ms: int) -> KafkaCallEnd:
        """Fences older producers of this id and ends their transactions."""
        line = self._line
        deadline_us = self._deadline_us(timeout_ms)
        request = partial(line.kafka.init_producer, self._id, self._candidacy)
        while True:
            faults = line.kafka.faults
            answer = line.ask(
                request,
                self._left_s(deadline_us),
                brokers_us=draw_us(line.random, faults.init_us),
                lost_reply=faults.lost_init_reply,
            )
            code, epoch = answer or (Code.TIMED_OUT, -1)
            if code not in {Code.CONCURRENT, Code.NOT_COORDINATOR}:
                self._epoch = epoch
                return _ended(Call.INIT, code)
            if not self._pause(INIT_RETRY_S, deadline_us):
                return _ended(Call.INIT, Code.TIMED_OUT)

    def begin(self) -> None:
        """Opens a transaction."""
        self._failed = self._fatal
        self._began_us = self._line.scheduler.now_us
        if self._epoch < 0:
            self._failed = _ended(Call.BEGIN, Code.NOT_READY)
        self._queue = []  # records already sent keep the old ones
        self._added = set()

    def write(self, records: Iterable[Record]) -> list[RefusedRecord]:
        """Hands records over; returns those that the client refuses."""
        refused: list[RefusedRecord] = []
        for index, record in enumerate(records):
            if self._failed is not None:
                break
            reason = self._take(record)
            if reason is not None:
                refused.append(RefusedRecord(index, reason))
        return refused

    def write_own(self, records: Iterable[Record]) -> None:
        """Hands over records without which the transaction must not be committed."""
        for refused in self.write(records):
            verdict = VERDICTS[Call.PRODUCE, answer_of(refused.reason)]
            self._failed = KafkaCallEnd(verdict, refused.reason)

    def flush(self, timeout_ms: int) -> bool:
        """Waits for the brokers' answers to what was written; returns whether all came.

        A refusal is an answer: it shows in what comes next.
        """
        if self._failed is not None:
            return False
        self._failed = self._send_queue(Call.FLUSH, self._deadline_us(timeout_ms))
        if self._failed is not None:
            return self._failed.verdict is TransactionState.ABORT
        self._wait_out()
        return self._failed is None

    def _wait_out(self) -> None:
        """Waits until the brokers take more, if the transaction can wait for so long."""
        scheduler = self._line.scheduler
        left_us = self._throttled_until_us - scheduler.now_us
        if left_us > 0 and self._throttled_until_us > self._began_us + THROTTLED_S * US_PER_S:
            cause = f"{THROTTLED}: for {left_us} us"
            self._failed = KafkaCallEnd(TransactionState.ABORT, cause)
        elif left_us > 0:
            scheduler.sleep(left_us / US_PER_S)

    def commit(self, last: Record, timeout_ms: int) -> KafkaCallEnd:
        """Ends the transaction with `last` as its last record."""
        self.flush(timeout_ms)
        self.write_own([last])
        self.flush(timeout_ms)
        ended = self._failed or self._commit(timeout_ms)
        if ended.verdict is not TransactionState.ABORT:
            return ended
        return KafkaCallEnd(self.abort().verdict, ended.cause)

    def abort(self) -> KafkaCallEnd:
        """Drops everything written."""
        self._queue = []
        cause = "" if self._failed is None else self._failed.cause or ""
        is_answered = cause.startswith(THROTTLED)
        began_us = self._line.scheduler.now_us if is_answered else self._began_us
        return self._end(Call.ABORT, self._deadline_us(ABORT_MS), began_us)

    def _take(self, record: Record) -> str | None:
        """Queues one record; returns why not, if it alone is refused."""
        line = self._line
        refuse = line.kafka.faults.refuse
        reason = None if refuse is None else refuse(record)
        if reason is not None:
            return reason
        partitions = line.kafka.partitions(record.topic)
        number = record.partition
        if not partitions:
            self._failed = _ended(Call.PRODUCE, Code.UNKNOWN_TOPIC, requires_abort=True)
            return None
        if number >= len(partitions):
            return "_UNKNOWN_PARTITION"
        if number < 0:
            number = line.random.getrandbits(16)
            if record.key is not None:
                number = partition_of(record.key, len(partitions))
        if record.timestamp_ms <= 0:
            record = record._replace(timestamp_ms=line.clock.wall_ms())
        self._queue.append((partitions[number % len(partitions)], record))
        return None

    def _commit(self, timeout_ms: int) -> KafkaCallEnd:
        began_us = self._line.scheduler.now_us
        ended = self._end(Call.COMMIT, self._deadline_us(timeout_ms), began_us)
        if self._ends is not None and ended.verdict.is_committed:
            self._ends.add((self._line.scheduler.now_us - began_us) // US_PER_MS)
        return ended

    def _send_queue(self, call: Call, deadline_us: int) -> KafkaCallEnd | None:
        """Sends what is written; returns how the transaction ended if brokers do not take it."""
        line = self._line
        while self._queue:
            if line.chance(line.kafka.faults.refused_batch):
                request: Callable[[], tuple[Code, int]] = _refused_batch
            else:
                request = partial(
                    line.kafka.produce,
                    self._id,
                    self._epoch,
                    line.node,
                    self._queue,
                    self._added,
                )
            # A muted connection takes nothing: what is sent waits there.
            muted_s = (self._throttled_until_us - line.scheduler.now_us) / US_PER_S
            if not self._pause(muted_s, deadline_us):
                return _ended(call, Code.TIMED_OUT)
            code, taken = line.ask(request, self._left_s(deadline_us)) or (Code.TIMED_OUT, 0)
            sent_bytes = sum(record.batch_bytes for _, record in self._queue[:taken])
            throttled_us = line.kafka.throttled_us(sent_bytes)
            if throttled_us:
                self._throttled_until_us = line.scheduler.now_us + throttled_us
                self.throttled_until_ms = line.clock.monotonic_ms() + throttled_us // US_PER_MS + 1
            self._queue = self._queue[taken:]
            pause_s = self._pauses_s().get(code)
            if pause_s is not None:
                code = Code.OK if self._pause(pause_s, deadline_us) else Code.TIMED_OUT
            if code is Code.NO_ANSWER:
                while not self._is_untaken():
                    if not self._pause(LOOK_S, deadline_us):
                        return _ended(call, Code.TIMED_OUT)
                return KafkaCallEnd(VERDICTS[call, LibraryAnswer.TIMED_OUT], f"{UNTAKEN}: {code}")
            if code is not Code.OK:
                refused = code in _REFUSALS
                return self._keep(_ended(call, code, requires_abort=refused))
        return None

    def _pauses_s(self) -> dict[Code, float]:
        """After which answers to records the client asks again, and how soon."""
        return {
            Code.CONCURRENT: BUSY_RETRY_S,
            Code.NOT_COORDINATOR: ADD_RETRY_S,
            Code.NOT_LEADER: self._backoff_ms / 1000,
        }

    def _end(self, call: Call, deadline_us: int, began_us: int) -> KafkaCallEnd:
        """Sends an EndTxn if the brokers know of the transaction."""
        if not self._added:
            return _ended(call, Code.OK)
        backoff_s = self._backoff_ms / 1000
        line, faults = self._line, self._line.kafka.faults
        commit = call is Call.COMMIT
        request = partial(line.kafka.end_transaction, self._id, self._epoch, commit=commit)
        if line.chance(faults.retried_end) and self._pause(backoff_s, deadline_us):
            line.send_copy(request, draw_us(line.random, faults.late_us))
        late = line.chance(faults.late_end)
        while True:
            code = line.ask(
                request,
                self._left_s(deadline_us),
                late_us=draw_us(line.random, faults.late_us) if late else 0,
                brokers_us=draw_us(line.random, faults.commit_us),
                lost_reply=faults.lost_end_reply,
            )
            code = code or Code.TIMED_OUT
            if code not in {Code.CONCURRENT, Code.NOT_COORDINATOR}:
                took_ms = (line.scheduler.now_us - began_us) / US_PER_MS
                retried = code is Code.OK and may_be_repeated(took_ms, self._backoff_ms)
                return self._keep(_ended(call, code, retried=retried))
            if not self._pause(backoff_s, deadline_us):
                return _ended(call, Code.TIMED_OUT)

    def _keep(self, ended: KafkaCallEnd) -> KafkaCallEnd:
        """Remembers that this producer is fenced for good."""
        if ended.cause is not None and ended.cause.startswith(Code.FENCED):
            self._fatal = ended
        return ended

    def _deadline_us(self, timeout_ms: int) -> int:
        return self._line.scheduler.now_us + timeout_ms * US_PER_MS

    def _left_s(self, deadline_us: int) -> float:
        return (deadline_us - self._line.scheduler.now_us) / US_PER_S

    def _pause(self, seconds: float, deadline_us: int) -> bool:
        """Waits before a retry; False: no time was left for that."""
        left_s = self._left_s(deadline_us)
        self._line.scheduler.sleep(max(0.0, min(seconds, left_s)))
        return left_s > seconds


_REFUSALS = (Code.REFUSED, Code.INVALID_STATE, Code.DENIED, Code.UNKNOWN_TOPIC)


def _refused_batch() -> tuple[Code, int]:
    return Code.REFUSED, 0


def _ended(
    call: Call, code: Code, *, requires_abort: bool = False, retried: bool = False
) -> KafkaCallEnd:
    name = None if code is Code.OK else code.value
    answer = answer_of(name, requires_abort=requires_abort, retried=retried)
    cause = f"{code.value}: {call.value}" if name or retried else None
    return KafkaCallEnd(VERDICTS[call, answer], cause)
