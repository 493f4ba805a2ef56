"""What is pending, counted for who asks again: what is near each time, the rest once in a while."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.writing.dial import Dial, DialView
from delaywheel_replica.server.cluster import pending
from delaywheel_replica.server.cluster.pending import PendingCount
from support.wheels.messages import columns_of, message
from support.wheels.wheels import ACCEPTED_AT_MS, new_wheel

NOW_SLOT = 1_000_000


class Counted:
    """Messages on a disk, and how many are counted; the clock is the test's."""

    def __init__(self, data: Path) -> None:
        disk, self._number = PosixDisk(), count()
        self._wheel = new_wheel(disk, data, dial=Dial(disk, data, 10_000))
        self._pending = PendingCount(DialView(disk, data))

    def add(self, *ahead_s: int) -> None:
        messages = [message(next(self._number), slot=NOW_SLOT + ahead) for ahead in ahead_s]
        self._wheel.append(columns_of(messages), accepted_at_ms=ACCEPTED_AT_MS)

    def read(self, done_slot: int = NOW_SLOT, now_slot: int = NOW_SLOT) -> int:
        return self._pending.read(now_slot, done_slot)[0]


def test_what_is_near_is_counted_each_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu_s = count()
    took = SimpleNamespace(thread_time=lambda: next(cpu_s) / 25)
    monkeypatch.setattr(pending, "time", took)
    counted, again = Counted(tmp_path), 300 // 25
    counted.add(5, 9_000)
    assert counted.read() == 2
    counted.add(6, 9_001, 3_599, 3_600)
    assert counted.read() == 4, "of an hour and less"
    assert counted.read(NOW_SLOT + 6, NOW_SLOT + again - 1) == 3
    seen = counted.read(NOW_SLOT + 6, NOW_SLOT + again)
    assert seen == 5, "and of what is beyond, after 300 times what it took"
    counted.add(9_002)
    assert counted.read(NOW_SLOT + 6, NOW_SLOT + again) == 5
    assert counted.read(NOW_SLOT + 6, NOW_SLOT) == 6, "a clock that was set back counts anew"
    assert counted.read(NOW_SLOT + 9_001) == 2, "where all that is near is done"


def test_it_counts_as_the_dial_does(tmp_path: Path) -> None:
    counted = Counted(tmp_path)
    counted.add(*np.random.default_rng(3).integers(-10, 9_900, 200).tolist())
    rows = DialView(PosixDisk(), tmp_path).pending(NOW_SLOT, NOW_SLOT - 4)
    expected = sum(row.messages for row in rows), sum(row.length_bytes for row in rows)
    assert counted._pending.read(NOW_SLOT, NOW_SLOT - 4) == expected
