"""Routing patterns mean what AMQP's do."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.consumer import Route, RoutePatternError

words = st.sampled_from(["a", "b", "c"])
patterns = st.lists(st.one_of(words, st.sampled_from(["*", "#"])), min_size=1, max_size=7)
keys = st.lists(words, max_size=7)


def matches(pattern: list[str], key: list[str]) -> bool:
    """The definition, word by word."""
    if not pattern:
        return not key
    if pattern[0] == "#":
        return any(matches(pattern[1:], key[at:]) for at in range(len(key) + 1))
    return bool(key) and pattern[0] in ("*", key[0]) and matches(pattern[1:], key[1:])


@given(several=st.lists(patterns, min_size=1, max_size=3), key=keys)
def test_as_defined(several: list[list[str]], key: list[str]) -> None:
    route = Route(".".join(pattern) for pattern in several)
    expected = any(matches(pattern, key) for pattern in several)
    assert route.matches(".".join(key).encode()) is expected


def test_the_last_header_counts_and_no_header_is_no_words() -> None:
    route = Route(["orders.#"])
    assert route.takes([("routingkey", b"x"), ("routingkey", b"orders")])
    assert not route.takes([("routingkey", b"orders"), ("routingkey", None)])
    assert not route.takes([])
    assert Route(["#"]).takes([])
    assert not Route(["*"]).takes([])


@pytest.mark.parametrize(
    "bad", ["", "a..b", ".a", "a.", "or*ders.x", "a.##", "a.*b", "x" * 256, None, 7]
)
def test_an_error_in_a_pattern_is_reported_at_once(bad: object) -> None:
    with pytest.raises(RoutePatternError):
        Route([bad])  # type: ignore[list-item]


def test_a_pattern_alone_or_none_is_a_mistake() -> None:
    several: list[str] | str
    for several in ("orders.#", []):
        with pytest.raises(RoutePatternError):
            Route(several)


def test_a_long_key_takes_no_more_than_its_length() -> None:
    route = Route([".".join(["#", "a"] * 60)])
    key = b".".join([b"a"] * 200_000 + [b"b"])
    began_s = time.process_time()
    assert not route.matches(key)
    assert time.process_time() - began_s < 20
