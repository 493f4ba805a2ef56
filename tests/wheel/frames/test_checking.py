"""Few frames are checked one by one, many at once; both give the same result for any bytes."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.checking import Good, good_at_once, good_frames, good_one_by_one
from delaywheel.storage.frames.encode import encode_group
from delaywheel.storage.frames.format import CHECKED_FROM, HEADER
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import (
    FEW_FRAMES,
    HOLE_ROW,
    MOST_ROWS,
    decode_row,
    flawed_rows,
    index_rows,
    kinds_of,
    raw_rows,
    row_counts,
)
from support.wheels.messages import BASE_SLOT, Message, any_message, columns_of

WHEEL = WheelId("a", 1)
ACCEPTED_AT_MS = BASE_SLOT * 1000


def bundle_of(given: list[Message], kind: Kind = Kind.MESSAGES) -> FrameBundle:
    group = encode_group(
        columns_of(given),
        kind=kind,
        wheel=WHEEL,
        first_seq=7,
        accepted_at_ms=ACCEPTED_AT_MS,
        max_frame_messages=100,
        max_frame_bytes=1 << 20,
    )
    offsets = np.arange(len(group)) * 8
    lengths = np.diff(group.edges)
    rows = index_rows(group.slots, offsets, lengths, group.counts, kind=kind)
    return FrameBundle.of(np.arange(7, 7 + len(group)), rows, group.content)


@given(st.lists(any_message(6), min_size=1, max_size=20), st.sampled_from(Kind))
def test_what_was_written_is_good(written: list[Message], kind: Kind) -> None:
    bundle = bundle_of(written, kind)
    assert good_one_by_one(WHEEL, bundle) == Good(len(bundle), ACCEPTED_AT_MS)
    assert good_at_once(WHEEL, bundle) == Good(len(bundle), ACCEPTED_AT_MS)


FIELDS = {name: int(dtype.itemsize) for name, (dtype, *_) in (HEADER.fields or {}).items()}
THREE = [
    Message(BASE_SLOT * 1000, bytes(16), "topic", value=b"value", timestamp_ms=5),
    Message((BASE_SLOT + 1) * 1000, bytes(16), "topic", key=b"key"),
    Message((BASE_SLOT + 2) * 1000, bytes(16), "topic", partition=7),
]


NAMES_HAVE_NO_FLAGS = {("flags", kind) for kind in Kind if kind is not Kind.MESSAGES}


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("field", FIELDS)
def test_both_say_the_same_of_each_field(field: str, kind: Kind) -> None:
    """Values that a field never has, and some that it may have, with a correct checksum."""
    bundle, seen = bundle_of(THREE, kind), set()
    for frame in range(3):
        content = bytearray(bundle.content)
        header = np.frombuffer(content, HEADER, 1, int(bundle.edges[frame]))[0]
        was = int(header[field])
        for other in (0, 1, 2, 3, 4, was ^ 1, was + 8, was - 8, was + 4, 1 << 31, BASE_SLOT):
            header[field] = other % (1 << 8 * FIELDS[field] - 1)
            if field != "checksum":
                _put_right_checksums(content, bundle.edges.tolist())
            changed = FrameBundle.of(bundle.seqs, bundle.rows, content)
            said = good_at_once(WHEEL, changed)
            assert good_one_by_one(WHEEL, changed) == said
            seen.add(said.frames)
    is_free = field in {"accepted_at_ms", "topics"} or (field, kind) in NAMES_HAVE_NO_FLAGS
    assert (seen == {3}) == is_free, "which only a reader looks at"


@pytest.mark.parametrize("kind", Kind)
def test_both_say_the_same_of_rows(kind: Kind) -> None:
    """Frames of other places, or of other messages, that are consistent all the same."""
    bundle, seen = bundle_of(THREE[:1], kind), set()
    slot, offset, length, _ = bundle.rows[0].item()
    for other_slot in (slot, slot + 1):
        for other_offset in (offset, 4, (1 << 32) - length, (1 << 32) - length + 8, (1 << 32) - 8):
            for count in (0, 1, 2):
                for other_kind in Kind:
                    row = (other_slot, other_offset, length, count)
                    rows = index_rows(*(np.array([n]) for n in row), kind=other_kind)
                    changed = FrameBundle.of(bundle.seqs, rows, bundle.content)
                    said = good_at_once(WHEEL, changed)
                    assert good_one_by_one(WHEEL, changed) == said
                    seen.add((row, other_kind, said.frames))
    good = [row for *row, frames in seen if frames]
    assert len(good) == 2, "the frame may lie elsewhere"


@given(st.data())
def test_both_say_the_same_of_any_changed_bytes(data: st.DataObject) -> None:
    """Also if frames have no bytes, or belong to another wheel."""
    given_ = data.draw(st.lists(any_message(6), min_size=1, max_size=6))
    bundle = bundle_of(given_, data.draw(st.sampled_from(Kind)))
    rows, content = bytearray(bundle.rows.tobytes()), bytearray(bundle.content)
    for raw in (rows, content):
        for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=1)):
            if raw is content or not 8 <= at % 16 < 12:  # with other lengths there is no bundle
                raw[at] ^= data.draw(st.integers(0, 255))
    changed = FrameBundle.of(bundle.seqs, raw_rows(bytes(rows)), content)
    if data.draw(st.booleans()):
        bare = np.array([data.draw(st.booleans()) for _ in range(len(changed))])
        changed = changed.without_content(bare)
    wheel = data.draw(st.sampled_from([WHEEL, WHEEL, WheelId("b", 1)]))
    assert good_one_by_one(wheel, changed) == good_at_once(wheel, changed)


def _put_right_checksums(content: bytearray, edges: list[int]) -> None:
    for begin, end in pairwise(edges):
        checksum = crc32c(memoryview(content)[begin + CHECKED_FROM : end])
        np.frombuffer(content, HEADER, 1, begin)["checksum"] = checksum


@given(st.binary(min_size=16, max_size=16) | st.sampled_from([bytes(16), HOLE_ROW]))
def test_any_row_by_itself_is_what_it_is_among_many(raw: bytes) -> None:
    rows = raw_rows(raw)
    row = decode_row(raw)
    for count in (1, FEW_FRAMES, FEW_FRAMES + 1):
        assert flawed_rows(rows.repeat(count)).tolist() == [row is None] * count
    if row is not None:
        assert (row.slot, row.offset, row.length_bytes) == rows[0].item()[:3]


@pytest.mark.parametrize("kind", Kind)
def test_a_row_by_itself_is_what_it_is_among_many(kind: Kind) -> None:
    for numbers in product((0, 1), (0, 8, (1 << 32) - 1), (0, 64), (0, 1, MOST_ROWS[kind])):
        raw = index_rows(*(np.array([n]) for n in numbers), kind=kind).tobytes()
        row, many = decode_row(raw), raw_rows(raw).repeat(FEW_FRAMES + 1)
        assert flawed_rows(many).tolist() == [row is None] * len(many)
        if row is not None and row.length_bytes:
            assert (row.kind, row.rows) == (kind, numbers[3])
            assert kinds_of(raw_rows(raw)).tolist() == [kind]
            assert row_counts(raw_rows(raw)).tolist() == [numbers[3]]


@pytest.mark.parametrize("frames", [1, FEW_FRAMES, FEW_FRAMES + 1])
@pytest.mark.parametrize("flipped", range(0, 300, 7))
def test_a_flipped_byte_ends_the_list(frames: int, flipped: int) -> None:
    given_ = [Message((BASE_SLOT + n) * 1000, bytes(16), "topic") for n in range(frames)]
    bundle = bundle_of(given_)
    content = bytearray(bundle.content)
    at = flipped % len(content)
    content[at] ^= 1
    damaged = FrameBundle.of(bundle.seqs, bundle.rows, content)
    frame = int(bundle.edges.searchsorted(at, side="right")) - 1
    assert good_frames(WHEEL, damaged).frames == frame


def test_a_seq_that_is_not_the_frames_own() -> None:
    bundle = bundle_of([Message(BASE_SLOT * 1000, bytes(16), "topic")])
    another = FrameBundle.of(bundle.seqs + 1, bundle.rows, bundle.content)
    assert good_one_by_one(WHEEL, another) == good_at_once(WHEEL, another) == Good(0, 0)
