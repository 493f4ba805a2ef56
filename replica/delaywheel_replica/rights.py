"""What a principal may do, by topic; docs/SECURITY.md says what each right allows.

A decision is a look-up by right and topic: the patterns of all grants are tried once for each.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from delaywheel_replica.patterns import Pattern

if TYPE_CHECKING:  # the settings are read by who must not wait for protobuf
    from delaywheel_proto.v1 import delaywheel_pb2 as pb

_KNOWN_AT_MOST: Final = 8_192
"""Decisions kept for those with the same grants: callers name topics as they like."""


class Right(StrEnum):
    """Something that may be granted."""

    PRODUCE = "produce"
    HALF = "half"
    CHANGE = "change"
    INSPECT = "inspect"
    READ = "read"
    OPERATE = "operate"


class Granted(NamedTuple):
    """Some rights in some topics; of half messages, with some groups of checkers."""

    may: frozenset[Right]
    topics: tuple[Pattern, ...]
    groups: tuple[Pattern, ...] = ()


class Rights:
    """What one principal may do. For any thread."""

    def __init__(self, granted: Iterable[Granted]) -> None:
        self.granted: Final = tuple(granted)
        self._decided: Final = lru_cache(_KNOWN_AT_MOST)(self._decide)
        self._begins: Final = lru_cache(_KNOWN_AT_MOST)(self._may_begin)

    @property
    def are_none(self) -> bool:
        """Whether nothing is allowed."""
        return not self.granted

    def may(self, right: Right, topic: str) -> bool:
        """Whether something is allowed in a topic."""
        return self._decided(right, topic)

    def _decide(self, right: Right, topic: str) -> bool:
        return any(pattern.fits(topic) for pattern in self._patterns(right))

    def may_begin(self, topic: str, group: str) -> bool:
        """Whether half messages of a group are allowed in a topic."""
        return self._begins(topic, group)

    def _may_begin(self, topic: str, group: str) -> bool:
        return any(
            Right.HALF in granted.may
            and any(pattern.fits(topic) for pattern in granted.topics)
            and any(pattern.fits(group) for pattern in granted.groups)
            for granted in self.granted
        )

    def may_somewhere(self, right: Right) -> bool:
        """Whether it is allowed in some topic."""
        return any(True for _ in self._patterns(right))

    def may_everywhere(self, right: Right) -> bool:
        """Whether it is allowed in all topics, so that nobody has to look which one it is."""
        return any(pattern.fits_all for pattern in self._patterns(right))

    def may_among(self, right: Right, topic: str | None) -> bool:
        """Whether it is allowed in a topic; if none is named, in all."""
        return self.may(right, topic) if topic else self.may_everywhere(right)

    def topics_of(self, right: Right) -> list[str]:
        """Returns patterns of the topics in which it is allowed."""
        return [pattern.text for pattern in self._patterns(right)]

    def _patterns(self, right: Right) -> Iterator[Pattern]:
        for granted in self.granted:
            if right in granted.may or (right is Right.INSPECT and Right.READ in granted.may):
                yield from granted.topics


class _All(Rights):
    """Everything, in all topics."""

    def may(self, right: Right, topic: str) -> bool:
        del right, topic
        return True

    def may_begin(self, topic: str, group: str) -> bool:
        del topic, group
        return True


EVERYTHING: Final[Rights] = _All([Granted(frozenset(Right), (Pattern("*"),))])


def withhold_names(answer: "pb.DescribeClusterResponse") -> None:
    """Leaves out of a description which other callers there are: for who may not operate."""
    for member in answer.members:
        if member.HasField("report"):  # to clear a field of none would make one
            member.report.ClearField("quota_refusals")
