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
| a transaction fails, or perhaps failed | nothing is handed out; a new producer ends what the |
|   | old one had begun, the note beside the committed offsets says which transaction set them, |
|   | and what is held is kept: its handlers have begun, or are spared |
| it is refused because of its records | half as many are committed at once; one alone gets |
|   | another outcome: a dead letter, or one without its value |
| Kafka is away | the same again, a little later each time |
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TypeVar

from delaywheel.consumer.book import CUT_RECORDS, Book, Counts, Cut
from delaywheel.consumer.message import (
    DONE,
    Batch,
    ConsumerError,
    Outcome,
    ReceivedMessage,
    SettledError,
    Settlement,
    State,
)
from delaywheel.consumer.order import KeyOrder, whole_lanes
from delaywheel.consumer.port import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    Broker,
    Failure,
    KafkaAway,
    Topic,
    insist,
)
from delaywheel.consumer.records import Incoming, Partition, Passed, Trip, unpack_retry
from delaywheel.consumer.rules.policy import Policy
from delaywheel.consumer.settings import Settings
from delaywheel.consumer.watching.events import Teller, Told
from delaywheel.consumer.watching.figures import Figures, HandlerTimes
from delaywheel.consumer.watching.health import ConsumerHealth, ConsumerTrouble
from delaywheel.levels import Duration
from delaywheel.message import time_text

_LOG = logging.getLogger("delaywheel.consumer")

FETCH_RECORDS = 1_000
FETCH_S = 0.1
PAUSE_AFTER_S = 0.25
"""A partition of which enough is held is paused after so long: the client drops what it has fetched
of a paused one. Until then nothing at all is fetched."""
REST_S = 0.01
SPACED_S = 0.02
"""Between transactions at least: Kafka is still writing the ends of the last one, and the client
would ask again only after its back-off."""
LOOK_S = 5.0
"""How long a topic that was made anew may be read at the old offsets."""

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
        self._order = KeyOrder(lost_after_ms=settings.lost_after_ms) if settings.ordered else None
        self._changed = threading.Condition()
        self._policy: Policy | None = None
        self._membership: bytes | None = None
        self._ours: Sequence[Partition] = ()
        self._must_recover = False
        self._doubtful: Cut | None = None
        self._failures = 0
        self._recover_at_s = 0.0
        self._give_up_s: float | None = None
        self._cut_most: int | None = None
        self._called_back = False
        self._topics: dict[str, Topic] = {}
        self._begun_with: dict[str, int] = {}
        self._look_at_s = 0.0
        self._crowded: set[Partition] = set()
        self._crowded_since_s: float | None = None
        self._last_commit_s = 0.0
        self._paused: set[Partition] = set()
        self._are_sources_paused = False
        self._is_paused_by_caller = False
        self._is_draining = False
        self._is_stopping = False
        self._has_ended = False
        self._wants_commit = False
        self._next_commit_s = 0.0
        self.health = ConsumerHealth()
        self._teller = Teller(settings.events)
        self._handler_times = HandlerTimes()
        self._lags: dict[Partition, int] = {}
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="delaywheel-consumer", daemon=True)

    # What callers ask for, on any thread.

    @property
    def counts(self) -> Counts:
        """The numbers of records by outcome."""
        return self._book.counts

    @property
    def oldest_in_hand_s(self) -> float:
        """How long the record has been in hand that holds up its partition longest; 0: none."""
        now_s = time.monotonic()
        with self._changed:
            in_hand = [one for one in self._book.firsts() if one.state is State.IN_HAND]
            return max((now_s - one.handed_s for one in in_hand), default=0.0)

    def figures(self) -> Figures:
        """Returns all figures, of one moment."""
        oldest_s = self.oldest_in_hand_s
        with self._changed:
            book = self._book
            return Figures(
                counts=replace(book.counts),
                dead_reasons=dict(book.dead_reasons),
                held=book.held,
                held_bytes=book.held_bytes,
                in_hand=book.in_hand(book.partitions),
                oldest_in_hand_s=oldest_s,
                lags={
                    at: unread + book.unended(at)
                    for at, unread in self._lags.items()
                    if at in book.positions
                },
                handled=tuple(self._handler_times.counts),
                handled_s=self._handler_times.sum_s,
            )

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
            if not self._may_hand_out:
                return batch
            now_ms, now_s = self._clock_ms(), time.monotonic()
            while len(batch) < most and (message := self._book.hand_out()) is not None:
                if self._is_for_a_handler(message, now_ms):
                    message.handed_s = now_s
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
        return self._settle(message, DONE)

    def all_done(self, messages: Sequence[ReceivedMessage]) -> None:
        """See `Desk`."""
        now_s = time.monotonic()
        with self._changed:
            for message in messages:
                if not message.is_settled:
                    self._note(message, DONE)
                    self._handler_times.add(now_s - message.handed_s)
            if self._is_draining:
                self._changed.notify_all()

    def hand_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """See `Desk`."""
        with self._changed:
            waiting = [one for one in messages if one.state is State.IN_HAND]
            for message in waiting:
                self._book.hold_back(message)
            self._book.put_back(waiting)
            self._notify()

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
        settlement = self._policy.failed(message, error, self._clock_ms())
        if settlement is not None:
            self._settle(message, settlement)
        return settlement is not None

    def is_outcome(self, error: Exception) -> bool:
        """See `Desk`."""
        assert self._policy is not None
        return self._policy.meaning(error) is not None

    def _settle(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        with self._changed:
            is_ours = self._note(message, settlement)
            self._handler_times.add(time.monotonic() - message.handed_s)
            if self._is_draining:
                self._changed.notify_all()
        if is_ours:
            _log_outcome(message, settlement)
        return is_ours

    def _is_for_a_handler(self, message: ReceivedMessage, now_ms: int) -> bool:
        """Whether a record is to be handed out now; if not, it is settled here or held back."""
        assert self._policy is not None
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
            _log_outcome(message, settlement)
        return settlement is None

    def _note(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        """Records an outcome, and decides whose turn it is then."""
        if message.is_settled:
            raise SettledError(f"{message!r} was settled before")
        if self._order is not None and message.state is not State.FORGOTTEN:
            written, freed = self._order.settled(message, settlement)
            if written:
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
            self.health.note(ConsumerTrouble.STOPPED, str(error) or repr(error))
        finally:
            with self._changed:
                lost = self._book.forget(self._book.partitions)
                self._has_ended = True
                self._notify()
            self._tell_lost(lost)
            try:
                self._broker.close()
            except Exception:  # noqa: BLE001 - whatever it was, this is the end
                _LOG.exception("closing the Kafka clients failed")

    def _begin(self) -> None:
        start = self._insist("Kafka does not answer", self._broker.start)
        if start is None:
            return
        self._policy = Policy(self._settings, start)
        limits = self._insist("the limits of ingress", lambda: (self._broker.limits(),))
        self._policy.learn_limits(None if limits is None else limits[0])
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
        if self._rests(now_s):
            records: Sequence[Incoming] = ()
        else:
            # While it is full nothing is fetched; but this call also serves the group.
            most = max(1, min(FETCH_RECORDS, self._book.room))
            records = self._broker.fetch(most, wait_s)
        if self._called_back and records:
            # They may have been fetched before the call or after it: read them again.
            if self._book.partitions:
                self._read_from(self._book.positions)
            records = ()
        self._take(records)
        if now_s >= self._look_at_s:
            self._look_at_topics()
        if self._must_recover:
            if time.monotonic() >= self._recover_at_s:
                self._recover()
        elif self._is_time_to_commit():
            self._commit()

    def _is_time_to_commit(self) -> bool:
        now_s = time.monotonic()
        if self._wants_commit or now_s >= self._next_commit_s:
            return True
        return self._book.is_worth_a_commit and now_s >= self._last_commit_s + SPACED_S

    def _rests(self, now_s: float) -> bool:
        """Waits a moment instead of fetching, if room may be free again soon."""
        since_s = self._crowded_since_s
        if since_s is None or now_s - since_s >= PAUSE_AFTER_S:
            return False
        with self._changed:
            self._changed.wait(REST_S)
        return True

    def _take(self, records: Sequence[Incoming]) -> None:
        if not records:
            return
        went_back = {
            Partition(record.place.topic, record.place.partition)
            for record in records
            if self._book.goes_back(record.place)
        }
        if went_back:
            self._assigned(self._ours, went_back)
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
            trip, headers = Trip(1, record.place), record.headers or []
        return ReceivedMessage(self, record, trip, headers)

    def _regulate(self, *, fetches: bool) -> None:
        """Pauses partitions of which enough is held, or all if the caller has paused."""
        with self._changed:
            partitions = self._book.partitions
            self._crowded = self._book.crowded(self._crowded)
            resting = self._resting_sources(partitions)
            if self._is_crowded_for_long():
                resting |= self._crowded
            if self._is_paused_by_caller or not fetches:
                resting = set(partitions)
        if resting - self._paused:
            self._broker.pause(sorted(resting - self._paused))
        if self._paused - resting:
            self._broker.resume(sorted(self._paused - resting))
        self._paused = resting

    def _is_crowded_for_long(self) -> bool:
        now_s = time.monotonic()
        if not self._crowded:
            self._crowded_since_s = None
        elif self._crowded_since_s is None:
            self._crowded_since_s = now_s
        return bool(self._crowded) and now_s - (self._crowded_since_s or 0.0) >= PAUSE_AFTER_S

    def _resting_sources(self, partitions: Sequence[Partition]) -> set[Partition]:
        """While too much is away, reads only returning records: waiting keeps the order then."""
        if self._order is None:
            return set()
        away_bytes, bound = self._order.away_bytes, self._settings.max_away_bytes
        if away_bytes >= bound or away_bytes * 2 <= bound:
            self._are_sources_paused = away_bytes >= bound
        if not self._are_sources_paused:
            return set()
        return {one for one in partitions if one.topic not in self._retry_topics}

    def _read_from(self, positions: Mapping[Partition, int | None]) -> None:
        self._broker.assign(positions)
        self._paused, self._crowded = set(), set()

    def _commit(self) -> None:
        """Commits settled records, in as many transactions as that takes."""
        while not self._must_recover:
            with self._changed:
                cut = self._book.cut(self._cut_most)
                self._wants_commit = False
            if cut is None:
                break
            membership = self._membership
            failure = (
                Failure("the consumer is no longer a member of its group")
                if membership is None
                else self._broker.commit(
                    cut.records, self._passed(cut.offsets, cut.name), membership
                )
            )
            with self._changed:
                told: Told = []
                if failure is None:
                    told = self._committed(cut)
                    self.health.note(ConsumerTrouble.COMMIT_FAILED, None)
                    self._failures = 0
                    self._widen()
                else:
                    self._fail(failure, cut)
                self._changed.notify_all()
            self._teller.outcomes(told)
            if failure is not None:
                self._teller.commit_failed(failure.text)
            if not cut.is_full:
                break
        self._last_commit_s = time.monotonic()
        self._next_commit_s = self._last_commit_s + self._settings.commit_every_ms / 1000

    def _committed(self, cut: Cut) -> Told:
        told = self._teller.worth_telling(cut.messages)
        self._book.committed(cut)
        return told

    def _fail(self, failure: Failure, cut: Cut) -> None:
        """Stops handing out until Kafka has shown what happened."""
        _LOG.warning("a transaction of %d records failed: %s", len(cut.messages), failure.text)
        self.health.note(ConsumerTrouble.COMMIT_FAILED, failure.text)
        self._must_recover = True
        self._book.counts.failed_commits += 1
        if failure.is_refusal:
            self._narrow(failure, cut)
            return
        self._doubtful = cut
        if self._failures:
            wait_s = FIRST_BACKOFF_S * 2.0 ** min(self._failures, 10)
            self._recover_at_s = time.monotonic() + min(wait_s, LONGEST_BACKOFF_S)
        self._failures += 1

    def _narrow(self, failure: Failure, cut: Cut) -> None:
        """Looks for the record that is refused, and gives it another outcome once it is alone."""
        self._cut_most = min(len(cut.messages), CUT_RECORDS) // 2
        if self._cut_most:
            return
        self._cut_most = 1
        (message,) = cut.messages
        assert self._policy is not None
        assert message.settlement is not None
        settlement = self._policy.instead(message, message.settlement, failure.text)
        _LOG.error("%r: %s", message, failure.text)
        if self._order is not None:
            written, _ = self._order.settled(message, settlement)
            known = {record.key for record in written}
            others = [one for one in message.settlement.order if one.key not in known]
            settlement = settlement._replace(order=(*others, *written))
        self._book.resettle(message, settlement)

    def _widen(self) -> None:
        if self._cut_most is not None:
            self._cut_most *= 2
            if self._cut_most >= CUT_RECORDS:
                self._cut_most = None

    def _recover(self) -> None:
        """Ends what the old producer had begun, and finds out whether that was committed."""
        if not self._renewed() or self._doubtful is None:
            return
        cut = self._doubtful
        found = self._insist(
            "no committed offsets", lambda: self._broker.committed(list(cut.offsets))
        )
        if found is None:  # the end was asked for
            self._must_recover = True
            return
        told: Told = []
        with self._changed:
            self._doubtful = None
            # One of them is enough: those of a topic that was deleted meanwhile are gone.
            if any(one is not None and one.transaction == cut.name for one in found.values()):
                told = self._committed(cut)
            self._notify()
        self._teller.outcomes(told)

    def _renewed(self) -> bool:
        def renew() -> bool:
            self._broker.renew_producer()
            return True

        is_renewed = self._insist("no transactional producer", renew) is not None
        self._must_recover = not is_renewed
        self._recover_at_s = 0.0
        return is_renewed

    def _look_at_topics(self) -> None:
        """Begins anew in topics that were made anew: the client would go on at the old offsets."""
        self._look_at_s = time.monotonic() + LOOK_S
        self._look_at_hand()
        if not self._ours:
            return
        self._look_behind()
        try:
            topics = self._broker.topics()
            limits = self._broker.limits()
        except KafkaAway as away:
            self.health.note(ConsumerTrouble.KAFKA_AWAY, f"no answer about the topics: {away}")
            return
        self.health.note(ConsumerTrouble.KAFKA_AWAY, None)
        assert self._policy is not None
        self._policy.learn_limits(limits)
        self._learn_partitions(topics)
        if any(
            one.topic in topics and _is_another(self._topics.get(one.topic), topics[one.topic])
            for one in self._ours
        ):
            self._assigned(self._ours)

    def _look_at_hand(self) -> None:
        """Finds a record that is never settled: later ones of its partition wait for it."""
        long_s = time.monotonic() - self._settings.stuck_after_ms / 1000
        with self._changed:
            stuck = [
                one
                for one in self._book.firsts()
                if one.state is State.IN_HAND and one.handed_s < long_s
            ]
        text = None
        if stuck:
            oldest = min(stuck, key=lambda one: one.handed_s)
            text = f"{oldest!r} is not settled, and holds up the commits of its partition"
        self._note_trouble(ConsumerTrouble.UNSETTLED, text)

    def _look_behind(self) -> None:
        """Finds out how much is unread, and what stands still behind an open transaction."""
        unread = self._broker.unread(self._book.positions)
        self._lags = {at: one.offsets for at, one in unread.items()}
        standing = {at for at, one in unread.items() if one.offsets} - self._paused
        found = sorted(self._broker.held_up({at: unread[at].offset for at in standing}))
        text = None
        if found:
            text = f"{found[0]} waits for a transaction that its producer leaves open"
            text += f", and {len(found) - 1} more" if found[1:] else ""
        self._note_trouble(ConsumerTrouble.TRANSACTION_OPEN, text)

    def _learn_partitions(self, topics: Mapping[str, Topic]) -> None:
        """Takes in how many partitions there are now."""
        counts = {name: one.partitions for name, one in topics.items()}
        assert self._policy is not None
        self._policy.learn_partitions(counts)
        needs = self._settings.ordered or self._settings.keep_partition
        few = [
            f"{names.retry} has {counts[names.retry]} partitions,"
            f" {names.source} {counts[names.source]}: add some to it"
            for names in self._settings.topics
            if needs and counts.get(names.source, 0) > counts.get(names.retry, 1 << 31)
        ]
        self._note_trouble(ConsumerTrouble.PARTITIONS_DIFFER, "; ".join(few) or None)

    def _note_trouble(self, trouble: ConsumerTrouble, text: str | None) -> None:
        """Notes it, and logs its beginning."""
        if text is not None and trouble not in self.health.troubles:
            _LOG.error("%s: %s", trouble, text)
        self.health.note(trouble, text)

    def _assigned(
        self, partitions: Sequence[Partition], went_back: AbstractSet[Partition] = frozenset()
    ) -> None:
        self._called_back = True
        self._ours = list(partitions)
        if self._must_recover:
            self._renewed()
        self._membership = self._broker.membership()
        if self._order is not None:
            partitions = self._whole_lanes(partitions)
        positions = self._insist("no committed offsets", lambda: self._find(partitions, went_back))
        # Only now: every transaction of an earlier owner has ended, and is visible.
        lanes = [
            one
            for one in partitions
            if self._order is not None and one.topic not in self._retry_topics
        ]
        away = self._insist("the order topics cannot be read", lambda: self._broker.away(lanes))
        if positions is None or away is None:  # the end was asked for
            positions, away = dict.fromkeys(partitions), {}
        self._read_from(positions)
        with self._changed:
            self._doubtful = None
            lost = self._book.assign(positions)
            for lane, known in away.items():
                assert self._order is not None
                self._order.assign(lane, self._settings.names_of(lane.topic).order, known)
            self._notify()
        self.health.note(ConsumerTrouble.COMMIT_FAILED, None)
        self._tell_lost(lost)
        self._teller.assigned(list(partitions))
        _LOG.info("assigned: %s", list(map(str, partitions)))

    def _whole_lanes(self, partitions: Sequence[Partition]) -> list[Partition]:
        whole = whole_lanes(self._settings, partitions)
        halves = sorted(set(partitions) - set(whole))
        text = f"not read without its counterpart: {', '.join(map(str, halves))}"
        self._note_trouble(ConsumerTrouble.PARTITION_UNREAD, text if halves else None)
        return whole

    def _find(
        self, partitions: Sequence[Partition], went_back: AbstractSet[Partition]
    ) -> dict[Partition, int | None]:
        """Returns where to read on; None: from the beginning.

        That is where the group was, unless the topic is another one, or ends before that.

        If a group begins at the end, that position is committed before it is used: later records
        are not skipped, even if this consumer dies at once.
        """
        topics = self._broker.topics()
        known = self._broker.committed(partitions)
        ends = self._broker.ends([one for one in partitions if known[one] is not None])
        positions: dict[Partition, int | None] = {}
        for partition, passed in known.items():
            positions[partition] = None if passed is None else passed.offset
            if passed is None:
                continue
            why = None
            if _is_another(Topic(passed.topic_id, 0), topics.get(partition.topic)):
                why = "the topic was made anew"
            elif passed.offset > ends[partition]:
                why = f"it ends at {ends[partition]}"
            elif partition in went_back:
                why = "its offsets went back"
            if why is not None:
                _LOG.error("%s is read from its beginning: %s", partition, why)
                positions[partition] = None
                self._book.counts.restarts += 1
        self._topics = topics
        self._learn_partitions(topics)
        if self._settings.start == "latest":
            positions |= self._begin_at_the_end([one for one in partitions if known[one] is None])
        return positions

    def _begin_at_the_end(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Returns the ends of partitions that the group has not begun with, once committed.

        A partition that was added after the group had begun is read from its beginning: all of its
        records came later. How many partitions there were is said in each commit.
        """
        new = [one for one in partitions if one.topic not in self._retry_topics]
        if not self._ours or self._membership is None:
            return {}
        for topic in {one.topic for one in self._ours} - self._retry_topics:
            if topic in self._topics and topic not in self._begun_with:
                count = self._topics[topic].partitions
                known = self._broker.committed([Partition(topic, n) for n in range(count)])
                said = [one.begun_with for one in known.values() if one is not None]
                self._begun_with[topic] = max(said) if said else count
        first = [one for one in new if one.number < self._begun_with.get(one.topic, 0)]
        if not first:
            return {}
        ends = self._broker.ends(first)
        failure = self._broker.commit((), self._passed(ends), self._membership)
        if failure is not None:
            self._broker.renew_producer()
            raise KafkaAway(failure.text)
        return ends

    def _passed(
        self, offsets: Mapping[Partition, int], transaction: str = ""
    ) -> dict[Partition, Passed]:
        nowhere = Topic("", 0)
        return {
            one: Passed(
                offset,
                self._topics.get(one.topic, nowhere).id,
                self._begun_with.get(one.topic, 0),
                transaction,
            )
            for one, offset in offsets.items()
        }

    def _revoked(self, partitions: Sequence[Partition]) -> None:
        self._called_back = True
        deadline = time.monotonic() + self._settings.drain_ms / 1000
        self._drain(partitions, deadline)
        self._settle_up(deadline)
        self._lost(partitions)
        with self._changed:
            self._is_draining = False
            self._notify()

    def _lost(self, partitions: Sequence[Partition]) -> None:
        self._called_back = True
        with self._changed:
            # Its offsets may be committed by others from now on: they no longer show our outcome.
            self._doubtful = None
            lost = self._book.forget(partitions)
            if self._order is not None:
                self._order.forget(partitions)
            self._changed.notify_all()
        self._tell_lost(lost)
        self._teller.revoked(list(partitions))
        self._ours = [one for one in self._ours if one not in partitions]

    @staticmethod
    def _tell_lost(messages: Sequence[ReceivedMessage]) -> None:
        for message in messages:
            message.tell_lost()

    def _drain(self, partitions: Sequence[Partition], deadline_s: float) -> None:
        """Hands out nothing more, and waits until records in hand are settled."""
        with self._changed:
            self._is_draining = True
            while self._book.in_hand(partitions) and time.monotonic() < deadline_s:
                self._changed.wait(FETCH_S)

    def _settle_up(self, deadline_s: float) -> None:
        """Commits what is settled, and what failed again: whoever reads on would handle it again.

        It is tried once at least, and again until this time.
        """
        self._give_up_s = deadline_s
        while True:
            if self._must_recover:
                self._recover()
            if not self._must_recover:
                self._commit()
            with self._changed:
                if not self._book.can_cut or time.monotonic() >= deadline_s:
                    break
            if self._must_recover:
                time.sleep(FIRST_BACKOFF_S)
        self._give_up_s = None

    def _end(self) -> None:
        """Ends gracefully: stays in the group until records in hand are settled."""
        deadline = time.monotonic() + self._settings.drain_ms / 1000
        with self._changed:
            self._notify()
        while self._book.in_hand(self._book.partitions) and time.monotonic() < deadline:
            self._turn(fetches=False)
        self._settle_up(deadline)

    def _insist(self, what: str, ask: Callable[[], _T]) -> _T | None:
        """Asks until Kafka answers; None if the end came meanwhile."""

        def note(trouble: str | None) -> None:
            text = None if trouble is None else f"{what}: {trouble}"
            self.health.note(ConsumerTrouble.KAFKA_AWAY, text)

        def gives_up() -> bool:
            if self._give_up_s is not None:
                return time.monotonic() >= self._give_up_s
            return self._is_stopping

        return insist(ask, note, gives_up)

    @property
    def _may_hand_out(self) -> bool:
        return not (
            self._is_draining
            or self._is_stopping
            or self._is_paused_by_caller
            # Until it is known what became of them, others may have these partitions.
            or self._must_recover
        )

    def _can_hand_out(self) -> bool:
        return self._book.has_waiting and self._may_hand_out

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def _raise_error(self) -> None:
        if self._error is not None:
            if isinstance(self._error, ConsumerError):
                raise self._error
            raise RuntimeError("the consumer's thread has ended") from self._error


def _log_outcome(message: ReceivedMessage, settlement: Settlement) -> None:
    """Says what failed: one line for each retry and each dead letter."""
    outcome, record = settlement.outcome, settlement.record
    if outcome is Outcome.RETRIED:
        due = time_text(settlement.due_ms)
        _LOG.warning("%r is retried at %s: %s", message, due, settlement.why)
    elif outcome is Outcome.DEAD and record is not None:
        _LOG.error("%r is a dead letter in %s: %s", message, record.topic, settlement.why)
    elif outcome is Outcome.EXPIRED:
        _LOG.warning("%r has expired: %s", message, settlement.why)


def _is_another(before: Topic | None, now: Topic | None) -> bool:
    """Whether a topic was deleted and made anew; not if Kafka does not say its id."""
    return before is not None and now is not None and "" != before.id != now.id != ""
