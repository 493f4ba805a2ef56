"""Sets of frames as ranges of seqs by wheel (`delaywheel/seqset.py`)."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Self

from delaywheel.identity import WheelId
from delaywheel.seqset import NO_SEQS, SeqSet, SeqSpan
from delaywheel_replica.core.protocol.codec import MalformedError, parse_wheel

FrameName = tuple[WheelId, int]
"""A frame's wheel and seq."""


class FrameRange(NamedTuple):
    """Frames of one wheel that follow one another."""

    wheel: WheelId
    first_seq: int
    last_seq: int

    @property
    def first(self) -> FrameName:
        """The first frame of the range."""
        return self.wheel, self.first_seq


class FrameSet(AbstractSet[FrameName]):
    """An immutable set of frames of any wheels."""

    __slots__ = ("_seqs",)

    def __init__(self, ranges: Iterable[FrameRange] = ()) -> None:
        """Joins these ranges, which may overlap and come in any order."""
        spans: dict[WheelId, list[SeqSpan]] = {}
        for wheel, first_seq, last_seq in ranges:
            spans.setdefault(wheel, []).append((first_seq, last_seq))
        self._seqs = _some({wheel: SeqSet(of_wheel) for wheel, of_wheel in spans.items()})

    @classmethod
    def of(cls, frames: Iterable[FrameName]) -> "FrameSet":
        """Builds a set from single frames."""
        return cls(FrameRange(wheel, seq, seq) for wheel, seq in frames)

    @classmethod
    def of_wheels(cls, seqs: Mapping[WheelId, SeqSet]) -> Self:
        """Builds a set from seqs by wheel."""
        made = cls()
        made._seqs = _some(seqs)
        return made

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> "FrameSet":  # type: ignore[override]
        return cls.of(it)

    def __contains__(self, frame: object) -> bool:
        return isinstance(frame, tuple) and frame[1] in self.seqs(frame[0])

    def __iter__(self) -> Iterator[FrameName]:
        """Yields single frames; meant for small sets."""
        for wheel, seqs in self.items():
            for seq in seqs:
                yield wheel, seq

    def __len__(self) -> int:
        return sum(map(len, self._seqs.values()))

    def __bool__(self) -> bool:
        return bool(self._seqs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrameSet):
            return self._seqs == other._seqs
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash(frozenset(self._seqs.items()))

    def __repr__(self) -> str:
        return f"FrameSet({[f'{w}: {first}..{last}' for w, first, last in self.ranges()]})"

    def __or__(self, other: Iterable[Any]) -> "FrameSet":
        added = _frames(other)
        joined = {wheel: self.seqs(wheel) | seqs for wheel, seqs in added._seqs.items()}
        return self.of_wheels({**self._seqs, **joined}) if joined else self

    def __sub__(self, other: AbstractSet[Any]) -> "FrameSet":
        gone = _frames(other)
        if not (self._seqs and gone):
            return self
        return self.of_wheels({w: seqs - gone.seqs(w) for w, seqs in self._seqs.items()})

    def __and__(self, other: AbstractSet[Any]) -> "FrameSet":
        shared = _frames(other)
        return self.of_wheels({w: seqs & shared.seqs(w) for w, seqs in self._seqs.items()})

    def with_range(self, added: FrameRange) -> "FrameSet":
        """Returns the set with one more range."""
        wheel, first_seq, last_seq = added
        joined = self.seqs(wheel).with_span(first_seq, last_seq)
        return self.of_wheels({**self._seqs, wheel: joined})

    def items(self) -> Iterator[tuple[WheelId, SeqSet]]:
        """Wheels with their seqs, in order."""
        for wheel in sorted(self._seqs):
            yield wheel, self._seqs[wheel]

    def ranges(self) -> Iterator[FrameRange]:
        """All ranges, by wheel and seq."""
        for wheel, seqs in self.items():
            for first_seq, last_seq in seqs.spans:
                yield FrameRange(wheel, first_seq, last_seq)

    def seqs(self, wheel: WheelId) -> SeqSet:
        """Returns the seqs of one wheel."""
        return self._seqs.get(wheel, NO_SEQS)

    def of_wheel(self, wheel: WheelId) -> "FrameSet":
        """Returns the frames of one wheel."""
        return self.of_wheels({wheel: self.seqs(wheel)})

    def range_of(self, frame: FrameName) -> FrameRange | None:
        """Returns the range that a frame lies in."""
        span = self.seqs(frame[0]).span_of(frame[1])
        return None if span is None else FrameRange(frame[0], *span)

    def to_json(self) -> list[list[Any]]:
        """Returns a JSON list."""
        return [[str(wheel), first, last] for wheel, first, last in self.ranges()]

    @classmethod
    def from_json(cls, document: Any) -> "FrameSet":
        """Reads what `to_json` wrote, or raises MalformedError."""
        try:
            return cls(
                FrameRange(parse_wheel(wheel), int(first), int(last))
                for wheel, first, last in document
            )
        except (TypeError, ValueError) as error:
            raise MalformedError(f"no ranges of frames: {error}") from error


def _frames(frames: Iterable[Any]) -> FrameSet:
    return frames if isinstance(frames, FrameSet) else FrameSet.of(frames)


def _some(seqs: Mapping[WheelId, SeqSet]) -> dict[WheelId, SeqSet]:
    return {wheel: of_wheel for wheel, of_wheel in seqs.items() if of_wheel}


NO_FRAMES = FrameSet()
