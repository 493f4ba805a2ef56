"""Rows at the commit: columnar blocks, files, and the handling of torn ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.server.ledger.rows import (
    Block,
    Ledger,
    block_of,
    block_of_frame,
    encode_block,
    read_blocks,
    rows_folder,
)
from support.wheels.books import ACCEPTED_AT_MS, WHEEL, Bench
from support.wheels.messages import BASE_SLOT, columns_of, message


def as_rows(block: Block) -> list[tuple[bytes, int, str, int]]:
    return [
        (id_.tobytes(), due_ms, block.topics[topic], seq)
        for id_, due_ms, topic, seq in zip(
            block.ids,
            block.due_ms.tolist(),
            block.topic_numbers.tolist(),
            block.seqs().tolist(),
            strict=True,
        )
    ]


def test_a_group_of_many_frames_is_one_block(bench: Bench, tmp_path: Path) -> None:
    messages = [message(number, slot=BASE_SLOT + number % 5) for number in range(50)]
    columns = columns_of(messages)
    places = bench.wheel.append(columns, accepted_at_ms=ACCEPTED_AT_MS)
    path = tmp_path / "one.rows"
    path.write_bytes(encode_block(block_of(columns, places, ACCEPTED_AT_MS)))
    (block,) = read_blocks(bench.disk, path)
    assert (block.first_seq, block.last_seq, len(block)) == (1, 5, 50)
    assert block.accepted_at_ms == ACCEPTED_AT_MS
    assert sorted(as_rows(block)) == sorted(
        (each.id, each.due_ms, "topic", number % 5 + 1) for number, each in enumerate(messages)
    )


def test_cancels_are_a_block_without_rows(bench: Bench, tmp_path: Path) -> None:
    columns = columns_of([message(number, slot=BASE_SLOT + number) for number in range(3)])
    places = bench.wheel.append(columns, kind=Kind.CANCELS, accepted_at_ms=ACCEPTED_AT_MS)
    path = tmp_path / "one.rows"
    path.write_bytes(encode_block(block_of(None, places, ACCEPTED_AT_MS)))
    (block,) = read_blocks(bench.disk, path)
    assert (block.first_seq, block.last_seq, len(block)) == (1, 3, 0)


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    first=st.integers(0, 8),
    length=st.integers(0, 8),
)
def test_a_part_of_a_block_has_the_rows_of_its_frames(
    counts: list[int], first: int, length: int
) -> None:
    rows = sum(counts)
    block = Block(
        first_seq=3,
        accepted_at_ms=1,
        topics=["a"],
        counts=np.array(counts, "<u4"),
        due_ms=np.arange(rows),
        ids=np.zeros((rows, 16), "u1"),
        topic_numbers=np.zeros(rows, "<u4"),
    )
    begin = min(max(first, 3), block.last_seq)
    part = block.between(min(first, begin), begin + length)
    seqs = block.seqs()
    wanted = (seqs >= begin) & (seqs <= begin + length)
    assert part.due_ms.tolist() == block.due_ms[wanted].tolist()
    assert part.seqs().tolist() == seqs[wanted].tolist()
    assert (part.first_seq, part.last_seq) == (begin, min(begin + length, block.last_seq))


@pytest.mark.parametrize("cut", [1, 40, 60])
def test_a_torn_block_ends_its_file(bench: Bench, cut: int) -> None:
    bench.write(message(1))
    bench.write(message(2))
    (path,) = rows_folder(bench.data, WHEEL).iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    (block,) = read_blocks(bench.disk, path)
    assert block.last_seq == 1


@pytest.mark.parametrize("at", [0, 9, 33, 41, -1])
def test_a_block_that_is_not_what_was_written_is_not_believed(bench: Bench, at: int) -> None:
    bench.write(message(1))
    (path,) = rows_folder(bench.data, WHEEL).iterdir()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert list(read_blocks(PosixDisk(), path)) == []


def test_a_file_of_rows_does_not_grow_without_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.ledger = Ledger(bench.disk, bench.data, max_file_bytes=100)
    for number in range(4):
        bench.write(message(number))
    assert bench.local_files() == ["1.rows", "3.rows"]


def test_a_medium_that_refuses_rows_is_noted_and_costs_no_rows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        columns = columns_of([message(1)])
        places = bench.wheel.append(columns, accepted_at_ms=ACCEPTED_AT_MS)
        broken.setattr(PosixDisk, "open", _fail)
        bench.ledger.enter(WHEEL, columns, places, ACCEPTED_AT_MS)
    assert bench.ledger.failure
    bench.write(message(2))
    assert not bench.ledger.failure
    bench.books.work()
    assert [row[0] for row in bench.rows()] == [message(1).id, message(2).id]


def _fail(*_: object, **__: object) -> None:
    raise OSError("refused")


def test_of_a_frame_that_is_read_again_only_its_rows_stay_in_memory(bench: Bench) -> None:
    """A hundred thousand rows are gathered, and each may have come with a megabyte beside it."""
    bench.write(message(1))
    reader = WheelReader(bench.disk, bench.data, WHEEL)
    frame = reader.frame(1)
    reader.close()
    assert isinstance(frame, Frame)
    block = block_of_frame(1, frame.accepted_at_ms, frame.columns)
    assert [column.base for column in (block.due_ms, block.ids, block.topic_numbers)] == [None] * 3
    assert as_rows(block) == [(message(1).id, message(1).due_ms, "topic", 1)]
