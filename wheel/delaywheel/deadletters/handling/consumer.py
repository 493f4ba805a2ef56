"""Handlers of dead letters, by reason: what one decides about a letter is done exactly once.

docs/CONSUMERS.md, "Handlers of dead letters", says what becomes of a letter. Decision and position
are one transaction (`settling.py`), of the same claim as those of `delaywheel dead replay` and
`drop` (`marks.py`), every 200 ms: a killed process repeats at most the handlers of so long. A
process claims when letters wait, and the one that has the claim keeps it. If another claims, that
one is at work: this one waits until letters have waited for `takeover_after`, and nothing was
written meanwhile. So several may run, and one of them works.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypeVar

from delaywheel.client.exchange.settings import check_trace
from delaywheel.deadletters.errors import DeadLettersError, DeadLettersReason
from delaywheel.deadletters.handling.figures import LetterFigures, LetterTally
from delaywheel.deadletters.letter import Letter
from delaywheel.deadletters.marks import LetterState, Marks
from delaywheel.deadletters.selection import EVERYTHING
from delaywheel.deadletters.settling import KEEP, Decision, Drop, Keep, Replay, Settling
from delaywheel.deadletters.topic import DeadLetterTopic, OffsetRanges
from delaywheel.deadletters.tracing import LettersToTell
from delaywheel.functions import check_ended, check_plain, is_coroutine_function
from delaywheel.levels import Duration, length_ms

if TYPE_CHECKING:  # a program that does not trace imports nothing of it
    from delaywheel.trace.reports import EventReports

_LOG = logging.getLogger("delaywheel.deadletters")

LetterHandler: TypeAlias = Callable[[Letter], Decision | None]

_Handler = TypeVar("_Handler")

_LOOK_S: Final = 1.0
_SLICE_S: Final = 0.1
_COMMIT_S: Final = 0.2


class DeadLetterConsumer:
    """Gives the letters of one topic, a consumer group's or delaywheel's own, to handlers.

    Args:
        handlers: For each reason what decides about its letters; None counts as `KEEP`.
        otherwise: What decides about all others; None: they are kept.
        retry: The delays after which a handler that raised is called again, for the same letter.
        takeover_after: How long letters wait for another process that has claimed them.

    Example:
        ::

            def late(letter: Letter) -> Decision:
                return REPLAY if stock.has(letter.key) else KEEP

            with DeadLetterConsumer("orders-dead-billing", {"bootstrap.servers": "…"},
                                    {"ATTEMPTS_EXHAUSTED": late}) as letters:
                letters.run()
    """

    def __init__(
        self,
        topic: str,
        client: Mapping[str, Any],
        handlers: Mapping[str, LetterHandler],
        *,
        otherwise: LetterHandler | None = None,
        retry: tuple[Duration, ...] = ("1s", "10s", "1m"),
        takeover_after: Duration = "10s",
        trace: EventReports | None = None,
    ) -> None:
        check_trace(trace)
        for handle in given_handlers(handlers, otherwise):
            if is_coroutine_function(handle):
                raise TypeError(f"{handle!r}: a coroutine function; use AsyncDeadLetterConsumer")
            check_plain("handler", handle)
        self._topic = DeadLetterTopic(topic, client, trace=trace)
        self._handlers = dict(handlers)
        self._otherwise = otherwise
        self._retry_s = [length_ms(delay) / 1000 for delay in retry]
        self._takeover_ms = length_ms(takeover_after)
        self._read_to: dict[int, int] = {}
        self._committed_s = 0.0
        self._is_stopping = False
        self._tally = LetterTally()
        self._to_tell = LettersToTell(topic, trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; a trace is written, for 2 s at most."""
        self._topic.close()

    @property
    def topic(self) -> str:
        """The topic of letters."""
        return self._topic.name

    @property
    def figures(self) -> LetterFigures:
        """This consumer in figures, all of one moment: for metrics."""
        return self._tally.figures()

    def stop(self) -> None:
        """Ends `run` after the letter in hand. Signal handlers may call it."""
        self._is_stopping = True

    def run(self) -> None:
        """Handles letters until `stop`; waits while Kafka is away, or another process is at work.

        Raises DeadLettersError if there is no such topic, or Kafka refuses.
        """
        wait_s = _LOOK_S
        while not self._is_stopping:
            try:
                if self._is_ours_to_handle():
                    self._handle_all()
                wait_s = _LOOK_S
                self._tally.trouble = None
            except DeadLettersError as error:
                if error.reason is DeadLettersReason.OVERTAKEN:
                    _LOG.info("%s: %s", self._topic.name, error)
                elif error.retry_helps:
                    _LOG.warning("%s: %s", self._topic.name, error)
                    self._tally.trouble = str(error)
                    wait_s = min(2 * wait_s, 30.0)
                else:
                    raise
            self._rest(wait_s)

    def _is_ours_to_handle(self) -> bool:
        """Whether letters wait, and nobody else seems to be at work on them."""
        bounds, _ = self._topic.bounds()
        if all(end <= self._read_to.get(number, 0) for number, (_, end) in bounds.items()):
            return False
        bounds, marks = self._topic.look()
        now_ms = time.time_ns() // 1_000_000
        first = next(
            (
                letter
                for letter in self._topic.read(EVERYTHING, self._left(bounds, marks))
                if marks.state_of(letter.place) is LetterState.WAITING
            ),
            None,
        )
        if first is None:
            self._read_to = _ends(bounds)
            return False
        idle_since_ms = max(marks.changed_ms, first.timestamp_ms)
        return marks.changed_ms == 0 or now_ms - idle_since_ms >= self._takeover_ms

    def _handle_all(self) -> None:
        """Claims the letters, and handles them as they come, until another process claims them."""
        try:
            with self._topic.claimed() as (bounds, settling):
                self._tally.is_at_work = True
                self._handle_claimed(bounds, settling)
        finally:
            self._tally.is_at_work = False
            self._tally.forget()
            self._to_tell.forget()

    def _handle_claimed(self, bounds: OffsetRanges, settling: Settling) -> None:
        topic_id = settling.marks.topic_id
        while topic_id == settling.marks.topic_id:
            for letter in self._topic.read(EVERYTHING, self._left(bounds, settling.marks)):
                self._handle(letter, settling)
                if self._is_stopping:
                    break
            self._commit(settling)
            if self._is_stopping:
                return
            self._read_to = _ends(bounds)
            self._rest(_LOOK_S)
            bounds, topic_id = self._topic.bounds()
        self._read_to = {}

    def _left(self, bounds: OffsetRanges, marks: Marks) -> OffsetRanges:
        """Returns the offsets that are not passed yet."""
        left = {
            number: (
                max(first, marks.positions.get(number, 0), min(end, self._read_to.get(number, 0))),
                end,
            )
            for number, (first, end) in bounds.items()
        }
        self._tally.waiting_offsets = sum(max(0, end - first) for first, end in left.values())
        return left

    def _handle(self, letter: Letter, settling: Settling) -> None:
        if settling.marks.state_of(letter.place) is not LetterState.WAITING:
            return
        began_s = time.monotonic()
        decision = self._decided(letter, settling)
        if decision is None:  # the end was asked for: it is handled again
            return
        why = None if isinstance(decision, Keep) else settling.take(letter, decision)
        self._tally.decide(letter.reason, decision, is_refused=why is not None)
        is_handled = self._handler(letter) is not None
        took_s = time.monotonic() - began_s if is_handled else None
        self._to_tell.add(letter, decision, took_s)
        settling.passed(letter)
        if time.monotonic() - self._committed_s >= _COMMIT_S:
            self._commit(settling)

    def _commit(self, settling: Settling) -> None:
        settling.end()
        self._tally.commit()
        self._committed_s = time.monotonic()
        refused = settling.settled.examples
        for place, why in refused:
            _LOG.error("%s of %s is kept: %s", place, self._topic.name, why)
        self._to_tell.tell(settling)
        refused.clear()

    def _handler(self, letter: Letter) -> LetterHandler | None:
        return self._handlers.get(letter.reason, self._otherwise)

    def _decided(self, letter: Letter, settling: Settling) -> Decision | None:
        """Returns what the letter's handler decides; None: it is not decided, and we stop."""
        handler = self._handler(letter)
        if handler is None:
            return KEEP
        for delay_s in [*self._retry_s, None]:
            try:
                decision = handler(letter)
            except Exception:  # noqa: BLE001 - it is the program's
                self._tally.handler_failures += 1
                where = (letter.place, self._topic.name)
                if delay_s is None and not self._is_stopping:
                    _LOG.exception("%s of %s is kept: its handler failed", *where)
                    return KEEP
                _LOG.warning("the handler of %s of %s failed", *where, exc_info=True)
                self._commit(settling)
                self._rest(delay_s or 0.0)
                if self._is_stopping:
                    return None
            else:
                return checked_decision(handler, decision)
        raise AssertionError("the last delay is None")

    def _rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_stopping and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, _SLICE_S))


def given_handlers(handlers: Mapping[str, _Handler], otherwise: _Handler | None) -> list[_Handler]:
    """Returns all handlers; raises TypeError if they are not given by reason."""
    if not isinstance(handlers, Mapping):
        raise TypeError(f"handlers must be a Mapping, not {type(handlers).__name__}")
    return [*handlers.values(), *([] if otherwise is None else [otherwise])]


def checked_decision(handler: Callable[..., object], decision: object) -> Decision:
    """Returns what a handler has decided; None counts as `KEEP`. Else raises TypeError."""
    check_ended(handler, decision)
    if decision is None:
        return KEEP
    if isinstance(decision, Replay | Drop | Keep):
        return decision
    raise TypeError(f"{handler!r} returned {decision!r}: REPLAY, DROP or KEEP")


def _ends(bounds: OffsetRanges) -> dict[int, int]:
    return {number: end for number, (_, end) in bounds.items()}
