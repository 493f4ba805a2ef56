from dataclasses import replace

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.storage.frames import rows as rows_module
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.encode import FRAME_TOPICS, encode_group
from delaywheel.storage.frames.format import (
    HEADER_LENGTH_BYTES,
    NEWEST_READ,
    DamageReason,
    Frame,
    FrameDamaged,
    decode_frame,
)
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import (
    FEW_FRAMES,
    HOLE_ROW,
    INDEX_ROW_LENGTH_BYTES,
    checked_rows,
    index_rows,
    raw_rows,
)
from sim.mutants.mutant import instead
from support.wheels.messages import (
    BASE_SLOT,
    Message,
    any_messages,
    columns_of,
    message,
    messages_of,
)
from support.wheels.plain_frames import PlainFrame, frames_of, plain_frames

WHEEL = WheelId("node-1", 7)
NO_LIMIT = 1 << 30
ACCEPTED_AT_MS = 1_763_699_000_123


def encode(
    messages: list[Message], *, max_messages: int = NO_LIMIT, max_bytes: int = NO_LIMIT
) -> list[PlainFrame]:
    group = encode_group(
        columns_of(messages),
        kind=Kind.MESSAGES,
        wheel=WHEEL,
        first_seq=1,
        accepted_at_ms=ACCEPTED_AT_MS,
        max_frame_messages=max_messages,
        max_frame_bytes=max_bytes,
    )
    return frames_of(group, 1)


def decode(frame: PlainFrame) -> Frame:
    return decode_frame(frame.buffer, wheel=WHEEL, slot=frame.slot, seq=frame.seq)


def apart(columns: Columns, between: int) -> Columns:
    """The same messages, with other bytes before each."""
    starts, lengths = columns.starts.tolist(), columns.lengths_bytes.tolist()
    pieces = [columns.blob[at : at + length] for at, length in zip(starts, lengths, strict=True)]
    return replace(
        columns,
        blob=b"".join(bytes(between) + bytes(piece) for piece in pieces),
        starts=columns.starts + between * np.arange(1, len(columns) + 1),
    )


@given(
    any_messages(slots=5, max_size=30),
    st.sampled_from(Kind),
    st.integers(1, 8),
    st.integers(1, 400),
    st.integers(0, 3),
    st.sampled_from([0, FEW_FRAMES]),
    st.integers(0, 3),
)
def test_frames_made_at_once_are_those_made_one_by_one(
    messages: list[Message],
    kind: Kind,
    max_messages: int,
    max_bytes: int,
    offset: int,
    few: int,
    between: int,
) -> None:
    """Holds for few and for many, and for messages with other bytes between them."""
    columns = apart(columns_of(messages), between)
    options = {
        "kind": kind,
        "wheel": WHEEL,
        "first_seq": 7,
        "accepted_at_ms": ACCEPTED_AT_MS,
        "max_frame_messages": max_messages,
        "max_frame_bytes": max_bytes,
    }
    group = encode_group(columns, **options)  # type: ignore[arg-type]
    expected = plain_frames(messages, **options)  # type: ignore[arg-type]
    assert frames_of(group, 7) == expected
    offsets = np.arange(len(group)) * 8 * offset
    lengths = group.edges[1:] - group.edges[:-1]
    with instead(rows_module, "FEW_FRAMES", few):
        rows = index_rows(group.slots, offsets, lengths, group.counts, kind=kind)
    assert rows.tobytes() == b"".join(
        frame.index_row(at, kind) for frame, at in zip(expected, offsets.tolist(), strict=True)
    )
    assert checked_rows(raw_rows(rows.tobytes())).tobytes() == rows.tobytes()


@given(any_messages(), st.integers(1, 8), st.integers(1, 400))
def test_any_messages_come_back_the_same(
    messages: list[Message], max_messages: int, max_bytes: int
) -> None:
    frames = encode(messages, max_messages=max_messages, max_bytes=max_bytes)
    expected = sorted(messages, key=lambda each: each.due_ms // 1000)
    assert [each for frame in frames for each in messages_of(decode(frame).columns)] == expected
    assert [frame.seq for frame in frames] == list(range(1, len(frames) + 1))
    for frame in frames:
        assert len(frame.buffer) % 8 == 0
        assert frame.messages <= max_messages
        assert [messages[row] for row in frame.rows] == messages_of(decode(frame).columns)


@settings(deadline=None)
@given(any_messages(slots=2), st.data())
def test_a_flipped_bit_is_caught_wherever_it_is(
    messages: list[Message], data: st.DataObject
) -> None:
    frame = data.draw(st.sampled_from(encode(messages)))
    bit = data.draw(st.integers(0, len(frame.buffer) * 8 - 1))
    damaged = bytearray(frame.buffer)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameDamaged):
        decode_frame(damaged, wheel=WHEEL, slot=frame.slot, seq=frame.seq)


@settings(deadline=None)
@given(any_messages(slots=1, max_size=4), st.data())
def test_a_cut_frame_is_never_read(messages: list[Message], data: st.DataObject) -> None:
    (frame,) = encode(messages)
    length = data.draw(st.integers(0, len(frame.buffer) - 1))
    with pytest.raises(FrameDamaged) as damage:
        decode_frame(frame.buffer[:length], wheel=WHEEL, slot=frame.slot, seq=1)
    assert damage.value.reason is DamageReason.SHORT


@pytest.mark.parametrize(
    ("wheel", "slot", "seq"),
    [
        (WheelId("node-1", 8), BASE_SLOT, 1),
        (WHEEL, BASE_SLOT + 1, 1),
        (WHEEL, BASE_SLOT, 2),
    ],
)
def test_a_frame_in_a_wrong_place_is_caught(wheel: WheelId, slot: int, seq: int) -> None:
    (frame,) = encode([message()])
    with pytest.raises(FrameDamaged) as damage:
        decode_frame(frame.buffer, wheel=wheel, slot=slot, seq=seq)
    assert damage.value.reason is DamageReason.MISPLACED


def test_magic_and_version_are_looked_at_before_the_rest() -> None:
    """A version counts if the checksum is right: otherwise a byte of it may be wrong."""
    (frame,) = encode([message()])
    for offset, has_checksum, reason in (
        (0, False, DamageReason.MAGIC),
        (8, True, DamageReason.VERSION),
        (8, False, DamageReason.CHECKSUM),
    ):
        other = bytearray(frame.buffer)
        other[offset] += NEWEST_READ
        if has_checksum:
            other[4:8] = crc32c(other[8:]).to_bytes(4, "little")
        with pytest.raises(FrameDamaged) as damage:
            decode_frame(other, wheel=WHEEL, slot=BASE_SLOT, seq=1)
        assert damage.value.reason is reason


def test_columns_that_no_row_uses_take_no_space() -> None:
    (bare,) = encode([message()])
    with_both = Message(**{**message().__dict__, "partition": 0, "timestamp_ms": 0})
    (full,) = encode([with_both])
    assert len(bare.buffer) < len(full.buffer) <= len(bare.buffer) + 16


def test_a_frame_has_only_its_own_topics() -> None:
    topics = ["a", "b", "a", "c"]
    messages = [
        Message((BASE_SLOT + number // 2) * 1000, bytes(16), topic)
        for number, topic in enumerate(topics)
    ]
    assert [decode(frame).columns.topics for frame in encode(messages)] == [("a", "b"), ("a", "c")]


def test_frames_of_a_group_with_many_topics_have_few_messages() -> None:
    """Or those that come late would be forwarded to all of its topics in one transaction."""
    many = [replace(message(n), topic=f"topic-{n % (FRAME_TOPICS + 1)}") for n in range(450)]
    assert [frame.messages for frame in encode(many)] == [*[FRAME_TOPICS] * 14, 2]
    few = [replace(message(n), topic=f"topic-{n % FRAME_TOPICS}") for n in range(450)]
    assert [frame.messages for frame in encode(few)] == [450]


def test_cancels_come_back_the_same() -> None:
    due_ms = np.array([BASE_SLOT * 1000 + 5, (BASE_SLOT + 1) * 1000, BASE_SLOT * 1000])
    ids = np.arange(48, dtype=np.uint8).reshape(3, 16)
    group = encode_group(
        Columns.of_names(due_ms, ids, ("a", "b"), np.array([0, 0, 1], np.uint32)),
        kind=Kind.CANCELS,
        wheel=WHEEL,
        first_seq=5,
        accepted_at_ms=1,
        max_frame_messages=NO_LIMIT,
        max_frame_bytes=NO_LIMIT,
    )
    frames = frames_of(group, 5)
    decoded = [decode(frame) for frame in frames]
    assert [frame.kind for frame in decoded] == [Kind.CANCELS] * 2
    assert [frame.columns.due_ms.tolist() for frame in decoded] == [
        [BASE_SLOT * 1000 + 5, BASE_SLOT * 1000],
        [(BASE_SLOT + 1) * 1000],
    ]
    assert decoded[0].columns.ids.tolist() == ids[[0, 2]].tolist()
    assert [decoded[0].columns.topic(row) for row in (0, 1)] == ["a", "b"]
    assert decoded[1].columns.topics == ("a",)
    assert frames[0].index_row(0, Kind.CANCELS)[15] & 0x80


def test_one_message_longer_than_a_frame_may_be_is_alone() -> None:
    messages = [message(0, value=bytes(10)), message(1, value=bytes(900)), message(2)]
    frames = encode(messages, max_bytes=500)
    assert [frame.messages for frame in frames] == [1, 1, 1]


@pytest.mark.parametrize("due_ms", [-1, (1 << 32) * 1000])
def test_a_due_that_no_slot_can_hold_is_refused(due_ms: int) -> None:
    with pytest.raises(ValueError, match="no slot file"):
        encode([Message(due_ms, bytes(16), "t")])


def test_decoding_copies_no_content() -> None:
    (frame,) = encode([message(number) for number in range(50)])
    decoded = decode(frame)
    assert isinstance(decoded.columns.blob, memoryview)
    assert decoded.columns.blob.obj is frame.buffer
    assert int(decoded.columns.starts[0]) > HEADER_LENGTH_BYTES


@settings(deadline=None)
@given(
    bit=st.integers(0, 8 * INDEX_ROW_LENGTH_BYTES - 1),
    copies=st.integers(1, 100),
    offset=st.integers(0, (1 << 32) - 1),
)
def test_a_row_with_a_flipped_bit_is_read_as_a_hole(bit: int, copies: int, offset: int) -> None:
    (frame,) = encode([message()] * copies)
    row = bytearray(frame.index_row(offset))
    assert checked_rows(raw_rows(bytes(row))).tobytes() == bytes(row)
    row[bit // 8] ^= 1 << bit % 8
    assert checked_rows(raw_rows(bytes(row))).tobytes() == HOLE_ROW
