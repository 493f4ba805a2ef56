"""Hands records out to handlers, and takes their outcomes: on the callers' threads."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from delaywheel.consumer.batch import Batch
from delaywheel.consumer.block import RecordBlock, RecordRun, runs_of
from delaywheel.consumer.engine.state import EngineState
from delaywheel.consumer.message import (
    DONE,
    HandlerTimeoutError,
    Outcome,
    ReceivedMessage,
    SettledError,
    Settlement,
    State,
    printable,
)
from delaywheel.consumer.records import Partition, RecordHeaders
from delaywheel.consumer.rules.breaker import Circuit
from delaywheel.consumer.rules.deserializers import Deserializer, Field
from delaywheel.consumer.rules.later import Later
from delaywheel.consumer.rules.policy import DeadLetterReason, Policy
from delaywheel.consumer.watching.figures import Figures, HandlerTimes
from delaywheel.consumer.watching.health import ConsumerTrouble
from delaywheel.levels import Duration
from delaywheel.message import ClockNs, Message, time_text

_LOG = logging.getLogger("delaywheel.consumer")

_LOOK_S = 0.1
_SLOW_LOOK_S = 0.5


class Dispatcher:
    """Where a consumer's messages come from, and are settled: by the policy.

    What takes messages raises ConsumerError once the consumer cannot continue. A handler may take
    longer than `handler_timeout`:

    | the handler | its record | then |
    |---|---|---|
    | is a task of `run` on a loop | is failed with `HandlerTimeoutError` | the task is cancelled |
    | is another, on a thread | is taken back: it has failed with that error, `is_ours` is |   |
    |   | False, `on_lost` is called | trouble HANDLER_HANGS until it ends; its outcome is dropped |
    | suppresses its cancellation | is taken back a second later | the same |
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._book = state.book
        self._order = state.order
        self._changed = state.changed
        self._now_s = state.clock_s
        self._handler_times = HandlerTimes()
        breaker = state.settings.breaker
        self._circuit = None if breaker is None else Circuit(breaker)
        self._later = Later()
        self._next_look_s = 0.0
        self._running_on: list[ReceivedMessage] = []
        self.wants_commit = False
        """Whether somebody waits for a commit."""
        self.cancel_s = 0.0
        """How much longer than `handler_timeout` is waited, as handlers are cancelled by then."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing will ever be handed out again."""
        return self._state.is_stopping or self._state.has_ended

    @property
    def deserializers(self) -> Mapping[Field, Deserializer]:
        """What makes objects of keys and values."""
        return self._state.settings.deserializers

    @property
    def _policy(self) -> Policy:
        return self._state.policy

    @property
    def clock_ns(self) -> ClockNs:
        """The wall clock."""
        return self._state.clock_ns

    @property
    def oldest_in_hand_s(self) -> float:
        """How long the record has been in hand that holds up its partition longest; 0: none."""
        now_s = self._now_s()
        with self._changed:
            in_hand = [one for one in self._book.firsts() if one.state is State.IN_HAND]
            return max((0.0, *(now_s - one.handed_s for one in in_hand)))

    def figures(self, lags: dict[Partition, int]) -> Figures:
        """Returns all figures, of one moment; `lags` are the offsets behind what was read."""
        oldest_s = self.oldest_in_hand_s
        with self._changed:
            book = self._book
            ours = set(book.partitions)
            return Figures(
                counts=replace(book.counts),
                dead_reasons=dict(book.dead_reasons),
                held=book.held,
                held_bytes=book.held_bytes,
                in_hand=book.in_hand(book.partitions),
                oldest_in_hand_s=oldest_s,
                suspects=self._state.suspects,
                are_counts_forbidden=self._state.are_counts_forbidden,
                lags={at: unread + book.unended(at) for at, unread in lags.items() if at in ours},
                handled=tuple(self._handler_times.counts),
                handled_s=self._handler_times.sum_s,
            )

    def hand_out(self, most: int) -> Batch:
        """Returns the longest-waiting records, up to this number; empty if none is available."""
        batch = Batch()
        with self._changed:
            self._state.raise_error()
            now_ms, now_s = self._state.clock_ms(), self._now_s()
            left = self._allowed(most, now_s)
            if self._order is not None:  # each decides what the next ones wait for
                while left and (message := self._next(now_ms, now_s)) is not None:
                    left -= 1
                    batch.take(runs_of([message]))
            while left and (run := self._book.hand_out(left, now_s)) is not None:
                runs: Sequence[RecordRun] = (run,)
                if not self._is_plain(run.block):
                    runs = runs_of(
                        [one for one in run.messages() if self._is_for_a_handler(one, now_ms)]
                    )
                left -= sum(one.size for one in runs)
                batch.take(runs)
            if self._circuit is not None and batch:
                self._circuit.taken(batch[0], now_s)
        return batch

    def hand_out_one(self) -> ReceivedMessage | None:
        """Returns the longest-waiting record; None if none is available now."""
        with self._changed:
            self._state.raise_error()
            now_s = self._now_s()
            message = self._next(self._state.clock_ms(), now_s) if self._allowed(1, now_s) else None
            if self._circuit is not None and message is not None:
                self._circuit.taken(message, now_s)
            return message

    def take_turns(self, most: int) -> list[ReceivedMessage]:
        """Returns up to so many records whose turn it is; `end_turn` is to follow for each."""
        taken: list[ReceivedMessage] = []
        with self._changed:
            self._state.raise_error()
            now_ms, now_s = self._state.clock_ms(), self._now_s()
            most = self._allowed(most, now_s)
            while len(taken) < most and (message := self._next(now_ms, now_s)) is not None:
                if self._book.turns.begin(message):
                    taken.append(message)
                else:
                    self._book.hold_back(message)
            if self._circuit is not None and taken:
                self._circuit.taken(taken[0], now_s)
        return taken

    def end_turn(self, message: ReceivedMessage) -> None:
        """Lets the next record of this one's key have its turn: its handler has ended."""
        with self._changed:
            if (again := self._later.turn_of(message)) is not None:
                self._book.turns.keep(message, again)
                return
            following = self._book.turns.end(message)
            if following is not None:  # nobody is woken: whoever ends a turn takes the next one
                self._book.put_back([following])

    def end_parking(self) -> None:
        """Puts back what is parked, for whoever takes records without turns."""
        with self._changed:
            self._book.end_parking(self._book.partitions)
            self._state.notify()

    def _allowed(self, most: int, now_s: float) -> int:
        """Returns how many of so many records may be handed out now."""
        if not self._state.may_hand_out:
            return 0
        return most if self._circuit is None else self._circuit.most(most, now_s)

    @property
    def has_some(self) -> bool:
        """Whether a record waits that may be handed out now."""
        return self._book.has_waiting and self._allowed(1, self._now_s()) > 0

    def say_if_open(self) -> None:
        """Notes whether the circuit is open; may be called all the time."""
        if self._circuit is not None:
            with self._changed:
                text = self._circuit.text
            if text != self._state.health.troubles.get(ConsumerTrouble.CIRCUIT_OPEN):
                self._state.note_trouble(ConsumerTrouble.CIRCUIT_OPEN, text)

    def _next(self, now_ms: int, now_s: float) -> ReceivedMessage | None:
        while (message := self._book.hand_out_one(now_s)) is not None:
            if self._is_plain(message.block) or self._is_for_a_handler(message, now_ms):
                return message
        return None

    def _is_plain(self, block: RecordBlock) -> bool:
        """Whether there is nothing to look at before records are handed out."""
        settings = self._state.settings
        is_for_all = self._order is None and settings.route is None and settings.meant_for is None
        return is_for_all and not block.has_headers

    def condemn(self, message: ReceivedMessage) -> None:
        """Settles a record as dead that ends each process that handles it."""
        policy, times = self._policy, self._state.settings.max_deliveries
        why = (
            f"the process has ended, or lost its session, {times} times after this record alone"
            " was handed out"
        )
        settlement = policy.dead(message, DeadLetterReason.POISON, why)
        with self._changed:
            self._book.take_kept(message.at)
            if self._note(message, settlement):
                _log_outcome(message, settlement)

    def take_back_late(self) -> None:
        """Takes records back from handlers that take too long; may be called all the time."""
        timeout_ms, now_s = self._state.settings.handler_timeout_ms, self._now_s()
        if timeout_ms is None or now_s < self._next_look_s:
            return
        timeout_s = timeout_ms / 1000 + self.cancel_s
        self._next_look_s = now_s + min(timeout_s / 4, _SLOW_LOOK_S)
        error = _timeout_error(timeout_ms)
        with self._changed:
            late = self._book.in_hand_since(now_s - timeout_s)
            for message in late:
                message.is_taken_back = True
                self._note(message, self._timed_out(message, error))
            self._running_on = [one for one in (*self._running_on, *late) if not one.has_returned]
            running_on = self._running_on
        for message in late:
            _LOG.error("%r is taken back from its handler: %s", message, error)
            message.tell_lost()
        text = None
        if running_on:
            text = f"the handler of {running_on[0]!r} goes on, though its record is taken back"
            text += f", and {len(running_on) - 1} more" if running_on[1:] else ""
        self._state.note_trouble(ConsumerTrouble.HANDLER_HANGS, text)

    def _timed_out(self, message: ReceivedMessage, error: HandlerTimeoutError) -> Settlement:
        """Returns the settlement of a record whose handler took too long."""
        policy = self._policy
        settlement = policy.failed(message, error, self._state.clock_ms())
        return settlement or policy.dead(message, DeadLetterReason.HANDLER_TIMEOUT, error)

    def time_out(self, message: ReceivedMessage, cancelled: TimeoutError) -> None:
        """Settles a record whose handler took too long and was cancelled."""
        timeout_ms = self._state.settings.handler_timeout_ms
        if not message.is_settled and timeout_ms is not None:
            error = _timeout_error(timeout_ms)
            error.__cause__ = cancelled
            self._settle(message, self._timed_out(message, error))

    def wait(self, timeout_s: float) -> None:
        """Returns when records may be available, or after this time."""
        with self._changed:
            if self.has_some or self.has_ended:
                return
            self._changed.wait(timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Waits until settled records are committed, as far as can be; returns whether all are."""
        self._state.check_may_wait("flush")
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._book.has_ended_records and not self._state.has_ended:
                self.wants_commit = True
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, _LOOK_S))
            self._state.raise_error()
        return True

    def done(self, message: ReceivedMessage) -> bool:
        """Settles a record as handled; False, here and below: it is not ours."""
        return self._settle(message, DONE)

    def retry(
        self,
        message: ReceivedMessage,
        after: Duration | None,
        error: BaseException | str | None,
    ) -> bool:
        """Settles a record to come back, or as dead if it came back often enough."""
        now_ms = self._state.clock_ms()
        return self._settle(message, self._policy.retry(message, after, error, now_ms))

    def dead(
        self, message: ReceivedMessage, reason: str, error: BaseException | str | None
    ) -> bool:
        """Settles a record as a dead letter."""
        return self._settle(message, self._policy.dead(message, reason, error))

    def forward(self, letter: ReceivedMessage, headers: RecordHeaders) -> bool:
        """Settles a letter about a half by sending its message to ingress, with these headers."""
        return self._settle(letter, self._policy.forward(letter, headers))

    def roll_back(self, letter: ReceivedMessage) -> bool:
        """Settles a letter about a half whose message is dropped."""
        return self._settle(letter, self._policy.rolled_back(letter))

    def fail(self, message: ReceivedMessage, error: Exception) -> bool:
        """Settles a record by its handler's exception; False if the exception must be raised."""
        settlement = self._policy.failed(message, error, self._state.clock_ms())
        if settlement is not None:
            self._settle(message, settlement)
        return settlement is not None

    def is_outcome(self, error: Exception) -> bool:
        """Whether a handler's exception means an outcome, by the options."""
        return self._policy.meaning(error) is not None

    def produce(self, message: ReceivedMessage, record: Message, *, is_delayed: bool) -> bool:
        """Keeps what a handler writes until its own record is done."""
        written = self._policy.written(message, record, is_delayed=is_delayed)
        with self._changed:
            return not message.is_taken_back and self._book.write(message, written)

    def leave(self, message: ReceivedMessage) -> None:
        """Settles a record as handled whose block was left, unless it is settled."""
        with self._changed:
            if message.is_taken_back:
                message.has_returned = True
                return
            if message.state is not State.IN_HAND:
                return
            if self._order is None and self._circuit is None:
                self._book.settle_one_done(message)
            else:
                self._note(message, DONE)
            self._handled(message, self._now_s())
            if self._state.is_draining:
                self._changed.notify_all()

    def all_done(self, runs: Sequence[RecordRun]) -> None:
        """Settles those as handled that are not settled."""
        now_s = self._now_s()
        with self._changed:
            if self._order is None and self._circuit is None and not self._running_on:
                for run in runs:
                    # Those of a run were handed out together.
                    took_s = now_s - run.block.handed_s[run.begin]
                    self._handler_times.add(took_s, self._book.settle_done(run))
                    run.block.took_s[run.begin : run.end] = array("d", (took_s,)) * run.size
            else:
                self._done_one_by_one(runs, now_s)
            if self._state.is_draining:
                self._changed.notify_all()

    def _done_one_by_one(self, runs: Sequence[RecordRun], now_s: float) -> None:
        for run in runs:
            for message in run.messages():
                if message.is_taken_back:
                    message.has_returned = True
                elif not message.is_settled:
                    self._handled(message, now_s)
                    self._note(message, DONE)

    def _handled(self, message: ReceivedMessage, now_s: float) -> None:
        """Notes how long a handler had a message."""
        took_s = message.block.took_s[message.index] = now_s - message.handed_s
        self._handler_times.add(took_s)

    def hand_back(self, messages: Sequence[ReceivedMessage]) -> None:
        """Takes back records that nobody has begun to handle: they are handed out again, first."""
        with self._changed:
            waiting = [one for one in messages if one.state is State.IN_HAND]
            for message in waiting:
                message.has_returned = False
                self._book.hold_back(message)
            self._book.put_back(waiting)
            self._state.notify()

    def put_back_due(self, now_s: float) -> None:
        """Puts back what was to come later, and may be called all the time."""
        if not self._later.is_due(now_s):
            return
        with self._changed:
            self._book.put_back(self._later.take_due(now_s))
            self._state.notify()

    def nack(self, message: ReceivedMessage, after_ms: int) -> bool:
        """Takes back a record that its handler gives up: it is handed out again then, first."""
        with self._changed:
            if not message.is_ours:
                message.has_returned = True
                return False
            if message.is_settled:
                raise SettledError.of(message)
            again = self._book.take_back(message)
            if after_ms:
                self._later.add(message, again, self._now_s() + after_ms / 1000)
            else:
                self._book.put_back([again])
            again.on_lost(None)
            if self._order is not None:
                self._order.replaced(message, again)
            self._state.notify()
        return True

    def _settle(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        with self._changed:
            if message.is_taken_back:
                message.has_returned = True
                return False
            is_ours = self._note(message, settlement)
            self._handled(message, self._now_s())
            if self._state.is_draining:
                self._changed.notify_all()
        if is_ours:
            _log_outcome(message, settlement)
        return is_ours

    def _is_for_a_handler(self, message: ReceivedMessage, now_ms: int) -> bool:
        """Whether a record is to be handed out now; if not, it is settled here or held back."""
        behind = None if self._order is None else self._order.admit(message, now_ms)
        if behind is not None:
            if behind.until_ms is None:
                self._book.hold_back(message)
            else:
                self._note(message, self._policy.park(message, behind.until_ms))
            return False
        settlement = self._policy.at_hand_out(message, now_ms)
        if settlement is not None:
            self._note(message, settlement)
            _log_outcome(message, settlement)
        return settlement is None

    def _note(self, message: ReceivedMessage, settlement: Settlement) -> bool:
        """Records an outcome, and decides whose turn it is then."""
        if message.is_settled:
            raise SettledError.of(message)
        if self._circuit is not None:
            self._circuit.ended(message, settlement, self._now_s())
        if self._order is not None and message.state is not State.FORGOTTEN:
            written, freed = self._order.settled(message, settlement)
            if written:
                settlement = settlement._replace(order=written)
            if freed:
                self._book.put_back(freed)
                self._state.notify()
        return self._book.settle(message, settlement)


def _timeout_error(timeout_ms: int) -> HandlerTimeoutError:
    return HandlerTimeoutError(f"not handled within {timeout_ms / 1000:,.3f} s")


def _log_outcome(message: ReceivedMessage, settlement: Settlement) -> None:
    """Says what failed: one line for each retry and each dead letter."""
    outcome, record = settlement.outcome, settlement.record
    why = printable(settlement.why)  # errors hold what senders wrote
    if outcome is Outcome.RETRIED:
        due = time_text(settlement.due_ms)
        _LOG.warning("%r is retried at %s: %s", message, due, why)
    elif outcome is Outcome.DEAD and record is not None:
        _LOG.error("%r is a dead letter in %s: %s", message, record.topic, why)
    elif outcome is Outcome.EXPIRED:
        _LOG.warning("%r has expired: %s", message, why)
