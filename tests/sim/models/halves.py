"""Models one half message: its sender, the rows that decide it, wheels that end, leaders in turn.

`half_ends.ends` says what each transaction takes, by the real `Progress`; the real
`after_writing` says when a cancel is confirmed. All else is minimal: a wheel is a log of rows for
the second of the half. A leader knows nothing but what is committed, so any step may be a new
leader's first one; a step that is not committed leaves nothing behind. V moves over any number of
rows, since leaders differ in what they have heard; a row in V is held by W members.

The sender begins, in one wheel and, if it heard no answer, in another one too. Once it knows that a
copy is held it commits its local transaction, and says so by rows, in any wheel, and in another one
if it heard no answer. It may roll back at any time. Anyone may cancel at any time. A wheel ends
anywhere behind what is known to be held. A leader's clock may be ahead; then w is set back. Frames
may be lost to all members. The floor passes the second once w is past it and all that is in wheels
is <= V; after that nothing is accepted.

What could be wrong with a state:

- the message was delivered twice, or though its local transaction was not committed;
- a cancel was confirmed, and the message was delivered;
- the half has two ends, or none when its second is deleted;
- no row is left that says what its end was, so another leader would have decided differently;
- a release counts, and the half has no end;
- it was committed, and is neither delivered nor cancelled, nor is anybody asked.

What is excused: a second end, after a frame was lost that had a part in the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Final, NamedTuple

from delaywheel.identity import WheelId
from delaywheel_replica.core.leader import cancel
from delaywheel_replica.core.leader.cancel import CancelDecision, CancelView
from delaywheel_replica.core.leader.halves import HalfRows
from delaywheel_replica.core.protocol.progress import Done, Position, Progress
from support.core import half_ends
from support.core.half_ends import HalfEnd

NAMES: Final = (WheelId("a", 1), WheelId("b", 1))
DUE_MS: Final = 1
"""The half's due; time begins before it."""
LATE_MS: Final = 2
"""From then on its second may be deleted."""
HALF, COMMIT, RELEASE, CANCEL, LOST = "hcrx-"


class Wheel(NamedTuple):
    """One wheel.

    Attributes:
        rows: its frames in order, a letter for each.
        least_end: it does not end before this seq.
        ended: it takes no more.
        seq: V.
        seq_ahead: V of what was done ahead of w.
    """

    rows: str = ""
    least_end: int = 0
    ended: bool = False
    seq: int = 0
    seq_ahead: int = 0


class State(NamedTuple):
    """The whole state.

    Attributes:
        now_ms: the true time.
        wheels: in the order of their values, since their names do not matter.
        due_ms: W.
        ahead_ms: W of what was done ahead of w; None: nothing was.
        committed: whether the local transaction was committed; None: it is open.
        forwarded: how often the message was forwarded.
        asked: how often its sender was asked.
        cancelled: how often it ended as cancelled.
        answered: the sender has answered, so the message was delivered if that says so.
        confirmed: a cancel was confirmed.
        mistold: a cancel was told that the half is done, which it was not, or was cancelled.
        deleted: the floor has passed the second.
        loaded: V and what else a leader had when it loaded the second; only for a mutant.
    """

    now_ms: int = 0
    wheels: tuple[Wheel, ...] = (Wheel(),) * len(NAMES)
    due_ms: int = 0
    ahead_ms: int | None = None
    committed: bool | None = None
    forwarded: int = 0
    asked: int = 0
    cancelled: int = 0
    answered: bool = False
    confirmed: bool = False
    mistold: bool = False
    deleted: bool = False
    loaded: tuple[int, ...] | None = None

    @property
    def delivered(self) -> int:
        """How often a consumer sees the message."""
        return self.forwarded + (self.answered and self.committed is True)

    @property
    def rows(self) -> str:
        """All frames."""
        return "".join(wheel.rows for wheel in self.wheels)


@dataclass(frozen=True)
class HalvesModel:
    """The model of one size.

    Attributes:
        copies: limit for copies of the half.
        says: limit for the rows by which the sender commits it.
        cancels: limit for cancels.
        ends: limit for wheels that end.
        losses: limit for lost frames.
        ahead: a leader's clock may be ahead, once.
        decides_when_loaded: by what was admitted when the second was loaded, which is wrong.
    """

    copies: int = 2
    says: int = 2
    cancels: int = 1
    ends: int = 1
    losses: int = 0
    ahead: bool = False
    decides_when_loaded: bool = False
    _taken: dict[object, tuple[tuple[HalfEnd, ...], set[CancelDecision]]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    @property
    def start(self) -> State:
        """Begins before the half does."""
        return State()

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields every possible move."""
        if state.now_ms < LATE_MS:
            yield "time passes", state._replace(now_ms=state.now_ms + 1)
        yield from self._sender(state)
        if state.deleted:
            return
        yield from self._writes(state)
        yield from self._ends(state)
        yield from self._steps(state)
        if state.due_ms > state.now_ms and state.ahead_ms is None:
            yield "w is set back", _set_back(state)
        is_taken = all(wheel.seq == len(wheel.rows) for wheel in state.wheels)
        if is_taken and state.now_ms >= LATE_MS and state.due_ms >= DUE_MS:
            yield "the floor passes", state._replace(deleted=True)

    def wrong(self, state: State) -> str | None:
        """Returns what is wrong with a state."""
        return next((what for what, is_wrong in _judged(state) if is_wrong), None)

    def _writes(self, state: State) -> Iterator[tuple[str, State]]:
        rows = state.rows
        if state.committed is None and rows.count(HALF) < self.copies:
            yield from _appended(state, "begins", HALF)
        if state.committed and rows.count(COMMIT) + rows.count(RELEASE) < self.says:
            yield from _appended(state, "commits", COMMIT)
            yield from _appended(state, "releases", RELEASE)
        if HALF in rows and rows.count(CANCEL) < self.cancels:
            yield from _appended(state, "cancels", CANCEL)

    def _sender(self, state: State) -> Iterator[tuple[str, State]]:
        if state.committed is None:
            yield "the transaction rolls back", state._replace(committed=False)
            for number, wheel in enumerate(state.wheels):
                if HALF in wheel.rows:
                    held = wheel._replace(
                        least_end=max(wheel.least_end, wheel.rows.index(HALF) + 1)
                    )
                    yield "the transaction commits", _with(state, number, held, committed=True)
        if state.asked and not state.answered:
            # The barrier: if there is nothing yet, a later commit of the transaction fails.
            yield "is answered", state._replace(answered=True, committed=bool(state.committed))

    def _ends(self, state: State) -> Iterator[tuple[str, State]]:
        for number, wheel in enumerate(state.wheels):
            if not wheel.ended and sum(each.ended for each in state.wheels) < self.ends:
                for end in range(max(wheel.least_end, wheel.seq), len(wheel.rows) + 1):
                    ended = wheel._replace(rows=wheel.rows[:end], ended=True)
                    yield f"wheel {number} ends at {end}", _with(state, number, ended)
            if state.rows.count(LOST) < self.losses:
                for seq in range(wheel.seq and 1, wheel.seq + 1):
                    rows = wheel.rows[: seq - 1] + LOST + wheel.rows[seq:]
                    yield f"{number}/{seq} is lost", _with(state, number, wheel._replace(rows=rows))

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        if self.decides_when_loaded and state.loaded is None:
            loaded = tuple(len(wheel.rows) for wheel in state.wheels)
            yield "a leader loads the second", state._replace(loaded=loaded)
            return
        clocks_ms = list(range(state.due_ms, state.now_ms + 1))
        if self.ahead and state.ahead_ms is None and state.now_ms < LATE_MS and clocks_ms:
            clocks_ms.append(state.now_ms + 1)
        seqs = [range(wheel.seq, len(wheel.rows) + 1) for wheel in state.wheels]
        for due_ms, taken in product(clocks_ms, product(*seqs)):
            yield f"a step to {due_ms}, {taken}", self._stepped(state, due_ms, taken)

    def _stepped(self, state: State, due_ms: int, seqs: tuple[int, ...]) -> State:
        wheels = tuple(w._replace(seq=seq) for w, seq in zip(state.wheels, seqs, strict=True))
        ahead_ms = state.ahead_ms if (state.ahead_ms or 0) > due_ms else None
        if ahead_ms is None:
            wheels = tuple(wheel._replace(seq_ahead=0) for wheel in wheels)
        after = state._replace(due_ms=due_ms, ahead_ms=ahead_ms, wheels=wheels)
        before = (state.due_ms, state.ahead_ms, state.wheels, state.loaded)
        key = (before, due_ms, seqs)
        if key not in self._taken:
            self._taken[key] = _taken(state, after)
        ends, told = self._taken[key]
        forwarded = state.forwarded + ends.count(HalfEnd.FORWARDED)
        asked = state.asked + ends.count(HalfEnd.ASKED)
        is_done = CancelDecision.ALREADY_DELIVERED in told
        return after._replace(
            wheels=tuple(sorted(wheels)) if state.loaded is None else wheels,
            forwarded=forwarded,
            asked=asked,
            cancelled=state.cancelled + ends.count(HalfEnd.CANCELLED),
            confirmed=state.confirmed or CancelDecision.CANCELLED in told,
            mistold=state.mistold or (is_done and not (forwarded or asked)),
        )


def _judged(state: State) -> Iterator[tuple[str, bool]]:
    """Yields what could be wrong, and whether it is."""
    ends = state.forwarded + state.asked + state.cancelled
    has_half = HALF in state.rows
    yield "it was delivered without a commit", bool(state.delivered and not state.committed)
    if LOST not in state.rows:
        says = {COMMIT, RELEASE} & set(state.rows)
        released = any(map(_has_released, state.wheels))
        yield "it was delivered twice", state.delivered > 1
        yield (
            "it was delivered in spite of a confirmed cancel",
            bool(state.confirmed and state.delivered),
        )
        yield "it has two ends", ends > 1
        yield (
            "no cancel is left that cancelled it",
            bool(state.cancelled) and CANCEL not in state.rows,
        )
        yield "no commit is left that sent it", bool(state.forwarded and not says)
        yield "it was released and has no end", released and not ends
        yield "a cancel was told that it is done, and it was not", state.mistold
    if state.deleted and has_half:
        yield "it has no end", not ends
        has_way = state.delivered or state.asked or state.cancelled
        yield "it is lost", bool(state.committed and not has_way)


def _taken(before: State, after: State) -> tuple[tuple[HalfEnd, ...], set[CancelDecision]]:
    """Returns the ends of what a step takes, and what a node may tell a cancel after it."""
    began, reached = _progress(before), _progress(after)
    lengths = before.loaded or tuple(len(wheel.rows) for wheel in before.wheels)
    ends = half_ends.ends(_rows(before.wheels, lengths), began, reached)
    rows = _rows(after.wheels, tuple(wheel.seq for wheel in after.wheels))
    view = CancelView(
        due_ms=DUE_MS,
        now_ms=0,
        leading=True,
        progress=reached,
        copies=rows.copies,
        cancels=rows.cancels,
        complete=True,
        current=True,
        releases=rows.releases,
    )
    views = (view, replace(view, before=began))
    told = {cancel.after_writing(each) for each in views} if rows.copies else set()
    return tuple(ends.values()), told


def _progress(state: State) -> Progress:
    seqs, ahead = (tuple(wheel[at] for wheel in state.wheels) for at in (3, 4))
    return _progress_of(state.due_ms, seqs, state.ahead_ms, ahead)


@lru_cache(maxsize=4096)
def _progress_of(
    due_ms: int, seqs: tuple[int, ...], ahead_ms: int | None, seqs_ahead: tuple[int, ...]
) -> Progress:
    ahead = () if ahead_ms is None else (Done(ahead_ms, None, _by_name(seqs_ahead)),)
    return Progress(due_ms, None, _by_name(seqs), ahead=ahead)


def _by_name(seqs: tuple[int, ...]) -> dict[WheelId, int]:
    return dict(zip(NAMES, seqs, strict=True))


def _set_back(state: State) -> State:
    """Sets w back as the real progress does."""
    progress = _progress(state).set_back(state.now_ms)
    assert isinstance(progress, Progress)
    wheels = tuple(wheel._replace(seq_ahead=wheel.seq) for wheel in state.wheels)
    return state._replace(due_ms=progress.due_ms, ahead_ms=progress.ahead[0].due_ms, wheels=wheels)


def _has_released(wheel: Wheel) -> bool:
    taken = wheel.rows[: wheel.seq]
    return HALF in taken and RELEASE in taken[taken.index(HALF) :]


@lru_cache(maxsize=65536)
def _rows_of(rows: tuple[str, ...]) -> HalfRows:
    found = {letter: set[Position]() for letter in (HALF, COMMIT, RELEASE, CANCEL, LOST)}
    for name, letters in zip(NAMES, rows, strict=True):
        for seq, letter in enumerate(letters, 1):
            found[letter].add(Position(name, seq, 0))
    copies, commits, releases, cancels, _ = map(frozenset, found.values())
    return HalfRows(DUE_MS, copies, commits, releases, cancels)


def _rows(wheels: tuple[Wheel, ...], lengths: tuple[int, ...]) -> HalfRows:
    return _rows_of(tuple(w.rows[:length] for w, length in zip(wheels, lengths, strict=True)))


def _appended(state: State, what: str, row: str) -> Iterator[tuple[str, State]]:
    for number, wheel in enumerate(state.wheels):
        if not wheel.ended and not (row == HALF and HALF in wheel.rows):
            longer = wheel._replace(rows=wheel.rows + row)
            yield f"{what} in wheel {number}", _with(state, number, longer)


def _with(state: State, number: int, wheel: Wheel, **changes: bool) -> State:
    wheels = (*state.wheels[:number], wheel, *state.wheels[number + 1 :])
    if state.loaded is None:
        wheels = tuple(sorted(wheels))
    return state._replace(wheels=wheels, **changes)  # type: ignore[arg-type]
