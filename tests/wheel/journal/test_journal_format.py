"""Frames of the journal: what is encoded comes back, and no other bytes are taken for it."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.storage.frames.encode import FRAME_TOPICS
from delaywheel.storage.frames.format import DamageReason, FrameDamaged
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.journal.checking import whole_frames
from delaywheel.storage.journal.encode import EncodedFrames, encode_frames
from delaywheel.storage.journal.format import (
    EMPTY,
    FILL,
    HEADER_LENGTH_BYTES,
    JournalFrame,
    bare_frame,
    decode_frame,
)
from support.wheels.messages import (
    BASE_SLOT,
    Message,
    any_messages,
    columns_of,
    message,
    messages_of,
    names_of,
)

WHEEL = WheelId("node-1", 7)
NO_LIMIT = 1 << 30
ACCEPTED_AT_MS = 1_763_699_000_123
FIRST_SEQ = 41


def encode(
    messages: list[Message],
    *,
    kind: Kind = Kind.MESSAGES,
    max_messages: int = NO_LIMIT,
    max_bytes: int = NO_LIMIT,
) -> EncodedFrames:
    columns = columns_of(messages)
    return encode_frames(
        columns if kind is Kind.MESSAGES else names_of(columns),
        kind=kind,
        wheel=WHEEL,
        first_seq=FIRST_SEQ,
        accepted_at_ms=ACCEPTED_AT_MS,
        max_frame_messages=max_messages,
        max_frame_bytes=max_bytes,
    )


def decode_all(group: EncodedFrames) -> list[JournalFrame]:
    return [
        decode_frame(group.content, begin, wheel=WHEEL, seq=seq)
        for seq, begin in enumerate(group.edges[:-1], FIRST_SEQ)
    ]


@given(
    any_messages(slots=5, max_size=30),
    st.sampled_from(Kind),
    st.integers(1, 30),
    st.integers(1, 400),
)
def test_what_is_encoded_comes_back_sorted_by_second(
    messages: list[Message], kind: Kind, max_messages: int, max_bytes: int
) -> None:
    group = encode(messages, kind=kind, max_messages=max_messages, max_bytes=max_bytes)
    frames = decode_all(group)
    expected = [messages[row] for row in group.order.tolist()]
    assert [each.due_ms // 1000 for each in expected] == sorted(
        each.due_ms // 1000 for each in messages
    )
    if kind is not Kind.MESSAGES:
        names = names_of(columns_of(expected))
        expected = messages_of(names)
    assert [each for frame in frames for each in messages_of(frame.columns)] == expected
    for frame, count in zip(frames, group.counts.tolist(), strict=True):
        assert (frame.kind, frame.accepted_at_ms) == (kind, ACCEPTED_AT_MS)
        assert len(frame.columns) == count <= max_messages
        slots = frame.columns.slots
        assert frame.seconds.tolist() == sorted(set(slots.tolist()))
        assert slots[frame.firsts].tolist() == frame.seconds.tolist()
    whole = whole_frames(group.content, wheel=WHEEL, first_seq=FIRST_SEQ)
    assert (whole.edges, whole.damage) == (group.edges, None)


def test_the_order_within_a_second_is_the_callers() -> None:
    messages = [message(number, slot=BASE_SLOT + number % 2) for number in range(10)]
    (frame,) = decode_all(encode(messages))
    assert [int(each.id[-1]) for each in messages_of(frame.columns)] == [
        0, 2, 4, 6, 8, 1, 3, 5, 7, 9,
    ]  # fmt: skip


def test_a_frame_of_many_topics_has_few_rows() -> None:
    messages = [replace(message(n), topic=f"topic-{n}") for n in range(FRAME_TOPICS + 1)]
    assert encode(messages).counts.tolist() == [FRAME_TOPICS, 1]


def test_the_bytes_of_a_frame() -> None:
    """One message, written out by hand; docs/JOURNAL.md says what each field is."""
    sent = Message(
        BASE_SLOT * 1000 + 7, bytes(range(16)), "orders", b"k", b"value", (), 3, 1_763_000_000_000
    )
    group = encode([sent])
    head = struct.pack(
        "<BBHQQqIIIIII", 1, 1, 3, WHEEL.hash64, FIRST_SEQ, ACCEPTED_AT_MS, 1, 1, 1, 8, 6, 136
    )
    seconds = struct.pack("<II", BASE_SLOT, 0)
    body = (
        struct.pack("<q", 1_763_000_000_000)
        + bytes(range(16))
        + struct.pack("<IiiiiH", 0, 1, 5, 0, 3, 7)
        + bytes(2)
        + b"\x06\x00orders"
        + b"kvalue"
        + bytes(2)
    )
    of_body = struct.pack("<I", crc32c(body))
    of_head = struct.pack("<I", crc32c(of_body + head + seconds))
    assert bytes(group.content) == b"DWjf" + of_head + of_body + head + seconds + body


def test_no_changed_bit_is_taken_for_the_frame() -> None:
    content = encode([message(number, slot=BASE_SLOT + number) for number in range(2)]).content
    for bit in range(len(content) * 8):
        changed = bytearray(content)
        changed[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(FrameDamaged):
            decode_frame(changed, wheel=WHEEL, seq=FIRST_SEQ)
        assert not len(whole_frames(changed, wheel=WHEEL, first_seq=FIRST_SEQ))


def test_no_first_part_is_taken_for_the_frame() -> None:
    content = encode([message()]).content
    for length in range(1, len(content)):
        whole = whole_frames(content[:length], wheel=WHEEL, first_seq=FIRST_SEQ)
        assert not len(whole)
        assert whole.damage is not None
        assert whole.damage.reason is DamageReason.SHORT


def test_another_wheel_or_seq_is_another_frame() -> None:
    content = encode([message()]).content
    for wheel, seq in ((WheelId("node-1", 8), FIRST_SEQ), (WHEEL, FIRST_SEQ + 1)):
        with pytest.raises(FrameDamaged) as raised:
            decode_frame(content, wheel=wheel, seq=seq)
        assert raised.value.reason is DamageReason.MISPLACED


def test_a_later_releases_frame_is_said_to_be_one() -> None:
    content = encode([message()]).content
    content[12] = 2
    head_length = HEADER_LENGTH_BYTES + 8
    struct.pack_into("<I", content, 4, crc32c(memoryview(content)[8:head_length]))
    with pytest.raises(FrameDamaged) as raised:
        decode_frame(content, wheel=WHEEL, seq=FIRST_SEQ)
    assert raised.value.reason is DamageReason.VERSION


@pytest.mark.parametrize(("kind", "length"), [(FILL, 64), (EMPTY, 64), (EMPTY, 4096)])
def test_frames_without_rows(kind: int, length: int) -> None:
    content = bare_frame(
        kind, wheel=WHEEL, seq=9, accepted_at_ms=ACCEPTED_AT_MS, length_bytes=length
    )
    assert len(content) == length
    frame = decode_frame(content, wheel=WHEEL, seq=9)
    assert (frame.kind, len(frame.columns), len(frame.seconds)) == (kind, 0, 0)


def test_a_fill_record_has_one_length() -> None:
    content = bare_frame(FILL, wheel=WHEEL, seq=9, accepted_at_ms=0, length_bytes=72)
    with pytest.raises(FrameDamaged):
        decode_frame(content, wheel=WHEEL, seq=9)


def test_a_due_of_no_second_is_refused() -> None:
    with pytest.raises(ValueError, match="no second"):
        encode([message(slot=1 << 32)])


def test_a_row_beyond_the_bound_has_a_frame_of_its_own() -> None:
    messages = [message(number, value=bytes(1000 if number == 1 else 1)) for number in range(3)]
    assert encode(messages, max_bytes=500).counts.tolist() == [1, 1, 1]
    assert np.array_equal(encode(messages).counts, [3])
