"""The engine's thread, and what the group tells it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from datetime import datetime

from delaywheel.consumer.block import RecordBlock
from delaywheel.consumer.book import Counts
from delaywheel.consumer.engine.commits import Commits
from delaywheel.consumer.engine.deliveries import Deliveries, DeliveryMark
from delaywheel.consumer.engine.dispatcher import Dispatcher
from delaywheel.consumer.engine.flow import Flow
from delaywheel.consumer.engine.handler_threads import HandlerThreads
from delaywheel.consumer.engine.lookout import Lookout
from delaywheel.consumer.engine.pattern_watch import PatternWatch
from delaywheel.consumer.engine.positions import FoundPositions, Positions
from delaywheel.consumer.engine.rights_watch import RightsWatch
from delaywheel.consumer.engine.state import EngineState, tell_lost
from delaywheel.consumer.order import Away, whole_lanes
from delaywheel.consumer.port import KafkaUnavailable
from delaywheel.consumer.records import FetchedRecords, Partition
from delaywheel.consumer.rules.policy import Policy
from delaywheel.consumer.watching.figures import Figures
from delaywheel.consumer.watching.health import ConsumerHealth, ConsumerTrouble
from delaywheel.message import unix_ms

_LOG = logging.getLogger("delaywheel.consumer")

_FETCH_RECORDS = 1_000
_FETCH_S = 0.1
_FETCH_BESIDE_SUSPECTS_S = 0.005
"""Each of them waits for the commit of the one before."""
_LOOK_S = 5.0
"""How long a topic that was recreated may be read at the old offsets, and how soon one is seen that
a pattern matches."""


class Engine:
    """One consumer's thread, and the desk where its messages come from and are settled."""

    def __init__(self, state: EngineState) -> None:
        """Does nothing before `start`."""
        self._state = state
        self._book = state.book
        self._broker = state.broker
        self._changed = state.changed
        self.desk = Dispatcher(state)
        self._flow = Flow(state)
        self._lookout = Lookout(state)
        self._patterns = PatternWatch(state)
        self._rights = RightsWatch(state)
        self._deliveries = Deliveries(state.book, state.settings.max_deliveries)
        self._positions = Positions(state, self._lookout, self._deliveries)
        self._commits = Commits(state, self._positions, self.desk, self._deliveries, self._rights)
        self._called_back: set[Partition] = set()
        self._seeks: list[tuple[Partition, int | datetime]] = []
        self._look_at_s = 0.0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="delaywheel-consumer", daemon=True)

    # What callers ask for, on any thread.

    @property
    def health(self) -> ConsumerHealth:
        """What keeps the consumer from its work."""
        return self._state.health

    @property
    def counts(self) -> Counts:
        """The numbers of records by outcome."""
        return self._book.counts

    @property
    def partitions(self) -> list[Partition]:
        """The partitions that are assigned now."""
        with self._changed:
            return self._book.partitions

    @property
    def has_ended(self) -> bool:
        """Whether nothing will ever be handed out again."""
        return self.desk.has_ended

    def figures(self) -> Figures:
        """Returns all figures, of one moment."""
        return self.desk.figures(self._lookout.lags)

    def start(self) -> None:
        """Starts the thread; raises RuntimeError if it was started before."""
        if self._thread.ident is not None:
            raise RuntimeError("a consumer has one with block: make another one for the next")
        self._thread.start()

    def check_runs(self) -> None:
        """Raises RuntimeError where whoever waits for the thread would wait for ever.

        It was never started, or is that of the process that forked this one, or is here. Nothing is
        raised once everything has ended.
        """
        self._state.check_may_wait("messages cannot be waited for")
        if not self._thread.is_alive() and not self.has_ended:
            raise RuntimeError(
                "the consumer does not run: take its messages within its with block, in the process"
                " that has entered it"
            )

    def listen(self, listener: Callable[[], None]) -> None:
        """Sets a callback for the thread: records may be available, or none ever will be."""
        with self._changed:
            self._state.listeners.append(listener)

    def pause(self, partitions: Sequence[Partition], *, on: bool) -> None:
        """Pauses or resumes handing out and fetching: of these partitions, or of all.

        Raises ValueError for one to be paused that is not assigned.
        """
        with self._changed:
            if partitions and on:
                self._check_assigned(partitions)
                self._book.pause(partitions)
            elif partitions:
                self._book.resume(partitions)
            else:
                self._state.is_paused_by_caller = on
                if not on:
                    self._book.resume(list(self._book.paused))
            self._state.notify()

    def seek(self, at: Partition, to: int | datetime) -> None:
        """Reads a partition from another offset or time on, once the engine's thread has done so.

        On that thread itself it returns at once; nothing is fetched or handed out before it is so.
        Raises as `RetryConsumer.seek`, and RuntimeError if it does not run in this process.
        """
        if self._state.order is not None:
            raise ValueError("seek: not with ordered, which knows what is away of each partition")
        if isinstance(to, datetime):
            if to.utcoffset() is None:
                raise ValueError(f"{to!r} has no time zone; say which, such as datetime.now(UTC)")
        elif to < 0:
            raise ValueError(f"offset {to}: at least 0")
        seek = (at, to)
        with self._changed:
            self._check_assigned([at])
            self._seeks.append(seek)
            if self._state.is_own_thread:
                return
            while any(one is seek for one in self._seeks) and not self._state.has_ended:
                self.check_runs()
                self._changed.wait(_FETCH_S)
            self._state.raise_error()
            self._check_assigned([at])

    def _check_assigned(self, partitions: Sequence[Partition]) -> None:
        strange = set(partitions) - set(self._book.partitions)
        if strange:
            raise ValueError(f"{', '.join(map(str, sorted(strange)))}: not assigned here")

    def run_handlers(self, handlers: HandlerThreads, concurrency: int) -> None:  # noqa: ARG002
        """Has so many threads handle what is handed out, until the end."""
        handlers.run()

    def stop(self) -> None:
        """Requests the end. Takes no lock: signal handlers may call it."""
        self._state.is_stopping = True

    def join(self) -> None:
        """Waits for the thread to end; raises the ConsumerError that ended it."""
        self.join_quietly()
        self._state.raise_error()

    def join_quietly(self) -> None:
        """Waits for the thread to end, whether it failed or not."""
        if self._thread.ident is not None:
            self._thread.join()

    # The thread.

    def _run(self) -> None:
        self._state.thread_id = threading.get_ident()
        with self._noting_errors():
            self._begin()
            while not self._state.is_stopping:
                self._run_once()
            self._end()
        self._close()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
            self._state.error = error
            self._state.health.note(ConsumerTrouble.STOPPED, str(error) or repr(error))

    def _close(self) -> None:
        with self._changed:
            lost = self._book.forget(self._book.partitions)
            self._state.has_ended = True
            self._state.notify()
        tell_lost(lost)
        self._is_closing = True
        try:
            self._broker.close()
        except Exception:  # noqa: BLE001 - whatever it was, this is the end
            _LOG.exception("closing the Kafka clients failed")
        self._state.events.end()

    def _begin(self) -> None:
        state = self._state
        start = state.insist("Kafka does not answer", self._broker.start)
        if start is None:
            return
        state.policy = Policy(state.settings, start)
        limits = state.insist("the limits of ingress", lambda: (self._broker.limits(),))
        state.policy.learn_limits(None if limits is None else limits[0])
        state.insist("which topics there are", self._patterns.begin)
        if not self._commits.renew():
            return
        self._broker.subscribe(
            state.settings.topics.read_topics,
            on_assign=self._assigned,
            on_revoke=self._revoked,
            on_lost=self._lost,
        )

    def _run_once(self, *, fetches: bool = True) -> None:
        """Fetches once, and commits if it is time."""
        if self._seeks:
            self._seek()
        self._flow.regulate(fetches=fetches)
        now_s = time.monotonic()
        wait_s = _FETCH_S
        if self._book.can_cut:
            wait_s = max(0.0, min(_FETCH_S, self._commits.next_s - now_s))
        if self._state.suspects:
            wait_s = min(wait_s, _FETCH_BESIDE_SUSPECTS_S)
        self._called_back.clear()
        if self._flow.waits_for_room(now_s):
            fetched: Sequence[FetchedRecords] = ()
        else:
            # While it is full nothing is fetched; but this call also serves the group.
            most = max(1, min(_FETCH_RECORDS, self._book.room))
            fetched = self._broker.fetch(most, wait_s)
        ends = self._broker.ends_met()
        if self._called_back:
            fetched = self._without_moved(fetched)
            ends = {at: end for at, end in ends.items() if at not in self._called_back}
        self._take(fetched, ends)
        if (refusal := self._broker.refusal()) is not None:
            self._state.refused(refusal)
        self.desk.take_back_late()
        self.desk.put_back_due(self._state.clock_s())
        self.desk.say_if_open()
        if now_s >= self._look_at_s or self._rights.has_news:
            self._look()
        self._commits.commit_if_due()
        if self._commits.is_outdated:
            self._look()

    def _without_moved(self, fetched: Sequence[FetchedRecords]) -> Sequence[FetchedRecords]:
        """Returns what is certainly of the present assignment; the rest is read again.

        It may have been fetched before the call or after it.
        """
        if not fetched:
            return fetched
        moved = self._called_back
        if not self._broker.is_incremental:
            self._flow.go_back(moved)
            return ()
        kept = [one for one in fetched if one.at not in moved]
        if len(kept) < len(fetched):
            self._flow.go_back(moved)
        return kept

    def _seek(self) -> None:
        """Reads from other offsets on, and commits them: what is settled first."""
        with self._changed:
            wanted = list(self._seeks)
            ours = [one for one in wanted if one[0] in self._book.partitions]
            settled = self._book.settled_ends(at for at, _ in ours)
        try:
            seeks = [(at, self._offset_of(at, to)) for at, to in ours]
        except KafkaUnavailable as away:
            self._state.note_away("no answer about the offsets of a time", away)
            return  # it is asked again
        self._commits.settle_up(time.monotonic())
        with self._changed:
            # Once it is known what became of the last transaction, and all of this is committed.
            if self._state.must_recover or self._book.cut(before=settled) is not None:
                return
            if any(self._book.is_withheld(at) for at, _ in seeks):
                return
            lost = self._book.assign(dict(seeks))
            self._deliveries.forget(dict(seeks))
        tell_lost(lost)
        if seeks:
            self._flow.go_back(dict(seeks).keys())
            if not self._commits.mark({at: DeliveryMark(offset) for at, offset in seeks}):
                return  # it would be read from elsewhere after a restart
            _LOG.info("read on as asked for: %s", seeks)
        with self._changed:
            del self._seeks[: len(wanted)]
            self._state.notify()

    def _offset_of(self, at: Partition, to: int | datetime) -> int:
        if not isinstance(to, datetime):
            return to
        since_ms = max(0, unix_ms(to))  # to Kafka, -1 is the end of a partition
        offset = self._state.ask(lambda: self._broker.first_since(at, since_ms))
        self._state.note_away("", None)
        return offset

    def _take(self, fetched: Sequence[FetchedRecords], ends: Mapping[Partition, int]) -> None:
        if not fetched and not ends:
            return
        went_back = self._book.going_back(fetched)
        if went_back:
            self._read_anew(went_back)
            return
        if fetched:
            self._lookout.look_before_letters()
        retries = self._state.retry_topics
        blocks = [RecordBlock(self.desk, one, is_retry=one.at.topic in retries) for one in fetched]
        with self._changed:
            self._book.take(blocks)
            self._book.read_to(ends)
            self._state.notify()

    def _look(self) -> None:
        """Looks for troubles, and begins again in topics that were recreated.

        The client would go on in them at the old offsets.
        """
        wait_s = _LOOK_S
        if self._state.settings.topics.has_patterns:
            # All members see a new topic at the same time, so that the group settles once.
            wait_s -= self._state.clock_ms() / 1000 % _LOOK_S
        self._look_at_s = time.monotonic() + wait_s
        self._lookout.look_at_hand()
        self._rights.look()
        if self._rights.joins_again:
            self._begin_with_left_out()
            self._subscribe_again()
            return
        if self._patterns.look():
            self._subscribe_again()
        if not self._state.ours:
            return
        self._lookout.look_behind(self._flow.paused)
        topics = self._lookout.look_at_topics()
        if topics is not None and self._positions.are_of_other_topics(topics):
            self._read_anew()
        elif topics is not None:
            self._begin_with_leaders()
        self._commits.rest()

    def _subscribe_again(self) -> None:
        """Has the group assign the topics that are read now.

        What is held of a deleted topic is forgotten at once: no transaction with an offset of it
        commits, and others' outcomes would wait for that.
        """
        self._rights.joins_again = False
        read_topics = self._state.settings.topics.read_topics
        gone = [one for one in self._state.ours if one.topic not in read_topics]
        if gone:
            self._lost(gone)
        self._broker.resubscribe(read_topics)

    def _end(self) -> None:
        """Ends gracefully: stays in the group until no handler has a record."""
        deadline = time.monotonic() + self._state.settings.drain_ms / 1000
        with self._changed:
            self._state.notify()
        while self._book.is_awaited(self._book.partitions) and time.monotonic() < deadline:
            self._run_once(fetches=False)
        if self._book.is_awaited(self._book.partitions):
            _LOG.warning("messages were not settled within drain: they are delivered again")
        self._commits.settle_up(deadline)
        self._commits.give_back(self._book.partitions)

    # What the group tells, from within `Broker.fetch`.

    def _assigned(self, partitions: Sequence[Partition]) -> None:
        state = self._state
        positions: dict[Partition, int | None] = {}
        if self._broker.is_incremental:
            state.ours = [*(one for one in state.ours if one not in partitions), *partitions]
            # The client cannot leave one out. What comes of those that the book does not have is
            # dropped, and read again once they are begun with.
            positions = dict.fromkeys(partitions)
        else:
            state.ours = list(partitions)
        self._flow.read_from(positions | self._begin_with(partitions))

    def _begin_with_left_out(self) -> None:
        """Takes in what could not even be described when it was assigned.

        Where all partitions are assigned together, those that were left out come with the others.
        """
        left_out = set(self._state.ours) - set(self._book.partitions)
        if left_out and self._broker.is_incremental:
            self._begin_with(sorted(left_out))
            self._flow.go_back(left_out)

    def _begin_with_leaders(self) -> None:
        """Takes in what was left out for want of a leader, and has one now."""
        try:
            ready = self._state.ask(self._positions.with_leaders)
        except KafkaUnavailable as away:
            self._state.note_away("no answer about leaders", away)
            return
        if ready:
            self._begin_with(ready)
            self._flow.go_back(set(ready))

    def _read_anew(self, went_back: AbstractSet[Partition] = frozenset()) -> None:
        """Begins again with all partitions: some are not what they were."""
        self._begin_with(self._state.ours, went_back)
        self._flow.go_back(set(self._state.ours))

    def _begin_with(
        self, partitions: Sequence[Partition], went_back: AbstractSet[Partition] = frozenset()
    ) -> dict[Partition, int | None]:
        """Takes partitions into the book; returns where each is to be read on."""
        state, order = self._state, self._state.order
        self._called_back |= set(partitions)
        if state.must_recover:
            self._commits.renew()
        state.membership = self._broker.membership()
        if order is not None:
            partitions = self._whole_lanes(partitions)
        asked = state.insist("where to read on", lambda: self._find(partitions, went_back))
        state.note_trouble(ConsumerTrouble.ORDER_UNREAD, None)
        if asked is None:  # the end was asked for
            asked = FoundPositions(dict.fromkeys(partitions), {}, {}), {}
        found, away = asked
        with self._changed:
            lost = self._book.assign(found.positions)
            self._commits.forget_doubt(found.positions)
            self._deliveries.assigned(*found)
            for lane, known in away.items():
                assert order is not None
                order.assign(lane, state.settings.topics.names_of(lane.topic).order, known)
            state.notify()
        self._state.health.note(ConsumerTrouble.COMMIT_FAILED, None)
        tell_lost(lost)
        state.events.assigned(list(found.positions))
        _LOG.info("assigned: %s", list(map(str, found.positions)))
        return found.positions

    def _find(
        self, partitions: Sequence[Partition], went_back: AbstractSet[Partition]
    ) -> tuple[FoundPositions, Mapping[Partition, Sequence[Away]]]:
        """Returns where to read on, and what is away of each lane."""
        self._rights.look_at_news()
        found = self._positions.find(partitions, went_back)
        # Only now: every transaction of an earlier owner has ended, and is visible.
        lanes: Sequence[Partition] = ()
        if self._state.order is not None:
            lanes = [one for one in found.positions if one.topic not in self._state.retry_topics]
        return found, self._broker.away(lanes, self._lookout.order_is_unread)

    def _whole_lanes(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Leaves out source and retry partitions that came without each other."""
        whole = whole_lanes(self._state.settings, partitions)
        lone = sorted(set(partitions) - set(whole))
        text = f"not read without its counterpart: {', '.join(map(str, lone))}"
        self._state.note_trouble(ConsumerTrouble.PARTITION_UNREAD, text if lone else None)
        return whole

    def _revoked(self, partitions: Sequence[Partition]) -> None:
        if self._is_closing:  # no producer is left; an end in good order has given them back
            self._lost(partitions)
            return
        deadline = time.monotonic() + self._state.settings.drain_ms / 1000
        self._drain(partitions, deadline)
        self._commits.settle_up(deadline)
        self._commits.give_back(partitions)
        self._lost(partitions)
        with self._changed:
            self._state.is_draining = self._state.gives_up_all = False
            self._state.notify()

    def _lost(self, partitions: Sequence[Partition]) -> None:
        self._called_back |= set(partitions)
        state = self._state
        with self._changed:
            lost = self._book.forget(partitions)
            self._commits.forget_doubt(partitions)
            self._deliveries.forget(partitions)
            if state.order is not None:
                state.order.forget(partitions)
            self._changed.notify_all()
        self._flow.forget(partitions)
        tell_lost(lost)
        if ours := [one for one in partitions if one in state.ours]:
            state.events.revoked(ours)
        state.ours = [one for one in state.ours if one not in partitions]

    def _drain(self, partitions: Sequence[Partition], deadline_s: float) -> None:
        """Hands out nothing more of them, and waits until records in hand are settled."""
        with self._changed:
            self._state.is_draining = True
            self._state.gives_up_all = not self._broker.is_incremental
            self._book.pause(partitions)
            while self._book.is_awaited(partitions) and time.monotonic() < deadline_s:
                self._changed.wait(_FETCH_S)
