"""A table bounded by bytes, and the memo of frames' topics that is one."""

from dataclasses import replace

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.frames import format as wheel_format
from delaywheel.storage.frames.bounded import BoundedTable
from delaywheel.storage.frames.encode import FRAME_TOPICS, encode_group
from delaywheel.storage.frames.format import decode_frame
from delaywheel.storage.frames.kinds import Kind
from support.wheels.messages import columns_of, message


def test_the_oldest_entries_are_forgotten() -> None:
    table = BoundedTable[str, int](100)
    for number in range(10):
        table.put(str(number), number, 30)
    assert table.copy() == {"7": 7, "8": 8, "9": 9}
    table.put("7", 70, 30)
    table.put("new", 0, 30)
    assert table.copy() == {"9": 9, "7": 70, "new": 0}
    assert (table.get("8"), table.pop("9"), table.length_bytes) == (None, 9, 60)


def test_what_is_larger_than_the_bound_is_not_kept() -> None:
    table = BoundedTable[str, int](100)
    table.put("a", 1, 90)
    table.put("a", 2, 101)
    assert (table.copy(), table.length_bytes) == ({}, 0)


def test_the_memo_of_topics_is_bounded_by_bytes() -> None:
    """Half a gigabyte was kept of frames whose callers chose many long topic names."""
    wheel = WheelId("a", 1)
    memo = wheel_format._dictionaries
    most = 0
    for number in range(300):
        names = [f"{number}-{topic}-".ljust(249, "x") for topic in range(FRAME_TOPICS)]
        rows = columns_of([replace(message(row), topic=name) for row, name in enumerate(names)])
        group = encode_group(
            rows,
            kind=Kind.MESSAGES,
            wheel=wheel,
            first_seq=1,
            accepted_at_ms=1,
            max_frame_messages=100,
            max_frame_bytes=1 << 20,
        )
        decoded = decode_frame(bytes(group.content), wheel=wheel, slot=int(group.slots[0]), seq=1)
        assert np.array_equal(np.sort(decoded.columns.topics), np.sort(names))
        most = max(most, memo.length_bytes)
    assert 1 << 20 < most <= 8 << 20
