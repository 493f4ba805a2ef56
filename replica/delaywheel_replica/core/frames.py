"""Sets of frames as ranges of seqs: a crash or a disk may take millions in a row.

What such a set costs goes by its ranges, never by its frames: finding one frame is a binary search
among the ranges of its wheel, and no operation but iterating makes an object for each frame.

Of each wheel the ranges are ascending, and neither overlap nor touch, so equal sets are equal
values.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Self

from delaywheel.identity import WheelId
from delaywheel_replica.core.fields import MalformedError, parse_wheel

FrameName = tuple[WheelId, int]
"""A frame's wheel and seq."""

Span = tuple[int, int]
"""First and last seq, both inside."""


class FrameRange(NamedTuple):
    """Frames of one wheel that follow one another."""

    wheel: WheelId
    first_seq: int
    last_seq: int

    @property
    def first(self) -> FrameName:
        """The first of them."""
        return self.wheel, self.first_seq


class FrameSet(AbstractSet[FrameName]):
    """Frames of any wheels. Never changed."""

    __slots__ = ("_spans",)

    def __init__(self, ranges: Iterable[FrameRange] = ()) -> None:
        """The frames of all these ranges, in whatever order, overlapping or not."""
        spans: dict[WheelId, list[Span]] = {}
        for wheel, first_seq, last_seq in ranges:
            spans.setdefault(wheel, []).append((first_seq, last_seq))
        merged = ((wheel, _merged(of_wheel)) for wheel, of_wheel in spans.items())
        self._spans = {wheel: of_wheel for wheel, of_wheel in merged if of_wheel}

    @classmethod
    def of(cls, frames: Iterable[FrameName]) -> "FrameSet":
        """These frames."""
        return cls(FrameRange(wheel, seq, seq) for wheel, seq in frames)

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> "FrameSet":  # type: ignore[override]
        return cls.of(it)

    @classmethod
    def _from_spans(cls, spans: Mapping[WheelId, tuple[Span, ...]]) -> Self:
        made = cls()
        made._spans = dict(spans)
        return made

    def __contains__(self, frame: object) -> bool:
        return isinstance(frame, tuple) and self._place(*frame) is not None

    def __iter__(self) -> Iterator[FrameName]:
        """One after the other: for few of them."""
        for wheel, first_seq, last_seq in self.ranges():
            for seq in range(first_seq, last_seq + 1):
                yield wheel, seq

    def __len__(self) -> int:
        return sum(last - first + 1 for spans in self._spans.values() for first, last in spans)

    def __bool__(self) -> bool:
        return bool(self._spans)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrameSet):
            return self._spans == other._spans
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash(frozenset(self._spans.items()))

    def __repr__(self) -> str:
        return f"FrameSet({[f'{w}: {first}..{last}' for w, first, last in self.ranges()]})"

    def __or__(self, other: Iterable[Any]) -> "FrameSet":
        """The frames of both."""
        added = other if isinstance(other, FrameSet) else FrameSet.of(other)
        return self._from_spans(
            self._spans
            | {w: _merged([*self._spans.get(w, ()), *spans]) for w, spans in added._spans.items()}
        )

    def __sub__(self, other: AbstractSet[Any]) -> "FrameSet":
        """The frames of this one that the other has not."""
        gone = other if isinstance(other, FrameSet) else FrameSet.of(other)
        left = {w: _without(s, gone.spans(w)) for w, s in self._spans.items()}
        return self._from_spans({wheel: spans for wheel, spans in left.items() if spans})

    def with_range(self, added: FrameRange) -> "FrameSet":
        """These and one more range."""
        wheel, first_seq, last_seq = added
        spans = self._spans.get(wheel, ())
        # Those that overlap it or touch it become one.
        begin = bisect_left(spans, first_seq - 1, key=_last)
        end = bisect_right(spans, last_seq + 1, key=_first)
        if begin < end:
            first_seq = min(first_seq, spans[begin][0])
            last_seq = max(last_seq, spans[end - 1][1])
        merged = (*spans[:begin], (first_seq, last_seq), *spans[end:])
        return self._from_spans({**self._spans, wheel: merged})

    def ranges(self) -> Iterator[FrameRange]:
        """All ranges, by wheel and seq."""
        for wheel in sorted(self._spans):
            for first_seq, last_seq in self._spans[wheel]:
                yield FrameRange(wheel, first_seq, last_seq)

    def spans(self, wheel: WheelId) -> tuple[Span, ...]:
        """The ranges of one wheel, ascending."""
        return self._spans.get(wheel, ())

    def of_wheel(self, wheel: WheelId) -> "FrameSet":
        """The frames of one wheel."""
        return self._from_spans({wheel: self._spans[wheel]} if wheel in self._spans else {})

    def range_of(self, frame: FrameName) -> FrameRange | None:
        """The range in which a frame lies."""
        span = self._place(*frame)
        return None if span is None else FrameRange(frame[0], *span)

    def end_from(self, wheel: WheelId, seq: int) -> int:
        """The seq before the next frame behind `seq` that is not in the set."""
        span = self._place(wheel, seq + 1)
        return seq if span is None else span[1]

    def begin_to(self, wheel: WheelId, seq: int) -> int:
        """The greatest seq up to `seq` that is not in the set."""
        span = self._place(wheel, seq)
        return seq if span is None else span[0] - 1

    def count(self, wheel: WheelId, first_seq: int, last_seq: int) -> int:
        """How many frames of a wheel there are from one seq to another."""
        return sum(
            max(0, min(last, last_seq) - max(first, first_seq) + 1)
            for first, last in self._spans.get(wheel, ())
        )

    def to_json(self) -> list[list[Any]]:
        """As a JSON list."""
        return [[str(wheel), first, last] for wheel, first, last in self.ranges()]

    @classmethod
    def from_json(cls, document: Any) -> "FrameSet":
        """Reads what `to_json` wrote.

        Raises:
            MalformedError: it is something else.
        """
        try:
            return cls(
                FrameRange(parse_wheel(wheel), int(first), int(last))
                for wheel, first, last in document
            )
        except (TypeError, ValueError) as error:
            raise MalformedError(f"no ranges of frames: {error}") from error

    def _place(self, wheel: WheelId, seq: int) -> Span | None:
        spans = self._spans.get(wheel, ())
        number = bisect_right(spans, seq, key=_first) - 1
        return spans[number] if number >= 0 and seq <= spans[number][1] else None


NO_FRAMES = FrameSet()


def _first(span: Span) -> int:
    return span[0]


def _last(span: Span) -> int:
    return span[1]


def _merged(spans: list[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        elif first <= last:
            merged.append((first, last))
    return tuple(merged)


def _without(spans: tuple[Span, ...], gone: tuple[Span, ...]) -> tuple[Span, ...]:
    left: list[Span] = []
    number = 0
    for first, last in spans:
        begin = first
        while number < len(gone) and gone[number][1] < begin:
            number += 1
        at = number
        while at < len(gone) and gone[at][0] <= last:
            if begin < gone[at][0]:
                left.append((begin, gone[at][0] - 1))
            begin = gone[at][1] + 1
            at += 1
        if begin <= last:
            left.append((begin, last))
    return tuple(left)
