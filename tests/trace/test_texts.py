"""Keys and tags as text: short, and different where the bytes are."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaywheel.trace.schema import LONGEST_TEXT_BYTES
from delaywheel.trace.texts import cut, hashed, key_text, short_text, short_texts

SHORT = st.binary(max_size=LONGEST_TEXT_BYTES) | st.text(max_size=50).map(str.encode)


def _bytes_of(text: str) -> bytes:
    if text.startswith("\\x"):
        return bytes.fromhex(text[2:])
    return text.removeprefix("\\t").encode()


@given(SHORT)
def test_the_text_of_a_short_key_is_the_key(key: bytes) -> None:
    assert _bytes_of(short_text(key)) == key


@given(SHORT, st.binary(min_size=1, max_size=300))
def test_a_long_key_is_cut_and_marked(begin: bytes, rest: bytes) -> None:
    key = begin + b"x" * (LONGEST_TEXT_BYTES - len(begin)) + rest
    text = short_text(key)
    assert text.startswith("\\c")
    kept = _bytes_of(text[2:])
    assert key.startswith(kept)
    assert LONGEST_TEXT_BYTES - 4 < len(kept) <= LONGEST_TEXT_BYTES


PLAIN = st.text("ab\0é", max_size=9).map(str.encode)


@given(st.lists(st.none() | PLAIN | st.binary(min_size=195, max_size=205), max_size=9))
@example([b"a" * 200, b"b"])
@example([b"a" * 201])
@example([b"a\0b"])
@example([b"", b""])
def test_many_texts_at_once_are_those_of_each(keys: list[bytes | None]) -> None:
    texts = short_texts(keys)
    assert texts in (None, [None if key is None else short_text(key) for key in keys])
    is_plain = keys and all(
        key is not None and key.isascii() and not {0, 92}.intersection(key) and len(key) <= 200
        for key in keys
    )
    assert bool(is_plain) is (texts is not None)


def test_a_long_text_stays_text() -> None:
    assert short_text("é".encode() * 150) == "\\c" + "é" * 100
    assert short_text(b"a" + "é".encode() * 150) == "\\ca" + "é" * 99


@pytest.mark.parametrize(
    ("key", "text"), [(b"", ""), (b"\\", "\\t\\"), (b"\\x41", "\\t\\x41"), (b"\xff\x00", "\\xff00")]
)
def test_texts_are_as_the_document_says(key: bytes, text: str) -> None:
    assert short_text(key) == text


def test_a_hash_needs_the_secret() -> None:
    assert key_text("hash", b"one")(b"42") == hashed(b"42", b"one") != hashed(b"42", b"two")
    assert key_text("none", b"")(b"42") is None
    assert key_text("plain", b"")(b"42") == "42"


def test_words_are_cut() -> None:
    assert cut("é" * 150) == "é" * 100
    assert cut("lone \ud800") == "lone ?"
