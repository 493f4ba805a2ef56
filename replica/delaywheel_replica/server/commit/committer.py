"""Group commit: requests of many callers are written together, and answered once replicated.

Requests that arrive while a group is being written form the next one. It is called for once the
pending messages are as many as those that are being written or wait for mirrors, or `_FULL`: so the
longer mirrors take, the fewer and larger small groups become, as segments do by Nagle's algorithm
(RFC 896). For cancels, commits and releases it is called for at once, and so it is if all would be
refused. Nothing here has a thread or a clock: the driver (driver.py) calls for groups, takes,
writes and answers them.

The states of a request, and its caller's answers:

========  ==============================  =====================================================
state     how it is reached               left for
========  ==============================  =====================================================
pending   ``submit``                      taken; or refused as a whole: NO_WHEEL, DRAINING,
                                          NOT_ENOUGH_REPLICAS: nothing was written
                                          ``overdue`` (not written), the disk hangs: DISK_STALLED,
                                          mirrors do not answer: NOT_ENOUGH_REPLICAS
taken     ``take``                        waiting; or answered at once, if none of its messages
                                          is known to count (DUE_TOO_OLD, SLOT_FULL, WHEEL_LOST);
                                          ``overdue``, the disk hangs: WHEEL_LOST (unknown)
waiting   ``wait``: its frames lie        ``acknowledge``: W members hold them: handles, and the
          behind their index rows         reasons of single messages;
                                          ``give_up``: its wheel was left, ``overdue``: too few
                                          members answer: WHEEL_LOST (unknown)
========  ==============================  =====================================================
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.reasons import Reason
from delaywheel.storage.files.slot_files import SlotFull
from delaywheel.storage.frames.bundle import NO_GROUP, WrittenGroup
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.writing.wheel import NotEncodable, SlotFinished, WheelBroken
from delaywheel_replica.core.member.member import Admitted
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.server.node.refusals import Refusal
from delaywheel_replica.server.store.store import Store

_FULL: Final = 256
"""Of so many messages each pays more for itself than for its group. 4 KiB count as a message."""
_GROUP_MESSAGES: Final = 20_000
# A group is in memory three times while it is written. A longer request forms its own group.
# A leader takes what a frame releases in one transaction: so that counts as well.
GROUP_BYTES: Final = 8 << 20
# How much of an encoder's error goes into an answer.
_CAUSE_LENGTH: Final = 100

_ANSWERED_WITHIN_S: Final = 2
"""How long callers wait for their group, and then for replication, before they are answered anyway.

A member this late left the in-sync set a second ago. So if a group is not held, too few are left,
perhaps for hours; another node may have enough, and callers should turn to it in good time.
"""
_WITHIN: Final = f"within {_ANSWERED_WITHIN_S} s"
_NOT_WRITTEN: Final = Refusal(Reason.DISK_STALLED, f"Nothing was written {_WITHIN}")
_NOT_BEGUN: Final = Refusal(
    Reason.NOT_ENOUGH_REPLICAS, f"Nothing was written: mirrors did not answer {_WITHIN}"
)
_BEING_WRITTEN: Final = Refusal(Reason.WHEEL_LOST, f"This node's disk did not answer {_WITHIN}")
_NOT_HELD: Final = Refusal(Reason.WHEEL_LOST, f"Not enough members answered {_WITHIN}")

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Committed:
    """The outcome of one request's messages.

    Attributes:
        seq: The last frame of the group: the request is held once this frame is.
        failed: Row -> why it was not accepted.
    """

    wheel: WheelId
    seq: int
    failed: dict[int, Refusal]


RequestOutcome: TypeAlias = Committed | Refusal
"""A Refusal concerns the whole request: none of it was accepted, or (WHEEL_LOST) it is unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Messages, or rows that name some, that a caller waits for.

    Attributes:
        wheel: The only wheel that it may be written to; None: whichever is open.
        released_bytes: The length of the halves that it releases.
    """

    columns: Columns
    kind: Kind
    on_answer: Callable[[RequestOutcome], None]
    wheel: WheelId | None = None
    released_bytes: int = 0


Answers: TypeAlias = list[tuple[Request, RequestOutcome]]


@dataclass(slots=True)
class Group:
    """Requests of one kind that are written together, and the verdict on each message.

    ``verdicts`` has a number for each message: 0 = accepted, otherwise an index into ``reasons``.
    """

    requests: list[Request]
    admitted: Admitted
    columns: Columns
    verdicts: NDArray[np.uint8]
    reasons: list[Refusal] = field(default_factory=lambda: [Refusal(Reason.INTERNAL)])

    @classmethod
    def of(cls, requests: list[Request], admitted: Admitted) -> "Group":
        """Starts a group with nothing written; messages are refused that it may not have."""
        columns = Columns.concat([request.columns for request in requests])
        group = cls(requests, admitted, columns, np.zeros(len(columns), dtype=np.uint8))
        if admitted.seal_slot > int(columns.due_ms.min()) // 1000:
            sealed = columns.slots < admitted.seal_slot
            group.refuse(sealed, Refusal(Reason.DUE_TOO_OLD, "Its second is sealed"))
        if admitted.last_slot < int(columns.due_ms.max()) // 1000:
            group.refuse(columns.slots > admitted.last_slot, Refusal(Reason.CLOCK_AHEAD))
        if group.kind is Kind.RELEASES:  # all other rows may go to any wheel
            for request, place in group.ranges():
                if request.wheel not in {None, admitted.wheel}:
                    rows = np.arange(place.start, place.stop)
                    group.refuse(rows, Refusal(Reason.NO_WHEEL, "The half's wheel was left"))
        return group

    @property
    def kind(self) -> Kind:
        """The kind of all requests in the group."""
        return self.requests[0].kind

    def refuse(self, messages: NDArray[np.bool_] | NDArray[np.intp], refusal: Refusal) -> None:
        """Refuses these messages."""
        if self.reasons[-1] != refusal:
            self.reasons.append(refusal)
        self.verdicts[messages] = len(self.reasons) - 1

    def outcomes(self, seq: int) -> tuple[Answers, Answers]:
        """Returns each request's outcome: those that wait for a seq, and those to answer now."""
        wheel = self.admitted.wheel
        if not self.verdicts.any():
            return [(request, Committed(wheel, seq, {})) for request in self.requests], []
        later: Answers = []
        now: Answers = []
        for request, place in self.ranges():
            verdicts = self.verdicts[place]
            rows = np.flatnonzero(verdicts).tolist()
            failed = {row: self.reasons[verdicts[row]] for row in rows}
            answers = later if len(failed) < len(verdicts) else now
            answers.append((request, Committed(wheel, seq, failed)))
        return later, now

    def ranges(self) -> Iterator[tuple[Request, slice]]:
        """Yields the requests, each with the range of its messages in the group."""
        begin = 0
        for request in self.requests:
            end = begin + len(request.columns)
            yield request, slice(begin, end)
            begin = end


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The part of a group that has index rows: of the messages that were not refused before.

    Attributes:
        group: The frames that count, with rows of ``columns``.
        broken: Why the wheel accepts nothing more.
    """

    columns: Columns
    group: WrittenGroup
    broken: WheelBroken | None = None


def write(store: Store, group: Group, accepted_at_ms: int) -> WriteOutcome:
    """Appends the messages of a group that are not refused.

    It refuses as well: messages of full and finished slots; requests that no frame can hold,
    whatever encoding them raises; and, if the wheel breaks, messages that are not known to count.
    """
    while True:
        columns, rows = group.columns, None
        if group.verdicts.any():
            rows = np.flatnonzero(group.verdicts == 0)
            columns = columns.take(rows).compacted()
        if not len(columns):
            return WriteOutcome(columns, NO_GROUP)
        try:
            return WriteOutcome(columns, store.append(columns, group.kind, accepted_at_ms))
        except SlotFull as error:
            full = (group.columns.slots == error.slot) & (group.verdicts == 0)
            group.refuse(full, Refusal(Reason.SLOT_FULL, f"Second {error.slot}"))
        except SlotFinished:
            # The seal should have refused it; nothing was written, and the least slot is finished.
            finished = (group.columns.slots == columns.slots.min()) & (group.verdicts == 0)
            group.refuse(finished, Refusal(Reason.DUE_TOO_OLD, "Its second is finished"))
        except NotEncodable as error:
            _refuse_not_encodable(store, group, error)
        except WheelBroken as error:
            undone, done = group.verdicts == 0, error.done.order
            undone[done if rows is None else rows[done]] = False
            group.refuse(undone, Refusal(Reason.WHEEL_LOST, str(error)))
            return WriteOutcome(columns, error.done, error)


def _refuse_not_encodable(store: Store, group: Group, error: NotEncodable) -> None:
    """Refuses the requests that cannot be encoded alone; if each of them can, all."""
    _log.error("a group cannot be encoded", error=str(error), exc_info=error)
    refusal = Refusal(Reason.INTERNAL, f"It cannot be encoded: {str(error)[:_CAUSE_LENGTH]}")
    undone = group.verdicts == 0
    culprits = np.zeros_like(undone)
    for request, place in group.ranges():
        if undone[place].any() and not store.can_encode(request.columns, group.kind):
            culprits[place] = undone[place]
    group.refuse(culprits if culprits.any() else undone, refusal)


@dataclass(frozen=True, slots=True)
class _WaitingAnswer:
    wheel: WheelId
    seq: int
    since_ms: int
    answers: Answers
    size: int

    def refused(self, refusal: Refusal) -> Answers:
        return [(request, refusal) for request, _ in self.answers]


class Committer:
    """The requests that are under way. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, Request]] = deque()  # with their times of arrival
        # The group being written, and since when its first request waits; empty once answered.
        self._taken: list[Request] = []
        self._taken_since_ms = 0
        self._waiting: deque[_WaitingAnswer] = deque()
        # How many messages are pending, and how many are being written or wait for mirrors.
        self._pending_size = self._waiting_size = 0
        # How many of the pending requests are of other kinds.
        self._pending_others = 0
        # Since when a group is called for; None: it is not. And whether it would be refused.
        self._called_ms: int | None = None
        self._is_refused = False

    def submit(self, requests: Sequence[Request], now_ms: int) -> None:
        """Queues requests."""
        with self._lock:
            self._pending.extend((now_ms, request) for request in requests)
            self._pending_size += sum(map(_size, requests))
            self._pending_others += _others(requests)

    @property
    def needs_call(self) -> bool:
        """Whether requests are pending, and no group is called for: they wait for others."""
        return self._called_ms is None and bool(self._pending)

    def call_for_group(self, now_ms: int, *, refused: bool) -> bool:
        """Calls for a group, unless it is called for, or only messages are pending that must wait.

        Messages that would be refused wait for nothing. Returns whether it was called for now.
        """
        with self._lock:
            if not self.needs_call:
                return False
            if not (refused or self._is_enough() or self._pending_others):
                return False
            self._called_ms, self._is_refused = now_ms, refused
            return True

    def waits_ms(self, now_ms: int) -> int:
        """Returns how long a group that is called for has waited; 0 if none is."""
        with self._lock:
            if self._called_ms is None or not self._pending:
                return 0
            return now_ms - max(self._pending[0][0], self._called_ms)

    def take(self) -> list[Request]:
        """Returns requests of one kind, within bounds, if a group is called for."""
        with self._lock:
            if self._called_ms is None:
                return []
            self._called_ms = None
            must_wait = () if self._is_refused or self._is_enough() else (Kind.MESSAGES,)
            kinds = (request.kind for _, request in self._pending)
            kind = next((kind for kind in kinds if kind not in must_wait), None)
            taken: list[tuple[int, Request]] = []
            passed: list[tuple[int, Request]] = []
            messages = length_bytes = 0
            while self._pending and messages < _GROUP_MESSAGES and length_bytes < GROUP_BYTES:
                since_ms, request = self._pending.popleft()
                if request.kind is not kind:
                    passed.append((since_ms, request))
                    continue
                length_bytes += len(request.columns.blob) + request.released_bytes
                if taken and length_bytes > GROUP_BYTES:
                    passed.append((since_ms, request))
                    break
                taken.append((since_ms, request))
                messages += len(request.columns)
            self._pending.extendleft(reversed(passed))
            self._taken = [request for _, request in taken]
            size = sum(map(_size, self._taken))
            self._pending_size -= size
            self._pending_others -= _others(self._taken)
            self._waiting_size += size
            if taken:
                self._taken_since_ms = taken[0][0]
            return list(self._taken)

    def _is_enough(self) -> bool:
        """Whether as many messages are pending as are being written or wait for mirrors."""
        return self._pending_size >= min(self._waiting_size, _FULL)

    def wait(self, group: Group, seq: int, now_ms: int) -> Answers:
        """Registers a written group, whose callers wait; returns refusals to answer now."""
        later, now = group.outcomes(seq)
        with self._lock:
            taken = self._no_longer_taken()
            if not taken:
                return []  # too late: its callers were answered that the outcome is unknown
            if later:
                size = sum(map(_size, taken))
                wheel = group.admitted.wheel
                self._waiting.append(_WaitingAnswer(wheel, seq, now_ms, later, size))
                self._waiting_size += size
        return now

    def refuse(self, refusal: Refusal) -> Answers:
        """Returns refusals for a group that is not written."""
        with self._lock:
            return [(request, refusal) for request in self._no_longer_taken()]

    def acknowledge(self, wheel: WheelId, high_watermark: int) -> Answers:
        """Returns the answers for callers whose frames W members now hold."""
        answers: Answers = []
        with self._lock:
            waiting = self._waiting
            while waiting and waiting[0].wheel == wheel and waiting[0].seq <= high_watermark:
                answers += self._no_longer_waits().answers
        return answers

    def overdue(self, now_ms: int, *, disk_hangs: bool = False) -> Answers:
        """Returns answers for requests that have waited too long, regardless of their outcome."""
        before_ms = now_ms - _ANSWERED_WITHIN_S * 1000
        answers: Answers = []
        with self._lock:
            by_mirrors = not disk_hangs and not self._is_enough()
            while self._pending and self._pending[0][0] < before_ms:
                _, request = self._pending.popleft()
                self._pending_size -= _size(request)
                self._pending_others -= _others([request])
                is_held_up = by_mirrors and request.kind is Kind.MESSAGES
                answers.append((request, _NOT_BEGUN if is_held_up else _NOT_WRITTEN))
            if self._taken and self._taken_since_ms < before_ms:
                answers += [(request, _BEING_WRITTEN) for request in self._no_longer_taken()]
            waiting = self._waiting
            while waiting and waiting[0].since_ms < before_ms:
                answers += self._no_longer_waits().refused(_NOT_HELD)
        return answers

    def _no_longer_taken(self) -> list[Request]:
        taken, self._taken = self._taken, []
        self._waiting_size -= sum(map(_size, taken))
        return taken

    def _no_longer_waits(self) -> _WaitingAnswer:
        held = self._waiting.popleft()
        self._waiting_size -= held.size
        return held

    def give_up(self, refusal: Refusal) -> Answers:
        """Returns answers for all waiting callers, since the wheel was left."""
        with self._lock:
            answers: Answers = []
            while self._waiting:
                answers += self._no_longer_waits().refused(refusal)
        return answers


def _size(request: Request) -> int:
    """How much messages count; other kinds neither wait for mirrors nor have messages wait."""
    if request.kind is not Kind.MESSAGES:
        return 0
    return len(request.columns) + (len(request.columns.blob) >> 12)


def _others(requests: Iterable[Request]) -> int:
    """How many are of other kinds than messages."""
    return sum(request.kind is not Kind.MESSAGES for request in requests)
