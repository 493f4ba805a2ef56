"""Rows of many frames, each with its frame's seq, time of acceptance and kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from delaywheel.storage.folder.disk import Buffer
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.journal.format import EMPTY, FILL, JournalFrame


@dataclass(frozen=True, eq=False)
class PlacedRows:
    """Rows, as one array for each property.

    Attributes:
        seqs: The seq of each row's frame.
        accepted_at_ms: When that was accepted.
        places: The row's number in its frame.
        kinds: What the row is.
    """

    columns: Columns
    seqs: NDArray[np.int64]
    accepted_at_ms: NDArray[np.int64]
    places: NDArray[np.uint32]
    kinds: NDArray[np.uint8]

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """The second of each row."""
        return self.columns.slots

    def __len__(self) -> int:
        return len(self.seqs)

    @staticmethod
    def of_frames(frames: Sequence[JournalFrame], buffer: Buffer) -> "PlacedRows | None":
        """Returns the rows of frames, sorted by second, kind, seq and place; None: there are none.

        Args:
            buffer: What all of them were decoded from; content is not copied.
        """
        filled = sorted(
            (frame for frame in frames if frame.kind not in {FILL, EMPTY}),
            key=lambda frame: (frame.kind, frame.seq),
        )
        if not filled:
            return None
        counts = [len(frame.columns) for frame in filled]
        parts = [replace(frame.columns, blob=b"") for frame in filled]
        columns = replace(Columns.concat(parts), blob=buffer)
        order = np.argsort(columns.slots, kind="stable")
        edges = np.cumsum([0, *counts[:-1]])
        places = np.arange(len(order)) - np.repeat(edges, counts)
        return PlacedRows(
            _in_order(columns, order),
            np.repeat([frame.seq for frame in filled], counts)[order],
            np.repeat([frame.accepted_at_ms for frame in filled], counts)[order],
            places[order].astype(np.uint32),
            np.repeat([frame.kind for frame in filled], counts)[order].astype(np.uint8),
        )

    def take(self, chosen: NDArray[np.bool_]) -> "PlacedRows":
        """Returns the marked rows."""
        at = chosen.nonzero()[0]
        return PlacedRows(
            _in_order(self.columns, at),
            self.seqs[at],
            self.accepted_at_ms[at],
            self.places[at],
            self.kinds[at],
        )

    def of_kind(self, kind: Kind) -> "PlacedRows":
        """Returns the rows of one kind."""
        return self.take(self.kinds == kind)

    def content(self, firsts: NDArray[np.int64]) -> list[bytes]:
        """Returns the bytes of keys, values and headers of all rows from each of these to the next.

        Rows that lie behind one another are copied together.
        """
        columns = self.columns
        begins, ends = columns.starts, columns.starts + columns.lengths_bytes
        is_new = np.ones(len(begins) + 1, bool)
        np.not_equal(begins[1:], ends[:-1], out=is_new[1:-1])
        is_new[firsts] = True
        view = memoryview(columns.blob)
        cuts = zip(begins[is_new[:-1]].tolist(), ends[is_new[1:]].tolist(), strict=True)
        pieces = [view[begin:end] for begin, end in cuts]
        numbers = is_new[:-1].nonzero()[0].searchsorted([*firsts, len(begins)]).tolist()
        return [b"".join(pieces[begin:end]) for begin, end in pairwise(numbers)]


def _in_order(columns: Columns, order: NDArray[np.intp]) -> Columns:
    """Returns rows in an order, with their content where it is."""
    return Columns(
        due_ms=columns.due_ms[order],
        ids=columns.ids[order],
        topics=columns.topics,
        topic_numbers=columns.topic_numbers[order],
        key_lengths=columns.key_lengths[order],
        value_lengths=columns.value_lengths[order],
        headers_lengths=columns.headers_lengths[order],
        partitions=columns.partitions[order],
        timestamps_ms=columns.timestamps_ms[order],
        blob=columns.blob,
        starts=columns.starts[order],
    )
