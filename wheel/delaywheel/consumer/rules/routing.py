"""Routing patterns as in AMQP's topic exchanges, matched against the header `routingkey`.

Words are separated by dots; `*` stands for exactly one word, `#` for any number of words, including
none: `orders.*.created`, `orders.#`. A record without the header has no words, so only `#` matches
it.

A pattern is a row of places between its words, held as bits; one pass over the words of a key moves
all places at once. So matching takes time in proportion to the key's length, whatever the key
contains.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from delaywheel.record_headers import last_of

ROUTING_HEADER = "routingkey"
LONGEST_PATTERN_BYTES = 255
"""The longest routing key, as in AMQP."""

_CACHED_KEY_BYTES = 255
_CACHED_KEYS = 4_096
_ANY_WORD, _ANY_WORDS = "*", "#"


class RoutePatternError(ValueError):
    """A routing pattern is invalid; the text says why."""


class Route:
    """Compiled patterns; a key matches if any of them does.

    Example:
        >>> route = Route(["orders.*.created", "audit.#"])
        >>> [route.matches(key) for key in (b"orders.eu.created", b"orders.created", b"audit")]
        [True, False, True]

    Raises:
        RoutePatternError: A pattern is empty, too long, has an empty word, or a word that mixes `*`
            or `#` with other characters.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        if isinstance(patterns, str) or not isinstance(patterns, Iterable):
            raise RoutePatternError(f"give a list of patterns, such as [{str(patterns)!r}]")
        self._patterns = [_Pattern(pattern) for pattern in patterns]
        if not self._patterns:
            raise RoutePatternError("no pattern: everything would be skipped")
        self._remembered = lru_cache(maxsize=_CACHED_KEYS)(self._find)

    def matches(self, key: bytes | None) -> bool:
        """Whether a record with this routing key is wanted; None: it has no key."""
        key = key or b""
        return self._find(key) if len(key) > _CACHED_KEY_BYTES else self._remembered(key)

    def takes(self, headers: Iterable[tuple[str, bytes | None]]) -> bool:
        """Whether a record with these headers is wanted; the last of several keys counts."""
        return self.matches(last_of(headers, ROUTING_HEADER))

    def _find(self, key: bytes) -> bool:
        words = key.split(b".") if key else []
        return any(pattern.matches(words) for pattern in self._patterns)


class _Pattern:
    """One pattern; bit n of a state: the first n words are consumed."""

    def __init__(self, pattern: str) -> None:
        self._words: dict[bytes, int] = {}
        self._any_word = 0
        self._any_words = 0
        place = 1
        for word in _checked_words(pattern):
            if word == _ANY_WORDS:
                # Two in a row mean the same as one.
                if self._any_words & place >> 1:
                    continue
                self._any_words |= place
            elif word == _ANY_WORD:
                self._any_word |= place
            else:
                encoded = word.encode()
                self._words[encoded] = self._words.get(encoded, 0) | place
            place <<= 1
        self._end = place

    def matches(self, words: list[bytes]) -> bool:
        state = self._skip(1)
        for word in words:
            moved = (state & (self._words.get(word, 0) | self._any_word)) << 1
            state = self._skip(moved | state & self._any_words)
            if not state:
                return False
        return bool(state & self._end)

    def _skip(self, state: int) -> int:
        """Lets a `#` match nothing."""
        return state | (state & self._any_words) << 1


def _checked_words(pattern: str) -> list[str]:
    if not isinstance(pattern, str):
        raise RoutePatternError(f"a pattern must be str, not {type(pattern).__name__}")
    if not 0 < len(pattern.encode()) <= LONGEST_PATTERN_BYTES:
        raise RoutePatternError(
            f"pattern {pattern[:40]!r}: not 1 to {LONGEST_PATTERN_BYTES} bytes long"
        )
    words = pattern.split(".")
    for word in words:
        if not word:
            raise RoutePatternError(f"pattern {pattern!r}: it has an empty word")
        if len(word) > 1 and (_ANY_WORD in word or _ANY_WORDS in word):
            raise RoutePatternError(
                f"pattern {pattern!r}: in {word!r}, * or # is only a part of a word"
            )
    return words
