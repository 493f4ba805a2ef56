"""Messages cut out of a stream of bytes, in any pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel_replica.core.protocol.codec import MalformedError
from delaywheel_replica.peers import framing
from delaywheel_replica.peers.framing import PING, PREFACE, IncomingStream, head_of

BUFFER, PIECE, MOST = 16, 8, 100


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """Makes messages of a few bytes count as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "BUFFER_BYTES", BUFFER)
        patch.setattr(framing, "_PIECE_BYTES", PIECE)
        yield


def coming(data: bytes, counts: Iterator[int]) -> Callable[[memoryview], int]:
    """The bytes in pieces of these lengths, as far as there is room; then the end."""
    left = memoryview(data)

    def receive_into(view: memoryview) -> int:
        nonlocal left
        assert len(view) > 0
        count = min(len(view), next(counts), len(left))
        view[:count] = left[:count]
        left = left[count:]
        return count

    return receive_into


def forever(counts: list[int]) -> Iterator[int]:
    while True:
        yield from counts


cuts = st.lists(st.integers(1, 2 * BUFFER), min_size=1, max_size=9).map(forever)
reported = st.lists(st.binary(max_size=MOST), max_size=9)


@given(reported, cuts)
def test_any_cut_of_the_stream_gives_the_same_messages(
    messages: list[bytes], counts: Iterator[int]
) -> None:
    data = PREFACE + b"".join(head_of([message]) + message for message in messages)
    incoming = IncomingStream(coming(data, counts), MOST)
    assert incoming.take(len(PREFACE)) == PREFACE
    assert [incoming.message() for _ in messages] == messages
    assert incoming.message() is None


@given(reported, cuts, st.data())
def test_an_end_in_the_middle_gives_what_came_as_a_whole(
    messages: list[bytes], counts: Iterator[int], draw: st.DataObject
) -> None:
    framed = [head_of([message]) + message for message in messages]
    data = b"".join(framed)
    end = draw.draw(st.integers(0, len(data)))
    whole, length = 0, 0
    for message in framed:
        length += len(message)
        whole += length <= end
    incoming = IncomingStream(coming(data[:end], counts), MOST)
    assert list(iter(incoming.message, None)) == messages[:whole]


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_a_message_in_parts_is_the_same_as_one(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert head_of([memoryview(part) for part in parts]) == head_of([whole])
    if not whole:
        assert head_of(parts) == PING


@given(reported, st.integers(MOST + 1, 2**32 - 1), cuts)
def test_a_length_beyond_the_bound_is_named_after_what_came_before_it(
    messages: list[bytes], length_bytes: int, counts: Iterator[int]
) -> None:
    data = b"".join(head_of([message]) + message for message in messages)
    data += length_bytes.to_bytes(4, "little") + bytes(MOST)
    incoming = IncomingStream(coming(data, counts), MOST)
    assert [incoming.message() for _ in messages] == messages
    with pytest.raises(MalformedError, match=f"{length_bytes} bytes, {MOST} at most"):
        incoming.message()


def test_a_bound_may_change_with_what_was_read_kept() -> None:
    first, second = b"first", bytes(MOST)
    data = head_of([first]) + first + head_of([second]) + second
    receive_into = coming(data, forever([BUFFER]))
    incoming = IncomingStream(receive_into, len(first))
    assert incoming.message() == first
    incoming.receive_by(receive_into, MOST)
    assert incoming.message() == second


def test_what_is_only_said_to_come_takes_no_memory() -> None:
    asked = []

    def receive_into(view: memoryview) -> int:
        asked.append(len(view))
        if len(asked) > 1:
            return 0
        view[:4] = (2**31).to_bytes(4, "little")
        return 4

    assert IncomingStream(receive_into, 2**31).message() is None
    assert asked == [BUFFER, PIECE]


def test_a_message_too_long_for_its_length_prefix_is_refused_where_it_is_sent() -> None:
    part = memoryview(bytes(1 << 20))
    with pytest.raises(ValueError, match="4294967296 bytes"):
        head_of([part] * (1 << 12))
