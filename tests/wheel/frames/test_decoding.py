"""Frames decoded together equal those decoded one by one."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel.identity import WheelId
from delaywheel.seqset import SeqSet
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.encode import encode_group
from delaywheel.storage.frames.format import (
    CHECKED_FROM,
    Frame,
    FrameDamaged,
    decode_frame,
    index_row_of,
)
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import Places, index_rows, kinds_of
from delaywheel.storage.reading.decoding import FrameBatch, PassedOver, decode_ids, decode_together
from delaywheel.storage.reading.reader import DamagedFrame, read_batches, read_frames
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
GAP_BYTES = 24
ROW_FIELDS = ("slot", "offset", "length", "messages")


def slot_file(
    groups: list[tuple[Kind, list[Message]]], *, gap_bytes: int = 0
) -> tuple[bytes, Places]:
    """The frames of one slot, one group after another, and where they lie."""
    content, seqs, rows = b"", [np.empty(0, np.int64)], []
    for kind, messages in groups:
        first_seq = 1 + 3 * sum(map(len, seqs))
        group = encode_group(
            columns_of(messages) if kind is Kind.MESSAGES else names_of(columns_of(messages)),
            kind=kind,
            wheel=WHEEL,
            first_seq=first_seq,
            accepted_at_ms=1_000_000 + first_seq,
            max_frame_messages=3,
            max_frame_bytes=1 << 20,
        )
        lengths = group.edges[1:] - group.edges[:-1]
        offsets = len(content) + group.edges[:-1]
        rows.append(index_rows(group.slots, offsets, lengths, group.counts, kind=kind))
        seqs.append(first_seq + np.arange(len(group)))
        content += bytes(group.content) + bytes(gap_bytes)
    return content, (np.concatenate(seqs), np.concatenate(rows))


def groups() -> st.SearchStrategy[list[tuple[Kind, list[Message]]]]:
    group = st.tuples(st.sampled_from(Kind), any_messages(slots=1, max_size=8))
    return st.lists(group, min_size=1, max_size=6)


def one_by_one(content: bytes, places: Places, kind: Kind) -> list[Frame]:
    seqs, rows = places
    frames = [
        decode_frame(content[row["offset"] :], wheel=WHEEL, slot=BASE_SLOT, seq=seq)
        for seq, row in zip(seqs.tolist(), rows, strict=True)
    ]
    return [frame for frame in frames if frame.kind is kind]


def of_kind(places: Places, kind: Kind) -> Places:
    seqs, rows = places
    chosen = kinds_of(rows) == kind
    return seqs[chosen], rows[chosen]


def reported(columns: Columns, kind: Kind) -> list[object]:
    if kind is not Kind.MESSAGES:
        ids = [bytes(each) for each in columns.ids]
        return [*zip(columns.due_ms.tolist(), ids, strict=True)]
    return [*messages_of(columns)]


@settings(deadline=None)
@given(groups(), st.sampled_from(Kind), st.sampled_from([0, GAP_BYTES]))
def test_together_they_are_what_they_are_one_by_one(
    groups: list[tuple[Kind, list[Message]]], kind: Kind, gap_bytes: int
) -> None:
    content, places = slot_file(groups, gap_bytes=gap_bytes)
    expected = one_by_one(content, places, kind)
    if not expected:
        return
    chosen = of_kind(places, kind)
    batch = decode_together(content, 0, chosen, wheel=WHEEL, slot=BASE_SLOT, kind=kind)
    assert not isinstance(batch, PassedOver)
    assert batch is not None
    assert batch.seqs.tolist() == [frame.seq for frame in expected]
    assert batch.accepted_at_ms.tolist() == [frame.accepted_at_ms for frame in expected]
    assert batch.lengths_bytes.tolist() == [frame.length_bytes for frame in expected]
    assert batch.counts.tolist() == [len(frame.columns) for frame in expected]
    every = [each for frame in expected for each in reported(frame.columns, kind)]
    assert reported(batch.columns, kind) == every
    alone = FrameBatch.of(expected[0])
    assert reported(alone.columns, kind) == every[: len(expected[0].columns)]
    marks = np.arange(len(batch)) % 2 == 0
    some = batch.take(marks)
    assert some.seqs.tolist() == batch.seqs[marks].tolist()
    assert reported(some.columns, kind) == [
        each for frame in expected[::2] for each in reported(frame.columns, kind)
    ]


@settings(deadline=None)
@given(groups(), groups(), st.randoms())
def test_ids_alone_are_those_of_the_frames(
    first: list[tuple[Kind, list[Message]]],
    second: list[tuple[Kind, list[Message]]],
    random: Random,
) -> None:
    """Of all kinds, and in any order of frames."""
    content, (seqs, rows) = slot_file([*first, *second])
    order = list(range(len(seqs)))
    random.shuffle(order)
    begins = rows["offset"].astype(np.int64)
    ids = decode_ids(content, begins[order], (seqs[order], rows[order]), WHEEL)
    assert ids is not None
    found = zip(
        ids.seqs.tolist(),
        ids.rows.tolist(),
        ids.kinds.tolist(),
        map(bytes, ids.ids),
        ids.due_ms.tolist(),
        (ids.topics[number] for number in ids.topic_numbers),
        strict=True,
    )
    assert sorted(found) == sorted(
        (frame.seq, row, kind, bytes(id_), due_ms, frame.columns.topic(row))
        for kind in Kind
        for frame in one_by_one(content, (seqs, rows), kind)
        for row, (id_, due_ms) in enumerate(
            zip(frame.columns.ids, frame.columns.due_ms.tolist(), strict=True)
        )
    )


@settings(deadline=None)
@given(groups(), st.data())
def test_any_flipped_bit_is_noticed(
    groups: list[tuple[Kind, list[Message]]], data: st.DataObject
) -> None:
    content, places = slot_file(groups)
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    found = []
    for kind in Kind:
        chosen = of_kind(places, kind)
        if len(chosen[0]):
            found.append(
                decode_together(bytes(damaged), 0, chosen, wheel=WHEEL, slot=BASE_SLOT, kind=kind)
            )
    assert any(batch is None for batch in found)
    begins = places[1]["offset"].astype(np.int64)
    assert decode_ids(bytes(damaged), begins, places, WHEEL) is None


@settings(deadline=None)
@given(groups(), st.data())
def test_rows_and_places_that_are_not_the_frames_own_are_noticed(
    groups: list[tuple[Kind, list[Message]]], data: st.DataObject
) -> None:
    """Also faults that only the row could show: its place, its count, its check value."""
    content, places = slot_file(groups)
    seqs, rows = of_kind(places, Kind.MESSAGES)
    if not len(seqs):
        return
    number = data.draw(st.integers(0, len(seqs) - 1))
    wheel, slot = WHEEL, BASE_SLOT
    match data.draw(st.sampled_from(["seq", "slot", "wheel", "end", *ROW_FIELDS])):
        case "seq":
            seqs[number] += 1
        case "slot":
            slot += 1
        case "wheel":
            wheel = WheelId("node-1", 8)
        case "end":
            content = content[: int((rows["offset"] + rows["length"]).max()) - 1]
        case str(name):
            rows[name][number] ^= 1 << data.draw(st.integers(0, 31))
    batch = decode_together(content, 0, (seqs, rows), wheel=wheel, slot=slot, kind=Kind.MESSAGES)
    assert not isinstance(batch, PassedOver)
    assert batch is None


@pytest.mark.parametrize("damaged", [None, 0, 3, 7])
def test_reading_them_together_names_what_reading_one_by_one_names(
    tmp_path: Path, damaged: int | None
) -> None:
    messages = [message(number) for number in range(24)]
    parts = [messages[first : first + 3] for first in range(0, 24, 3)]
    kinds = [Kind.CANCELS if number == 5 else Kind.MESSAGES for number in range(8)]
    content, places = slot_file(list(zip(kinds, parts, strict=True)), gap_bytes=GAP_BYTES)
    if damaged is not None:
        at = int(places[1]["offset"][damaged]) + 80
        content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    path = layout.slot_path(tmp_path, BASE_SLOT)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    arguments = PosixDisk(), tmp_path, WHEEL, BASE_SLOT
    one_by_one = list(read_frames(*arguments, places))
    together = list(read_batches(*arguments, places))
    broken = [frame for frame in one_by_one if isinstance(frame, DamagedFrame)]
    assert [each for each in together if isinstance(each, DamagedFrame)] == broken
    assert len(broken) == (damaged is not None)
    for kind in Kind:
        assert [
            (seq, kind)
            for batch in together
            if isinstance(batch, FrameBatch) and batch.kind is kind
            for seq in batch.seqs.tolist()
        ] == [
            (frame.seq, kind)
            for frame in one_by_one
            if isinstance(frame, Frame) and frame.kind is kind
        ]


def test_a_file_that_is_gone_damages_each_of_its_frames(tmp_path: Path) -> None:
    _, places = slot_file([(Kind.MESSAGES, [message(1), message(2)])] * 2)
    found = list(read_batches(PosixDisk(), tmp_path, WHEEL, BASE_SLOT, places))
    assert SeqSet.of(each.seq for each in found if isinstance(each, DamagedFrame)) == SeqSet.of(
        places[0].tolist()
    )


@settings(deadline=None)
@given(groups(), st.sampled_from(Kind), st.data())
def test_what_a_wrong_writer_made_is_judged_alike(
    groups: list[tuple[Kind, list[Message]]], kind: Kind, data: st.DataObject
) -> None:
    """Inconsistent numbers and lengths within a frame, under a correct checksum."""
    content, places = slot_file(groups)
    seqs, rows = of_kind(places, kind)
    if not len(seqs):
        return
    number = data.draw(st.integers(0, len(seqs) - 1))
    begin, length = int(rows["offset"][number]), int(rows["length"][number])
    changed = bytearray(content)
    at = begin + data.draw(st.integers(CHECKED_FROM, length - 1))
    changed[at] = data.draw(st.integers(0, 255))
    checksum = crc32c(changed[begin + CHECKED_FROM : begin + length])
    changed[begin + 4 : begin + 8] = checksum.to_bytes(4, "little")
    batch = decode_together(bytes(changed), 0, (seqs, rows), wheel=WHEEL, slot=BASE_SLOT, kind=kind)
    assert not isinstance(batch, PassedOver)
    try:
        frames = one_by_one(bytes(changed), (seqs, rows), kind)
    except FrameDamaged:
        assert batch is None
        return
    offsets = rows["offset"].tolist()
    written = [index_row_of(frame, offset) for frame, offset in zip(frames, offsets, strict=False)]
    if b"".join(written) != rows.tobytes():
        assert batch is None
        return
    assert batch is not None
    assert raw(batch.columns) == [each for frame in frames for each in raw(frame.columns)]


def test_cancels_whose_lengths_do_not_add_up_are_damaged_read_alone_too() -> None:
    content, places = slot_file([(Kind.CANCELS, [message(number) for number in range(8)])])
    changed = bytearray(content)
    blob_length_at = 56
    changed[blob_length_at] ^= 8
    length = int(places[1]["length"][0])
    changed[4:8] = crc32c(changed[CHECKED_FROM:length]).to_bytes(4, "little")
    kind = Kind.CANCELS
    places_of = bytes(changed), 0, places
    assert decode_together(*places_of, wheel=WHEEL, slot=BASE_SLOT, kind=kind) is None
    with pytest.raises(FrameDamaged, match="do not add up"):
        one_by_one(bytes(changed), places, kind)


def raw(columns: Columns) -> list[object]:
    """Everything of each message, headers undecoded: these may be anything."""
    blob = memoryview(columns.blob)
    ends = columns.starts + columns.lengths_bytes
    numbers = columns.topic_numbers.tolist()
    return [
        *zip(
            columns.due_ms.tolist(),
            [bytes(each) for each in columns.ids],
            [columns.topics[number] if columns.topics else None for number in numbers],
            columns.key_lengths.tolist(),
            columns.value_lengths.tolist(),
            columns.headers_lengths.tolist(),
            columns.partitions.tolist(),
            columns.timestamps_ms.tolist(),
            [bytes(blob[a:b]) for a, b in zip(columns.starts.tolist(), ends.tolist(), strict=True)],
            strict=True,
        )
    ]
