"""Reads the messages of one second in batches, each with the cancels that concern it.

A second may hold any number of messages and of cancels. So neither is kept as a whole: frames are
gathered until there are enough messages or bytes, and then all cancels of the second are read once,
of which only those of the batch are kept. Batches grow, so that the first messages come soon and
the cancels are not read too often.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from delaywheel.storage.frames.format import Frame
from delaywheel.storage.reading.cancels import begins_of, rows_that_begin
from delaywheel_replica.core.protocol.progress import Position
from delaywheel_replica.server.lookup.scan import key_of

_BATCH_BYTES: Final = 8 << 20
_BATCH_ROWS: Final = 1 << 16
_GROWTH: Final = 4


class Examined(NamedTuple):
    """Frames that were examined together.

    Attributes:
        end: The position after all their messages.
        length_bytes: Their length.
        frames: Those with wanted rows, each with these.
    """

    end: Position
    length_bytes: int
    frames: Sequence[tuple[Frame, list[int]]]


@dataclass(slots=True)
class ScannedBatch:
    """Some messages of a second.

    Attributes:
        frames: Frames in the order of positions, each with its wanted rows; frames without any are
            left out.
        end: The position after all messages that were examined.
        cancelled: Of those messages that have cancels, where these lie, by the messages' keys, as
            `key_of` makes them.
    """

    frames: list[tuple[Frame, list[int]]] = field(default_factory=list)
    end: Position | None = None
    cancelled: dict[bytes, list[Position]] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[Frame, int, bytes]]:
        """Yields the messages one by one: frame, row and key."""
        for frame, rows in self.frames:
            for row in rows:
                yield frame, row, key_of(frame.columns, row)


def in_batches(
    examined: Iterable[Examined],
    cancels: Callable[[], Iterable[Frame]],
    first_rows: int,
    *,
    is_enough: Callable[[], bool] = lambda: False,
) -> Iterator[ScannedBatch]:
    """Yields the messages of a second in batches.

    Args:
        examined: Its frames with messages, in the order of positions.
        cancels: Reads its frames with cancels.
        first_rows: How many messages the first batch has at least.
        is_enough: Ends a batch early.
    """
    batch, rows_at_most, count, length_bytes = ScannedBatch(), first_rows, 0, 0
    for part in examined:
        batch.frames += part.frames
        batch.end = part.end
        count += sum(len(rows) for _, rows in part.frames)
        length_bytes += part.length_bytes
        if count >= rows_at_most or length_bytes >= _BATCH_BYTES or is_enough():
            yield _with_cancels(batch, cancels)
            rows_at_most = max(first_rows, min(rows_at_most * _GROWTH, _BATCH_ROWS))
            batch, count, length_bytes = ScannedBatch(), 0, 0
    if batch.end is not None:
        yield _with_cancels(batch, cancels)


def _with_cancels(batch: ScannedBatch, cancels: Callable[[], Iterable[Frame]]) -> ScannedBatch:
    keys = {key for _, _, key in batch.rows()}
    if keys:
        begins = begins_of(keys)
        for frame in cancels():
            columns = frame.columns
            rows = rows_that_begin(columns, begins)
            for row in rows:
                key = key_of(columns, row)
                if key in keys:
                    place = Position(frame.wheel, frame.seq, row)
                    batch.cancelled.setdefault(key, []).append(place)
    return batch
