"""Frames of one wheel as columns and one buffer: what a group writes, and what nodes send.

Frames are written, kept, sent, checked and answered as whole bundles, and repaired one by one. A
bundle does not prove that its frames are good: rows and content are as their holder, or a message,
had them (checking.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import lt
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from delaywheel.seqset import SeqSet
from delaywheel.storage.frames.rows import (
    INDEX_ROW,
    INDEX_ROW_LENGTH_BYTES,
    leading,
    place_in,
    raw_rows,
)

_NO_EDGES = np.zeros(1, np.int64)


class FrameCopy(NamedTuple):
    """One frame as its holder has it.

    Attributes:
        row: Its index row: a mirror writes the same bytes at the same offset.
        content: The bytes of the frame; empty if its row refers to none, or its slot is finished
            (below the floor) and its file deleted: a mirror then takes only the row.
    """

    seq: int
    row: bytes
    content: bytes

    @property
    def slot(self) -> int:
        """The slot that its row says."""
        return place_in(self.row)[0]

    @property
    def offset(self) -> int:
        """Where it lies in its slot file, according to its row."""
        return place_in(self.row)[1]


@dataclass(frozen=True, slots=True, eq=False)
class FrameBundle:
    """Some frames of one wheel, their seqs ascending.

    A frame has either all the bytes that its row refers to, or none: its slot is finished, or its
    row refers to no frame.

    Attributes:
        rows: Their index rows (``rows.INDEX_ROW``).
        edges: Where each frame begins in `content`, and where the last one ends.
    """

    seqs: NDArray[np.int64]
    rows: NDArray[Any]
    edges: NDArray[np.int64]
    content: memoryview

    @classmethod
    def of(
        cls,
        seqs: NDArray[np.int64],
        rows: NDArray[Any],
        content: bytes | bytearray | memoryview,
        *,
        bare: NDArray[np.bool_] | None = None,
    ) -> Self:
        """Builds a bundle from a buffer with the frames' bytes, concatenated, their seqs ascending.

        `bare` marks frames that have no bytes in it; None: those whose rows refer to none.

        Raises:
            ValueError: There are more or fewer bytes than the rows refer to.
        """
        edges = np.zeros(len(rows) + 1, np.int64)
        lengths = rows["length"] if bare is None else rows["length"] * ~bare
        np.cumsum(lengths, out=edges[1:])
        if int(edges[-1]) != len(content) or len(seqs) != len(rows):
            raise ValueError(
                f"the rows refer to {edges[-1]} bytes, but there are {len(content)} bytes of frames"
            )
        return cls(seqs, rows, edges, memoryview(content))

    @classmethod
    def of_copies(cls, copies: Sequence[FrameCopy]) -> Self:
        """Builds a bundle from single frames."""
        rows = raw_rows(b"".join([copy.row for copy in copies]))
        return cls.of(
            np.array([copy.seq for copy in copies], np.int64),
            rows,
            b"".join([copy.content for copy in copies]),
            bare=np.array([not copy.content for copy in copies], bool),
        )

    @classmethod
    def joined(cls, bundles: "Sequence[FrameBundle]") -> "FrameBundle":
        """Concatenates bundles."""
        if len(bundles) == 1:
            return bundles[0]
        if not bundles:
            return NO_BUNDLE
        before, edges = 0, [_NO_EDGES]
        for bundle in bundles:
            edges.append(bundle.edges[1:] + before)
            before += len(bundle.content)
        return cls(
            np.concatenate([bundle.seqs for bundle in bundles]),
            np.concatenate([bundle.rows for bundle in bundles]),
            np.concatenate(edges),
            memoryview(b"".join([bundle.content for bundle in bundles])),
        )

    def __len__(self) -> int:
        return len(self.seqs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FrameBundle):
            return NotImplemented
        return (
            np.array_equal(self.seqs, other.seqs)
            and self.rows.tobytes() == other.rows.tobytes()
            and np.array_equal(self.edges, other.edges)
            and self.content == other.content
        )

    def __hash__(self) -> int:
        """Returns a hash that does not depend on the frames' content."""
        return hash((len(self.seqs), len(self.content)))

    @property
    def first_seq(self) -> int:
        """The seq of the first frame, which must exist."""
        return int(self.seqs[0])

    @property
    def last_seq(self) -> int:
        """The seq of the last frame, which must exist."""
        return int(self.seqs[-1])

    @property
    def length_bytes(self) -> int:
        """The length of all content."""
        return len(self.content)

    @property
    def has_content(self) -> NDArray[np.bool_]:
        """Marks frames whose bytes are included."""
        return self.edges[1:] > self.edges[:-1]

    @property
    def is_whole(self) -> bool:
        """Whether every frame's bytes are included."""
        edges = self.edges.tolist()
        return all(map(lt, edges, edges[1:]))

    @property
    def is_consecutive(self) -> bool:
        """Whether the seqs have no gaps."""
        return not len(self) or self.last_seq - self.first_seq + 1 == len(self)

    def part(self, first: int, last: int) -> "FrameBundle":
        """Returns the frames at indexes ``first`` to ``last`` (exclusive), without copying."""
        if first <= 0 and last >= len(self):
            return self
        edges = self.edges[first : last + 1]
        if first >= min(last, len(self)):
            return NO_BUNDLE
        return FrameBundle(
            self.seqs[first:last],
            self.rows[first:last],
            edges - edges[0],
            self.content[int(edges[0]) : int(edges[-1])],
        )

    def following(self, next_seq: int, limit: int | None) -> "FrameBundle":
        """Returns the frames from a seq on, up to the first gap and at most up to ``limit``."""
        seqs = self.seqs
        first, last = int(seqs.searchsorted(next_seq)), len(self)
        if limit is not None:
            last = int(seqs.searchsorted(limit, side="right"))
        follows = seqs[first:last] == np.arange(next_seq, next_seq + max(0, last - first))
        return self.part(first, first + leading(follows))

    def chosen(self, wanted: NDArray[np.bool_]) -> "FrameBundle":
        """Returns some of the frames."""
        if wanted.all():
            return self
        runs = SeqSet.where(0, wanted).spans  # of indexes
        return FrameBundle.joined([self.part(first, last + 1) for first, last in runs])

    def without_content(self, bare: NDArray[np.bool_]) -> "FrameBundle":
        """Returns the frames with the bytes of some of them dropped."""
        kept = self.has_content & ~bare
        return FrameBundle.of(self.seqs, self.rows, self.chosen(kept).content, bare=~kept)

    def copies(self) -> Iterator[FrameCopy]:
        """Yields single frames, for code that handles one at a time."""
        raw, edges = self.rows.tobytes(), self.edges.tolist()
        for number, seq in enumerate(self.seqs.tolist()):
            row = raw[number * INDEX_ROW_LENGTH_BYTES : (number + 1) * INDEX_ROW_LENGTH_BYTES]
            yield FrameCopy(seq, row, bytes(self.content[edges[number] : edges[number + 1]]))

    def only(self) -> FrameCopy:
        """Returns the only frame."""
        (copy,) = self.copies()
        return copy


NO_BUNDLE = FrameBundle(np.zeros(0, np.int64), np.zeros(0, INDEX_ROW), _NO_EDGES, memoryview(b""))


@dataclass(frozen=True, slots=True, eq=False)
class WrittenGroup:
    """The frames of one group that count, as they were written.

    Attributes:
        counts: Each frame's number of messages or cancels.
        order: The rows of the appended columns, in the order in which the frames hold them.
    """

    bundle: FrameBundle
    counts: NDArray[np.int64]
    order: NDArray[np.intp]


NO_GROUP = WrittenGroup(NO_BUNDLE, np.zeros(0, np.int64), np.zeros(0, np.intp))
