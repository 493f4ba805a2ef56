"""Sets of one wheel's seqs, stored as spans: a crash or a bad disk may take millions at once.

Costs depend on the number of spans, never on the number of seqs: finding one is a binary search,
and only iterating makes an object for each. Spans are ascending and neither overlap nor touch, so
equal sets are equal values.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from operator import itemgetter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

SeqSpan = tuple[int, int]
"""First and last seq, both included."""

_first, _last = itemgetter(0), itemgetter(1)


class SeqSet(Collection[int]):
    """An immutable set of seqs; its spans ascend, with gaps between them."""

    __slots__ = ("spans",)

    spans: tuple[SeqSpan, ...]

    def __init__(self, spans: Iterable[SeqSpan] = ()) -> None:
        """Joins these spans, which may overlap, be empty, and come in any order."""
        self.spans = _merged(spans)

    @classmethod
    def of(cls, seqs: Iterable[int]) -> Self:
        """Builds a set from single seqs."""
        return cls((seq, seq) for seq in seqs)

    @classmethod
    def where(cls, first_seq: int, is_inside: NDArray[np.bool_]) -> Self:
        """Builds a set from the marked seqs of a consecutive run."""
        if not is_inside.any():
            return cls._of_spans(())
        edges = np.flatnonzero(np.diff(is_inside, prepend=False, append=False)) + first_seq
        return cls._of_spans(zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True))

    @classmethod
    def _of_spans(cls, spans: Iterable[SeqSpan]) -> Self:
        made = cls.__new__(cls)
        made.spans = tuple(spans)
        return made

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, int) and self.span_of(seq) is not None

    def __iter__(self) -> Iterator[int]:
        """Yields single seqs, ascending; meant for small sets."""
        for first, last in self.spans:
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __eq__(self, other: object) -> bool:
        return self.spans == other.spans if isinstance(other, SeqSet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.spans)

    def __repr__(self) -> str:
        return f"SeqSet({list(self.spans)})"

    def __or__(self, other: "SeqSet") -> Self:
        if len(other.spans) == 1:
            return self.with_span(*other.spans[0])
        return type(self)((*self.spans, *other.spans)) if other.spans else self

    def __and__(self, other: "SeqSet") -> Self:
        return self - (self - other)

    def __sub__(self, other: "SeqSet") -> Self:
        if not self.spans or not other.spans:
            return self
        return self._of_spans(_without(self.spans, other.spans))

    @property
    def first(self) -> int:
        """The least seq; raises IndexError if the set is empty."""
        return self.spans[0][0]

    @property
    def last(self) -> int:
        """The greatest seq; raises IndexError if the set is empty."""
        return self.spans[-1][1]

    def with_span(self, first: int, last: int) -> Self:
        """Returns the set with one more span, which may be empty."""
        if last < first:
            return self
        # Spans that overlap or touch it are merged with it.
        begin = bisect_left(self.spans, first - 1, key=_last)
        end = bisect_right(self.spans, last + 1, key=_first)
        if begin < end:
            first = min(first, self.spans[begin][0])
            last = max(last, self.spans[end - 1][1])
        return self._of_spans((*self.spans[:begin], (first, last), *self.spans[end:]))

    def within(self, first: int, last: int) -> Self:
        """Returns the seqs between two bounds; none if the bounds are reversed."""
        if last < first:
            return self._of_spans(())
        begin = bisect_left(self.spans, first, key=_last)
        end = bisect_right(self.spans, last, key=_first)
        return self._of_spans(
            (max(low, first), min(high, last)) for low, high in self.spans[begin:end]
        )

    def head(self, most: int) -> Self:
        """Returns the first few spans."""
        return self if len(self.spans) <= most else self._of_spans(self.spans[:most])

    def least(self, most: int) -> Self:
        """Returns the least few seqs."""
        for number, (first, last) in enumerate(self.spans):
            if last - first + 1 > most:
                cut = [(first, first + most - 1)] if most else []
                return self._of_spans((*self.spans[:number], *cut))
            most -= last - first + 1
        return self

    def condensed(self, most: int) -> Self:
        """Reduces the set to this many spans; the last one covers all from its first seq on."""
        if len(self.spans) <= most:
            return self
        return self._of_spans((*self.spans[: most - 1], (self.spans[most - 1][0], self.last)))

    def span_of(self, seq: int) -> SeqSpan | None:
        """Returns the span that contains a seq."""
        number = bisect_right(self.spans, seq, key=_first) - 1
        return self.spans[number] if number >= 0 and seq <= self.spans[number][1] else None

    def end_from(self, seq: int) -> int:
        """Returns the seq before the next one after `seq` that is not in the set."""
        if not self.spans:  # the usual case: nothing is lost
            return seq
        span = self.span_of(seq + 1)
        return seq if span is None else span[1]

    def begin_to(self, seq: int) -> int:
        """Returns the greatest seq up to `seq` that is not in the set."""
        span = self.span_of(seq)
        return seq if span is None else span[0] - 1

    def marks(self, first_seq: int, count: int) -> NDArray[np.bool_]:
        """Marks which of consecutive seqs are in the set."""
        marks = np.zeros(count, np.bool_)
        for first, last in self.within(first_seq, first_seq + count - 1).spans:
            marks[first - first_seq : last - first_seq + 1] = True
        return marks

    def to_json(self) -> list[Any]:
        """Returns a JSON list of seqs and of [first, last] spans."""
        return [first if first == last else [first, last] for first, last in self.spans]

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads what `to_json` wrote; raises ValueError, TypeError or IndexError if it did not."""
        return cls(
            (int(each[0]), int(each[1])) if isinstance(each, list) else (int(each), int(each))
            for each in document
        )


def _merged(spans: Iterable[SeqSpan]) -> tuple[SeqSpan, ...]:
    merged: list[SeqSpan] = []
    for first, last in sorted(spans):
        if last < first:
            continue
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return tuple(merged)


def _without(spans: tuple[SeqSpan, ...], gone: tuple[SeqSpan, ...]) -> Iterator[SeqSpan]:
    number = 0
    for first, last in spans:
        begin = first
        while number < len(gone) and gone[number][1] < begin:
            number += 1
        at = number
        while at < len(gone) and gone[at][0] <= last:
            if begin < gone[at][0]:
                yield begin, gone[at][0] - 1
            begin = gone[at][1] + 1
            at += 1
        if begin <= last:
            yield begin, last


NO_SEQS = SeqSet()
