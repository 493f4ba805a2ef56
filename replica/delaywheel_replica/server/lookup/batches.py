"""Reads the messages of one second in batches, each with the cancels that concern it.

A second may hold any number of both, so neither is kept as a whole: frames are gathered until there
are enough messages or bytes, and then all cancels of the second are read once, of which only those
of the batch are kept; commits and releases likewise, if it has half messages. Batches grow, so that
the first messages come soon and the cancels are not read too often.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from delaywheel.record_headers import HALF_GROUP
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.cancels import begins_of, rows_that_begin
from delaywheel_replica.core.leader.halves import HalfRows
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.core.protocol.reschedules import MessageKey
from delaywheel_replica.server.node.naming import key_of

_HALF: Final = HALF_GROUP.encode()
_BATCH_BYTES: Final = 8 << 20
_BATCH_ROWS: Final = 1 << 16
_GROWTH: Final = 4
NAMING_KINDS: Final = (Kind.CANCELS, Kind.COMMITS, Kind.RELEASES)
"""The kinds of rows that name messages."""


def is_half(columns: Columns, row: int) -> bool:
    """Whether a message is a half message, by its headers: bytes alone tell most that are none."""
    may_be = _HALF in columns.encoded_headers(row)
    return may_be and any(name == HALF_GROUP for name, _ in columns.headers(row))


class Examined(NamedTuple):
    """Frames with wanted rows, each with these; all that was examined lies before `end`."""

    end: Position
    length_bytes: int
    frames: Sequence[tuple[Frame, list[int]]]


@dataclass(slots=True)
class ScannedBatch:
    """Some messages of a second, and the position after all that were examined.

    Attributes:
        frames: In the order of positions, each with its wanted rows, of which it has some.
        naming: By kind and by the key of the message that they name: where such rows lie.
    """

    frames: list[tuple[Frame, list[int]]] = field(default_factory=list)
    end: Position | None = None
    naming: dict[Kind, dict[MessageKey, list[Position]]] = field(
        default_factory=lambda: {kind: {} for kind in NAMING_KINDS}
    )

    def named_by(self, kind: Kind, key: MessageKey) -> Sequence[Position]:
        """Returns where the rows of a kind lie that name a message."""
        return self.naming[kind].get(key, ())

    def half(self, frame: Frame, row: int, key: MessageKey) -> HalfRows | None:
        """Returns one copy of a half with the rows that decide it; None: the message is none."""
        if not is_half(frame.columns, row):
            return None
        cancels, commits, releases = (frozenset(self.named_by(kind, key)) for kind in NAMING_KINDS)
        copies = frozenset({Position(frame.wheel, frame.seq, row)})
        return HalfRows(int(frame.columns.due_ms[row]), copies, commits, releases, cancels)

    def rows(self) -> Iterator[tuple[Frame, int, MessageKey]]:
        """Yields the messages one by one: frame, row and key."""
        for frame, rows in self.frames:
            for row in rows:
                yield frame, row, key_of(frame.columns, row)


def in_batches(
    examined: Iterable[Examined],
    naming: Callable[[Kind], Iterable[Frame]],
    first_rows: int,
    *,
    is_enough: Callable[[], bool] = lambda: False,
) -> Iterator[ScannedBatch]:
    """Yields the messages of a second in batches.

    `naming` reads its frames of a kind that names messages. The first batch has `first_rows` at
    least, unless `is_enough` ends it.
    """
    batch, rows_at_most, count, length_bytes = ScannedBatch(), first_rows, 0, 0
    for part in examined:
        batch.frames += part.frames
        batch.end = part.end
        count += sum(len(rows) for _, rows in part.frames)
        length_bytes += part.length_bytes
        if count >= rows_at_most or length_bytes >= _BATCH_BYTES or is_enough():
            yield _with_naming(batch, naming)
            rows_at_most = max(first_rows, min(rows_at_most * _GROWTH, _BATCH_ROWS))
            batch, count, length_bytes = ScannedBatch(), 0, 0
    if batch.end is not None:
        yield _with_naming(batch, naming)


def _with_naming(batch: ScannedBatch, naming: Callable[[Kind], Iterable[Frame]]) -> ScannedBatch:
    keys = {key for _, _, key in batch.rows()}
    _add_rows(batch, Kind.CANCELS, keys, naming)
    halves = {key for frame, row, key in batch.rows() if is_half(frame.columns, row)}
    for kind in (Kind.COMMITS, Kind.RELEASES):
        _add_rows(batch, kind, halves, naming)
    return batch


def _add_rows(
    batch: ScannedBatch,
    kind: Kind,
    keys: Collection[MessageKey],
    naming: Callable[[Kind], Iterable[Frame]],
) -> None:
    if not keys:
        return
    begins, found = begins_of(key.id for key in keys), batch.naming[kind]
    for frame in naming(kind):
        for row in rows_that_begin(frame.columns, begins):
            key = key_of(frame.columns, row)
            if key in keys:
                found.setdefault(key, []).append(Position(frame.wheel, frame.seq, row))
