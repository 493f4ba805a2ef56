"""The transactions of a consumer, and what became of those that failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from delaywheel.consumer.book import CUT_RECORDS, Cut
from delaywheel.consumer.engine.deliveries import Deliveries, DeliveryMark
from delaywheel.consumer.engine.dispatcher import Dispatcher
from delaywheel.consumer.engine.held_up import HeldUp
from delaywheel.consumer.engine.positions import Positions
from delaywheel.consumer.engine.rights_watch import RightsWatch
from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.message import (
    Outcome,
    ReceivedMessage,
    Settlement,
)
from delaywheel.consumer.port import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    KafkaUnavailable,
    RightMissing,
    TopicTooSmall,
    TransactionFailure,
)
from delaywheel.consumer.records import Partition, Passed
from delaywheel.consumer.watching.counting import CommitCounts
from delaywheel.consumer.watching.events import CommittedOutcomes
from delaywheel.consumer.watching.health import ConsumerTrouble

_LOG = logging.getLogger("delaywheel.consumer")

_SPACED_S = 0.02
"""Between transactions at least: Kafka is still writing the ends of the last one, and the client
would ask again only after its back-off."""
_SIZED_S = 10.0
"""What the topics of retries take is asked again after so long, while there are retries."""
_COMING_BACK = frozenset({Outcome.RETRIED, Outcome.PARKED})


class Commits:
    """Commits what is settled: on the engine's thread."""

    def __init__(
        self,
        state: EngineState,
        positions: Positions,
        dispatcher: Dispatcher,
        deliveries: Deliveries,
        rights: RightsWatch,
    ) -> None:
        self._state = state
        self._rights = rights
        self._deliveries = deliveries
        self._book = state.book
        self._positions = positions
        self._dispatcher = dispatcher
        self._doubtful: Cut | None = None
        self._failures = 0
        self._recover_at_s = 0.0
        self._cut_most: int | None = None
        # What was refused together ends here: until it is committed nothing else is, or a busy
        # partition would fill each narrower cut, and the refused record would never be alone.
        self._cut_before: Mapping[Partition, int] | None = None
        self._held_up = HeldUp(state.book)
        self._counts = CommitCounts(state.settings.trace, state.broker)
        self._known_topics: set[str] = set()
        self._sized_s: dict[str, float] = {}
        self._resting: Mapping[Partition, int] = {}
        self._refused: tuple[Settlement, Mapping[str, int]] | None = None
        self._confirmed: tuple[int, AbstractSet[str]] = (0, frozenset())
        self.is_outdated = False
        """Whether a topic was recreated: what is settled cannot be told from what is gone."""
        self.last_s = 0.0
        self.next_s = 0.0

    def commit_if_due(self) -> None:
        """Commits if it is time, or recovers."""
        now_s = time.monotonic()
        if self._state.must_recover:
            if now_s >= self._recover_at_s:
                self.recover()
        elif self._is_time(now_s):
            self.commit()
        if self._deliveries.is_watching:
            self._begin()
            self._go_on_with_suspects()
        self._say_what_is_suspect()

    def _is_time(self, now_s: float) -> bool:
        if self._dispatcher.wants_commit or now_s >= self.next_s:
            return True
        is_urgent = self._book.is_worth_a_commit or (
            self._deliveries.is_urgent and self._book.can_cut
        )
        return is_urgent and now_s >= self.last_s + _SPACED_S

    def _begin(self) -> None:
        """Notes of partitions that their first record is handed out."""
        marks = {} if self._state.must_recover else self._deliveries.to_begin()
        if not marks:
            return
        self.mark(marks)
        with self._state.changed:
            self._deliveries.begin(marks)
            self._state.notify()

    def _go_on_with_suspects(self) -> None:
        """Hands out the next records that may end the process, or condemns one."""
        found = self._deliveries.next_suspects() if self._state.may_hand_out else {}
        self.mark({at: mark for at, mark in found.items() if mark is not None})
        for at, mark in found.items():
            message = self._book.first_kept(at)
            if mark is None and message is not None:
                self._dispatcher.condemn(message)

    def _say_what_is_suspect(self) -> None:
        suspects = self._deliveries.suspects if self._deliveries.is_watching else {}
        if len(suspects) == self._state.suspects:
            return
        self._state.suspects = len(suspects)
        text = None
        if suspects:
            at, until = next(iter(suspects.items()))
            text = f"{at} is handled record by record, up to offset {until}"
            text += f", and {len(suspects) - 1} more partitions are" if len(suspects) > 1 else ""
            text += ": whoever had it before has died with records in hand"
        self._state.note_trouble(ConsumerTrouble.RECORD_BY_RECORD, text)

    def mark(self, marks: Mapping[Partition, DeliveryMark]) -> bool:
        """Notes deliveries beside offsets that stay; returns whether they are noted."""
        marks = {at: mark for at, mark in marks.items() if not self._book.is_withheld(at)}
        passed = {
            at: one._replace(deliveries=marks[at].deliveries, suspect_until=marks[at].suspect_until)
            for at, one in self._positions.passed(
                {at: mark.offset for at, mark in marks.items()}
            ).items()
        }
        if not self._commit_offsets(passed):
            return False
        with self._state.changed:
            self._deliveries.marked(marks)
            self._state.notify()
        return True

    def _commit_offsets(self, passed: Mapping[Partition, Passed]) -> bool:
        """Commits offsets without records; returns whether they certainly are committed."""
        state = self._state
        membership = self._membership() if passed else None
        if state.must_recover or membership is None:
            return False
        failure = state.broker.commit((), passed, membership)
        if failure is None:
            return True
        _LOG.warning("offsets were not committed: %s", failure.text)
        self._note_refusal(failure)
        state.must_recover = True
        self._back_off()
        return False

    def rest(self) -> None:
        """Commits the positions of partitions that are read to their ends.

        Ends of transactions lie behind the last record, and would be a lag for ever. A position is
        committed once it was seen twice: while records come, their own commits pass it.
        """
        now = self._book.at_rest if self._state.may_hand_out else {}
        resting = {at: offset for at, offset in now.items() if self._resting.get(at) == offset}
        self._resting = now
        if not self._commit_offsets(self._positions.passed(resting)):
            return
        with self._state.changed:
            self._book.passed(resting)
            self._deliveries.committed(resting)
            self._state.notify()

    def give_back(self, partitions: Iterable[Partition]) -> None:
        """Notes that what was begun of these partitions was given up in good order."""
        self.mark(self._deliveries.to_give_back(partitions))

    def commit(self) -> None:
        """Commits settled records, in as many transactions as that takes."""
        state = self._state
        while not state.must_recover:
            tried = self._to_try(time.monotonic())
            if not self._is_confirmed(tried):
                break
            cut = self._cut(tried)
            if cut is None:
                break
            with state.changed:
                outcomes = state.events.to_report(cut)
            failure = self._try(cut, outcomes)
            if failure is None:
                with state.changed:
                    self._committed(cut)
                    state.health.note(ConsumerTrouble.COMMIT_FAILED, None)
                    self._failures = 0
                    self._widen()
                    state.notify()
                state.events.outcomes(outcomes._replace(is_counted=cut.is_counted))
            else:
                with state.changed:
                    self._fail(failure, cut)
                    state.changed.notify_all()
                if failure.is_refusal:
                    self._narrow(failure, cut)
                elif failure.is_late:
                    # A quota of Kafka, or slow brokers: half as much may come in time.
                    self._cut_most = max(1, min(cut.count, CUT_RECORDS) // 2)
                state.events.commit_failed(failure.text)
            if not cut.is_full and self._cut_before is None and not tried:
                break
        self.last_s = time.monotonic()
        self.next_s = self.last_s + state.settings.commit_every_ms / 1000

    def _to_try(self, now_s: float) -> Collection[Partition]:
        """Returns partitions that were held up, and may be so no longer."""
        topic = self._held_up.due(now_s)
        if topic is None:
            return ()
        waiting = self._held_up.waiting_for(topic)
        with self._state.changed:
            has_some = self._book.cut(1, None, waiting) is not None
        if not has_some:  # they have been read again meanwhile, from elsewhere on
            self._answered(waiting)
        elif self._is_able(topic) and self._sizes_for(waiting) is not None:
            return waiting
        else:
            self._held_up.put_off(topic, now_s)
        return ()

    def _is_able(self, topic: str) -> bool:
        """Whether a topic can be written to now, as Kafka says, and is read."""
        if topic == self._state.policy.unread_topic:
            return False
        try:
            return not self._state.ask(lambda: self._state.broker.unable({topic}))
        except KafkaUnavailable:
            return False

    def _cut(self, only: Collection[Partition]) -> Cut | None:
        """Returns what to commit next, once it is known what its topics are and take now."""
        while True:
            with self._state.changed:
                cut = self._book.cut(self._cut_most, self._cut_before, only)
                if cut is None and self._cut_before is not None:
                    self._cut_before = None
                    cut = self._book.cut(self._cut_most, None, only)
                self._dispatcher.wants_commit = False
            if cut is None:
                return None
            settled = [(block.message(index), one) for block, index, one in cut.settled()]
            short = [each for each in settled if each[1].omitted and not each[1].is_measured]
            writers = [each for each in settled if each[1].writes is not None]
            unread = self._state.policy.unread_topic
            wanting = {message.at for message, one in settled if unread in one.topics}
            if unread is not None and wanting:
                self._held_up.hold_up(wanting, unread, time.monotonic(), "no leader reads it")
                self._say_what_is_held_up()
                if only:
                    return None
                continue
            back = {message.at for message, one in settled if one.outcome in _COMING_BACK}
            if not only and not self._are_taken_back(back):
                return None
            is_changed = self._measure(short) if short else self._look_for_topics(writers)
            if is_changed is None:
                return None
            if not is_changed:
                return cut

    def _measure(self, short: Sequence[tuple[ReceivedMessage, Settlement]]) -> bool | None:
        """Makes letters as whole as their topics take them now; None: it is not known."""
        if self._sizes_for({message.at for message, _ in short}) is None:
            return None
        with self._state.changed:
            for message, settlement in short:
                measured = self._state.policy.measured(message, settlement)
                self._book.resettle(message, measured)
        return True

    def _are_taken_back(self, partitions: Collection[Partition]) -> bool:
        """Whether the topics of retries take what their sources do, as of a while ago at most.

        A retry that its topic refuses is delaywheel's dead letter, and none of the group's. Those
        of which nobody says it are written.
        """
        topics, now_s = self._state.settings.topics, time.monotonic()
        seen_s = {at: self._sized_s.get(topics.names_of(at.topic).retry, 0.0) for at in partitions}
        due = [at for at, one in seen_s.items() if now_s >= one + _SIZED_S]
        if due:
            self._sizes_for(due)
        taken = [at for at in due if at not in self._book.held_up]
        self._sized_s |= {topics.names_of(at.topic).retry: now_s for at in taken}
        return len(taken) == len(due)

    def _look_for_topics(
        self, writers: Sequence[tuple[ReceivedMessage, Settlement]]
    ) -> bool | None:
        """Fails records whose handlers have written to topics that are not there; were there any?

        The client would wait for such a topic, and all others with it. None: Kafka does not say, or
        not to us.
        """
        state = self._state
        topics = {message: _topics_of(settlement) for message, settlement in writers}
        wanted = frozenset().union(*topics.values()) - self._known_topics
        if not wanted:
            return False
        try:
            self._known_topics |= state.ask(lambda: state.broker.topics(wanted)).keys()
        except KafkaUnavailable as gone:
            state.note_away("whether topics exist", gone)
            if isinstance(gone, RightMissing):  # as if the transaction were refused
                state.is_commit_refused = state.must_recover = True
                self._back_off()
            return None
        missing = wanted - self._known_topics
        for message, settlement in writers:
            if unknown := sorted(missing & topics[message]):
                why = f"topic {unknown[0]} does not exist"
                failed = state.policy.write_failed(message, why, state.clock_ms())
                self._resettle(message, settlement, failed, why)
        return bool(missing)

    def _sizes_for(self, partitions: Collection[Partition]) -> Mapping[str, int] | None:
        """Asks what the topics take that outcomes of these go to; None: nobody says, or too little.

        Partitions whose topic of letters or retries takes less than they do are held up.
        """
        state, names_of = self._state, self._state.settings.topics.names_of
        sizes: dict[str, int] = {}
        for names in {names_of(at.topic) for at in partitions}:
            try:
                sizes |= state.ask(partial(state.broker.sizes, [names]))
            except KafkaUnavailable as gone:
                state.note_away("what topics take", gone)
                return None
            except TopicTooSmall as error:
                theirs = [at for at in partitions if names_of(at.topic) == names]
                self._held_up.hold_up(theirs, error.topic, time.monotonic(), error.text)
                self._say_what_is_held_up()
                return None
        state.policy.learn_sizes(sizes)
        return sizes

    def _is_confirmed(self, tried: Collection[Partition]) -> bool:
        """Whether what was fetched is of the topics that its offsets are to be committed for.

        The client goes on in a topic that is recreated, at the old offset. Committed for the old
        one, its records would be read from the beginning once more, and have two outcomes.
        """
        self.is_outdated = False
        with self._state.changed:
            topics = self._book.settled_topics | {at.topic for at in tried}
            asked = self._book.taken, topics
        if not asked[1] or asked == self._confirmed:
            return True
        is_current = self._positions.are_current(asked[1])
        self.is_outdated = is_current is False
        if is_current:
            self._confirmed = asked
        return bool(is_current)

    def _try(self, cut: Cut, outcomes: CommittedOutcomes) -> TransactionFailure | None:
        membership = self._membership()
        if membership is None:
            return TransactionFailure("the consumer is no longer a member of its group")
        passed = self._positions.passed(cut.offsets, cut.name)
        counted = self._counts.records(outcomes, self._state.clock_ms())
        cut.is_counted = bool(counted)
        self._state.are_counts_forbidden = self._counts.is_forbidden
        records = self._state.policy.routed(cut.records)
        records = [*records, *counted] if counted else records
        failure = self._state.broker.commit(records, passed, membership, one_by_one=cut.most == 1)
        return self._counts.ended(counted, failure)

    def _membership(self) -> bytes | None:
        state = self._state
        if state.broker.is_incremental:  # it goes on while partitions stay
            state.membership = state.broker.membership()
        return state.membership

    def _committed(self, cut: Cut) -> None:
        self._state.is_commit_refused = False
        self._book.committed(cut)
        self._deliveries.committed(cut.offsets)
        self._answered(cut.offsets)

    def _answered(self, partitions: Iterable[Partition]) -> None:
        """Takes in that partitions are not held up, or no longer."""
        self._held_up.forget(partitions)
        self._say_what_is_held_up()

    def _say_what_is_held_up(self) -> None:
        text = self._held_up.text
        if text != self._state.health.troubles.get(ConsumerTrouble.HELD_UP):
            self._state.note_trouble(ConsumerTrouble.HELD_UP, text)

    def _fail(self, failure: TransactionFailure, cut: Cut) -> None:
        """Stops handing out until Kafka has shown what happened."""
        _LOG.warning("a transaction of %d records failed: %s", cut.count, failure.text)
        if not self._note_refusal(failure):
            self._state.health.note(ConsumerTrouble.COMMIT_FAILED, failure.text)
        self._state.must_recover = True
        self._known_topics.clear()
        self._book.counts.failed_commits += 1
        if failure.is_refusal:
            self._answered(cut.offsets)
            return
        self._held_up.failed(cut, failure.unanswered, failure.unable, time.monotonic())
        self._say_what_is_held_up()
        if failure.has_begun_to_end or not failure.is_forbidden:
            self._doubtful = cut
        self._back_off()

    def _note_refusal(self, failure: TransactionFailure) -> bool:
        """Notes a missing right, if one is, and returns whether; raises unless it is waited for."""
        if failure.is_forbidden:
            self._state.is_commit_refused = True
            self._state.refused(failure.text)
        return failure.is_forbidden

    def _back_off(self) -> None:
        """Waits before the next recovery, longer each time."""
        if self._failures:
            wait_s = FIRST_BACKOFF_S * 2.0 ** min(self._failures, 10)
            self._recover_at_s = time.monotonic() + min(wait_s, LONGEST_BACKOFF_S)
        self._failures += 1

    def _narrow(self, failure: TransactionFailure, cut: Cut) -> None:
        """Looks for the record that is refused, and gives it another outcome once it is alone.

        Not at once: what its topic takes may have been lowered for a moment, and brokers do not
        hear of a change at the same time.
        """
        self._cut_before = dict(cut.offsets)
        self._cut_most = min(cut.count, CUT_RECORDS) // 2
        if self._cut_most:
            return
        self._cut_most = 1
        ((block, index, refused),) = cut.settled()
        message = block.message(index)
        if not self._is_refused_again(message, refused):
            self._failures = max(1, self._failures)
            self._back_off()
            return
        now_ms = self._state.clock_ms()
        settlement = self._state.policy.instead(message, refused, failure.text, now_ms)
        self._resettle(message, refused, settlement, failure.text)

    def _resettle(
        self, message: ReceivedMessage, refused: Settlement, settlement: Settlement, why: str
    ) -> None:
        """Gives a record another outcome, as Kafka does not take the one that it has."""
        _LOG.error("%r: %s", message, why)
        with self._state.changed:
            if self._state.order is not None:
                written, _ = self._state.order.settled(message, settlement)
                known = {record.key for record in written}
                others = [one for one in refused.order if one.key not in known]
                settlement = settlement._replace(order=(*others, *written))
            self._book.resettle(message, settlement)

    def _is_refused_again(self, message: ReceivedMessage, refused: Settlement) -> bool:
        """Whether this outcome was refused before, and its topics take what they took then."""
        sizes = self._sizes_for([message.at])
        if sizes is None:
            return False
        before, self._refused = self._refused, (refused, sizes)
        return before is not None and before[0] is refused and before[1] == sizes

    def _widen(self) -> None:
        if self._cut_most is not None:
            self._cut_most *= 2
            if self._cut_most >= CUT_RECORDS:
                self._cut_most = None

    def recover(self) -> None:
        """Ends what the old producer had begun, and finds out whether that was committed.

        Later, if Kafka says nothing about the topics of that for want of a right: nothing is handed
        out until then, but a member of a group must go on fetching.
        """
        state = self._state
        if self._is_hidden(self._doubtful):
            self._recover_at_s = time.monotonic() + LONGEST_BACKOFF_S
            return
        if not self.renew() or self._doubtful is None:
            return
        cut = self._doubtful
        found = state.insist("no committed offsets", lambda: self._committed_now(cut))
        if found is None:  # the end was asked for, or a right is missing
            return
        settled = CommittedOutcomes()
        with state.changed:
            self._doubtful = None
            state.must_recover = False
            # One of them is enough: those of a topic that was deleted meanwhile are gone.
            if any(one is not None and one.transaction == cut.name for one in found.values()):
                settled = state.events.to_report(cut)
                self._committed(cut)
            state.notify()
        state.events.outcomes(settled)

    def _is_hidden(self, cut: Cut | None) -> bool:
        """Whether no topic in which this was to be committed may be described."""
        return cut is not None and all(at.topic in self._state.unseen for at in cut.offsets)

    def _committed_now(self, cut: Cut) -> Mapping[Partition, Passed | None] | None:
        """Returns what is committed where a cut was to be, as far as that may be asked."""
        self._rights.look_at_news()
        if self._is_hidden(cut):
            return None
        seen = [at for at in cut.offsets if at.topic not in self._state.unseen]
        return self._state.broker.committed(seen)

    def renew(self) -> bool:
        """Makes a new producer, which ends the old one's work; False: the end was asked for.

        What became of that work is still to be found out, by `recover`.
        """
        state = self._state

        def renew() -> bool:
            self._rights.look_at_news()
            state.broker.renew_producer(state.unseen)
            return True

        is_renewed = state.insist("no transactional producer", renew) is not None
        state.must_recover = not is_renewed or self._doubtful is not None
        self._recover_at_s = 0.0
        return is_renewed

    def forget_doubt(self, partitions: Iterable[Partition]) -> None:
        """Asks no longer what became of a transaction in partitions that the book has forgotten.

        The offsets of a partition that is no longer ours may be committed by others, and no longer
        show our outcome. The caller has the lock.
        """
        partitions = list(partitions)
        self._answered(partitions)
        cut = self._doubtful
        if cut is None:
            return
        cut.leave_out_others(cut.offsets.keys() - set(partitions))
        if not cut.offsets:
            self._doubtful = None

    def settle_up(self, deadline_s: float) -> None:
        """Commits what is settled, and what failed again: whoever reads on would handle it again.

        It is tried once at least, and again until this time.
        """
        state = self._state
        state.give_up_s = deadline_s
        while True:
            self._rights.look_at_news()
            if state.must_recover:
                self.recover()
            if not state.must_recover:
                self.commit()
            with state.changed:
                is_over = self.is_outdated or time.monotonic() >= deadline_s
                if is_over or not self._book.can_cut:
                    break
            time.sleep(FIRST_BACKOFF_S)
        state.give_up_s = None


def _topics_of(settlement: Settlement) -> frozenset[str]:
    """Returns the topics that a handler has written to."""
    written = () if settlement.writes is None else settlement.writes.records
    return frozenset(record.topic for record in written)
