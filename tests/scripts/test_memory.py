"""The memory measurement: its traffic is all forwarded, and growth is detected."""

import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest

from local.costs.memory import START_S, accept, drive, forward, is_flat, traffic


def test_all_that_is_accepted_is_forwarded(tmp_path: Path) -> None:
    ends = []
    for part in (accept, forward):
        here, there = Pipe()
        threading.Thread(target=part, args=(tmp_path, there), daemon=True).start()
        ends.append(here)
    samples = drive(ends[0], ends[1], 4)
    for end in ends:
        end.send(None)
    assert [second for second, _, _ in samples] == [1, 2, 3, 4]
    assert all(server > 1 << 20 and cleaner > 1 << 20 for _, server, cleaner in samples)


def test_traffic_is_large_and_small_late_and_repeated() -> None:
    columns = traffic(START_S)
    late = columns.due_ms < START_S * 1_000
    assert late.sum() == 3
    assert columns.lengths_bytes.max() > 100 * columns.lengths_bytes.min()
    assert len({row.tobytes() for row in columns.ids}) == len(columns) - 1


@pytest.mark.parametrize(
    ("megabytes", "flat"),
    [
        ([10, 60, 58, 61, 60, 64, 60, 60], True),
        ([10, 60, 60, 60, 66, 60, 60, 60], False),
        ([10, 60, 62, 63, 64, 65, 66, 67], False),
    ],
)
def test_growth_is_seen(megabytes: list[int], *, flat: bool) -> None:
    assert is_flat([each << 20 for each in megabytes]) == flat
