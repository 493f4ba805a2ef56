"""The half messages that this node accepted and still holds: which row a commit of each is.

Halves and commits come from callers (changing/half_commits.py), and as records of ingress topics
(intake/handover.py). Where they came from makes no difference here.

| the half is | a commit of it is |
|---|---|
| in this node's open wheel, not released before | a release: it is forwarded at once |
| in this node's open wheel, released before | a commit: a second release would count as another message that is not to come |
| written once more since its release, by an ingress record that was handed over again | a release: of that copy, which ends as a duplicate |
| elsewhere, or not known here | a commit: it is forwarded at the end of its hold |
| handed over after the commit: partitions of an ingress topic are read in no order | a commit, and a release as soon as the half is held |
| due within `LEFT_TO_CHECK_MS`, or over, and the commit is an ingress record | a commit: at the end of its hold nothing can come earlier |

What is remembered is lost when the process ends: then the wheel is left as well.
"""  # noqa: E501 - rows of a table

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.record_headers import HALF_GROUP, LONGEST_GROUP_BYTES
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.header_checks import rows_that_may_have
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.server.commit.committer import GROUP_BYTES, Committed
from delaywheel_replica.server.commit.writing import Writing
from delaywheel_replica.server.node.naming import key_of, rows_naming
from delaywheel_replica.server.node.refusals import Refusal, RequestRefusedError

LEFT_TO_CHECK_MS: Final = 100
"""So near its due, no half is committed: its group is asked, and the answer decides."""

_SWEPT_EVERY: Final = 1 << 14

_MOST_EARLY: Final = 1 << 14
"""How many commits are remembered until their halves come; the oldest are forgotten first."""


class OwnHalf(NamedTuple):
    """A half that was not released: its wheel, and the length of key, value and headers."""

    wheel: WheelId
    length_bytes: int


@dataclass(slots=True)
class CommitRows:
    """Rows of one kind that are written together.

    Attributes:
        keys: The half that each commits, by its number among all that were divided.
        released: The halves that they release, in the same order; none: they are commits.
    """

    keys: dict[int, MessageKey] = field(default_factory=dict)
    released: list[OwnHalf] = field(default_factory=list)
    released_bytes: int = 0

    @property
    def kind(self) -> Kind:
        """Their kind."""
        return Kind.RELEASES if self.released else Kind.COMMITS

    @property
    def wheel(self) -> WheelId | None:
        """The only wheel that they may be written to; None: any."""
        return self.released[0].wheel if self.released else None

    @property
    def columns(self) -> Columns:
        """The rows."""
        return rows_naming(self.keys.values())


class OwnHalves:
    """The halves of one node. For one thread."""

    def __init__(self) -> None:
        self._halves: dict[MessageKey, OwnHalf] = {}
        self._early: dict[MessageKey, None] = {}
        self._sweep_at = _SWEPT_EVERY

    def __len__(self) -> int:
        return len(self._halves)

    def accepted(
        self, wheel: WheelId, lengths_bytes: Mapping[MessageKey, int], now_ms: int
    ) -> None:
        """Notes halves that a wheel has taken; forgets those whose hold has ended."""
        for key, length_bytes in lengths_bytes.items():
            self._halves[key] = OwnHalf(wheel, length_bytes)
        if len(self._halves) >= self._sweep_at:
            self._halves = {key: half for key, half in self._halves.items() if key.due_ms > now_ms}
            self._sweep_at = max(_SWEPT_EVERY, 2 * len(self._halves))

    def take_early_commits(self, keys: Iterable[MessageKey]) -> list[MessageKey]:
        """Returns which of these halves, held only now, had their commits before; forgets those."""
        early = [key for key in keys if key in self._early]
        for key in early:
            del self._early[key]
        return early

    def divided(
        self, keys: Mapping[int, MessageKey], open_wheel: WheelId | None, now_ms: int
    ) -> list[CommitRows]:
        """Divides commits by what rows they are; releases so that a group can hold each part.

        Each half is released once: `written` says what became of that.
        """
        commits, releases = CommitRows(), [CommitRows()]
        for row, key in keys.items():
            half = None if is_left_to_check(key.due_ms, now_ms) else self._take(key, open_wheel)
            if half is None:
                commits.keys[row] = key
                continue
            if releases[-1].released_bytes + half.length_bytes > GROUP_BYTES:
                releases.append(CommitRows())
            releases[-1].keys[row] = key
            releases[-1].released.append(half)
            releases[-1].released_bytes += half.length_bytes
        return [rows for rows in (commits, *releases) if rows.keys]

    def written(self, rows: CommitRows, failed: Mapping[int, Refusal]) -> None:
        """Notes which of these divided rows (by their place) were not written, as far as is known.

        Their halves may still be released; but a half that comes later is not let go by a commit
        that was refused: its caller knows that.
        """
        keys = list(rows.keys.values())
        for place, refusal in failed.items():
            if not refusal.reason.outcome_known:
                continue
            if rows.released:
                self._halves[keys[place]] = rows.released[place]
            else:
                self._early.pop(keys[place], None)

    def _take(self, key: MessageKey, open_wheel: WheelId | None) -> OwnHalf | None:
        """Returns a half that a row releases now; None: the row is a commit."""
        half = self._halves.get(key)
        if half is None:
            self._early[key] = None
            if len(self._early) > _MOST_EARLY:
                del self._early[next(iter(self._early))]
            return None
        return self._halves.pop(key) if half.wheel == open_wheel else None


class CommitWriting:
    """Writes commits of halves. For the event loop's thread."""

    def __init__(
        self, own: OwnHalves, writing: Writing, open_wheel: Callable[[], WheelId | None]
    ) -> None:
        self._own = own
        self._writing = writing
        self._open_wheel = open_wheel

    async def write(self, keys: Mapping[int, MessageKey], now_ms: int) -> dict[int, Refusal]:
        """Writes a row for each half; returns why single rows are not known to be held."""
        parts = self._own.divided(keys, self._open_wheel(), now_ms)
        failed: dict[int, Refusal] = {}
        for each in await asyncio.gather(*map(self._write, parts)):
            failed |= each
        return failed

    async def _write(self, rows: CommitRows) -> dict[int, Refusal]:
        written = self._writing.submit(rows.columns, rows.kind, rows.wheel, rows.released_bytes)
        # Its caller may leave before.
        written.add_done_callback(lambda done: self._own.written(rows, _failed(rows, done)))
        await asyncio.wait([written])
        numbers = list(rows.keys)
        return {numbers[place]: refusal for place, refusal in _failed(rows, written).items()}


def _failed(rows: CommitRows, written: "asyncio.Future[Committed]") -> dict[int, Refusal]:
    """Returns which of these rows, by their places, are not known to be written, and why."""
    error = written.exception()
    if isinstance(error, RequestRefusedError):
        return dict.fromkeys(range(len(rows.keys)), error.refusal)
    return written.result().failed


def halves_among(columns: Columns) -> dict[int, tuple[MessageKey, int]]:
    """Finds half messages: row -> its name, and the length of key, value and headers."""
    rows = [0]
    if len(columns) > 1:  # the bytes of all are searched; of one alone its headers do
        may_be = np.broadcast_to(
            rows_that_may_have(columns, HALF_GROUP, LONGEST_GROUP_BYTES), len(columns)
        )
        rows = np.flatnonzero(may_be).tolist()
    lengths_bytes = columns.lengths_bytes
    return {
        row: (
            key_of(columns, row),
            int(lengths_bytes[row]),
        )
        for row in rows
        if any(name == HALF_GROUP for name, _ in columns.headers(row))
    }


def is_left_to_check(due_ms: int, now_ms: int) -> bool:
    """Whether it is too late to commit a half."""
    return due_ms <= now_ms + LEFT_TO_CHECK_MS
