"""Hands announced records to the server, as fast as the server accepts them.

| the server | then |
|---|---|
| answers that W members hold a record | the next records follow at once |
| refuses a record that it surely does not have, since its second is sealed or full | the next records follow at once: that one is forwarded directly, or becomes a dead letter |
| did not take a record for any other reason, or may have taken it | nothing is handed over for a while, longer each time |
| accepts no messages, or no cancels, for a second | records that it surely does not have wait unannounced, and one at a time probes whether it accepts them again |
| is gone | the same, then over a new connection |
| does not say for 10 s whether it took a record | a fault in the status and the log: the server's log has the cause |

Records unanswered when the term ends are still announced: the next leader hands them over again.
"""  # noqa: E501 - rows of a table

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Final

from delaywheel_replica.cleaner.outside.clocks import Clock
from delaywheel_replica.cleaner.outside.ports import HandoverPort, MakeHandover
from delaywheel_replica.core.ingress.moment import RequestKind, TransactionRoom, request_kind
from delaywheel_replica.core.ingress.reading import Delayed, Withdrawn
from delaywheel_replica.core.ingress.term import Handed
from delaywheel_replica.core.ingress.underway import RecordAnswer
from delaywheel_replica.process.logs import get_logger

MESSAGES_MOST: Final = 5_000
"""Limit for one hand-over."""

FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 1.0

REFUSES_S: Final = 1.0
"""A server that changes its wheel refuses records for less than this."""

UNKNOWN_S: Final = 10.0
"""A server that restarts, or finds its mirrors, answers definitely within this time."""

log = get_logger(__name__)


class Handing:
    """The hand-over during one term."""

    def __init__(self, make: MakeHandover, clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._port: HandoverPort | None = None
        self._unanswered: set[Handed] = set()
        self._pause_s = FIRST_PAUSE_S
        self._again_at = 0.0
        self._refused_since: dict[RequestKind, float] = {}
        # In the order of their first UNKNOWN.
        self._unknown_since: dict[Handed, float] = {}
        self._is_fault_logged = False

    @property
    def fileno(self) -> int | None:
        """The descriptor to poll for answers; None: there is no connection."""
        return None if self._port is None else self._port.fileno()

    @property
    def most(self) -> Mapping[RequestKind, int]:
        """Returns the kinds that the server has refused for a while, as in `Moment.most`."""
        now_s = self._clock.monotonic()
        asks = int(now_s >= self._again_at and not self._unanswered)
        return {
            kind: asks for kind, since in self._refused_since.items() if now_s >= since + REFUSES_S
        }

    @property
    def faults(self) -> tuple[str, ...]:
        """Returns faults for operators: the server does not say whether it has a record."""
        until_s = self._clock.monotonic() - UNKNOWN_S
        unknown = self._unknown_since.items()
        stuck = [handed for handed, _ in takewhile(lambda each: each[1] <= until_s, unknown)]
        if not stuck:
            return ()
        (topic, partition), taken = stuck[0]
        more = f" and {len(stuck) - 1} more" if stuck[1:] else ""
        fault = (
            f"the server has not said for {UNKNOWN_S:.0f} s whether it took ingress record"
            f" {topic}/{partition}/{taken.offset}{more}: its log has the cause"
        )
        return (fault,)

    def answers(self) -> list[tuple[Handed, RecordAnswer]]:
        """Returns the answers since the last call."""
        if self._port is None:
            return []
        is_broken = self._port.is_broken
        answers = [each for each in self._port.answers() if each[0] in self._unanswered]
        self._unanswered.difference_update(handed for handed, _ in answers)
        if is_broken:
            answers += [(handed, RecordAnswer.UNKNOWN) for handed in self._unanswered]
            self._unanswered.clear()
            self._port.close()
            self._port = None
        if is_broken or any(_is_in_vain(handed, answer) for handed, answer in answers):
            self._again_at = self._clock.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        elif answers:
            self._pause_s = FIRST_PAUSE_S
        self._note_refused(answers)
        self._note_unknown(answers)
        return answers

    def _note_unknown(self, answers: Sequence[tuple[Handed, RecordAnswer]]) -> None:
        """Notes since when it has been unknown whether a record was taken."""
        for handed, answer in answers:
            if answer is RecordAnswer.UNKNOWN:
                self._unknown_since.setdefault(handed, self._clock.monotonic())
            elif answer is not RecordAnswer.NOT_NOW:
                self._unknown_since.pop(handed, None)
        faults = self.faults
        if faults and not self._is_fault_logged:
            log.error("ingress records are handed over without success", fault=faults[0])
        self._is_fault_logged = bool(faults)

    def _note_refused(self, answers: Sequence[tuple[Handed, RecordAnswer]]) -> None:
        """Notes since when no record of a kind was taken or refused for its own reason."""
        kinds: tuple[RequestKind, ...] = (Delayed, Withdrawn)
        for kind in kinds if answers else ():
            heard = {
                answer for handed, answer in answers if request_kind(handed.taken.request) is kind
            }
            if heard - {RecordAnswer.NOT_NOW, RecordAnswer.UNKNOWN}:
                self._refused_since.pop(kind, None)
            elif RecordAnswer.NOT_NOW in heard:
                self._refused_since.setdefault(kind, self._clock.monotonic())

    def hand(self, choose: Callable[[TransactionRoom], Sequence[Handed]]) -> bool:
        """Hands over as many records as there is room for; returns whether it handed over any."""
        if self._clock.monotonic() < self._again_at:
            return False
        if self._port is None:
            self._port = self._make()
            if self._port is None:
                self._again_at = self._clock.monotonic() + self._pause_s
                return False
        room_bytes = self._port.room_bytes
        if room_bytes <= 0:
            return False
        handed = choose(TransactionRoom(MESSAGES_MOST, room_bytes))
        if not handed and not self._unanswered:
            handed = choose(TransactionRoom(1))  # the next record exceeds the whole room
        if handed:
            self._unanswered.update(handed)
            self._port.hand(handed)
        return bool(handed)

    def close(self) -> None:
        """Closes the connection; unanswered records stay unanswered."""
        if self._port is not None:
            self._port.close()
            self._port = None


def _is_in_vain(handed: Handed, answer: RecordAnswer) -> bool:
    """Whether an immediate retry would get the same answer."""
    if answer in _JUDGED:  # else it is forwarded when due, or dies; others may be taken
        return handed.taken.perhaps_held
    return answer in _IN_VAIN


_JUDGED = frozenset({RecordAnswer.SEALED, RecordAnswer.FULL})
_IN_VAIN = frozenset({RecordAnswer.NOT_NOW, RecordAnswer.UNKNOWN})
