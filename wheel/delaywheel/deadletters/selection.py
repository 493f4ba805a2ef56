"""Which letters an operation applies to."""

from __future__ import annotations

from dataclasses import dataclass

from delaywheel.deadletters.letter import Letter, LetterPlace

CLOCKS_MS = 60_000
"""Times of letters come from several leaders' clocks: they are read to so much later a time."""


@dataclass(frozen=True, slots=True)
class Selection:
    """All letters that match every condition that is given.

    Attributes:
        topic: The topic that the message was meant for, or that of a half message's commit; of a
            group's letter also the topic that its record was first read from.
        from_ms: They became letters at this time or later, in Unix milliseconds.
        to_ms: They became letters before this time.
        id: The message's id: 32 hex digits.
        headers: Values that the message must have under these names; None: any value.
        places: Where they lie; empty: anywhere.
    """

    topic: str | None = None
    reason: str | None = None
    from_ms: int | None = None
    to_ms: int | None = None
    id: str | None = None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    places: frozenset[LetterPlace] = frozenset()

    def takes(self, letter: Letter) -> bool:
        """Returns whether a letter matches."""
        return (
            (not self.places or letter.place in self.places)
            and (self.topic is None or self.topic in letter.topics)
            and (self.reason is None or letter.reason == self.reason)
            and (self.from_ms is None or letter.timestamp_ms >= self.from_ms)
            and (self.to_ms is None or letter.timestamp_ms < self.to_ms)
            and (self.id is None or letter.id == self.id)
            and (self.key is None or letter.key == self.key)
            and all(_has(letter, name, value) for name, value in self.headers)
        )


EVERYTHING = Selection()


def _has(letter: Letter, name: str, wanted: bytes | None) -> bool:
    return any(
        name == other and (wanted is None or value == wanted) for other, value in letter.headers
    )
