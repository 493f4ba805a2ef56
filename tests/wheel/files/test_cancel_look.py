"""A search for cancels returns to a frame that it could not read, in whatever order."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.frames.format import DamageReason
from delaywheel.storage.frames.rows import INDEX_ROW
from delaywheel.storage.reading.cancels import BEGIN_BYTES, Budget, CancelLook
from delaywheel.storage.reading.reader import DamagedFrame
from support.wheels.messages import BASE_SLOT, columns_of, message

A1 = WheelId("a", 1)


class Reader:
    """A wheel with frames 3, 5 and 9. The second of frame 5 is unknown, so it is named last."""

    wheel = A1
    is_damaged = True

    def may_have_holes(self, *_: object) -> bool:
        return False

    def rows(self, *_: object) -> Any:
        return np.zeros(1, INDEX_ROW)

    def slot_frames(self, _slot: int, _up_to: int, *, from_seq: int, **_: object) -> Iterator[Any]:
        for seq in (3, 5, 9):
            if seq >= from_seq and not (self.is_damaged and seq == 5):
                columns = columns_of([message(seq)])
                yield SimpleNamespace(wheel=A1, seq=seq, columns=columns, length_bytes=10)
        if self.is_damaged:
            yield DamagedFrame(5, 0, 0, 1, DamageReason.HOLE, "")


def test_what_follows_a_frame_that_cannot_be_read_is_read_again_once_it_can_be() -> None:
    reader: Any = Reader()
    look = CancelLook(BASE_SLOT, [message(n).id[:BEGIN_BYTES] for n in (3, 5, 9)])

    def go_on() -> bool:
        return look.go_on({A1: reader}, {A1: 10}, Budget(1_000, 1_000))

    assert not go_on()
    assert not go_on()
    assert {row.seq for row in look.rows} == {3, 9}
    reader.is_damaged = False
    assert go_on()
    assert {row.seq for row in look.rows} == {3, 5, 9}
