"""Which index segments a sweep deletes while their rows are rewritten."""

from pathlib import Path

import numpy as np
import pytest

from delaywheel.storage.files import index as index_module
from delaywheel.storage.files.index import IndexWriter, list_segments
from delaywheel.storage.files.undeletable import Undeletable
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import HOLE_ROW, index_rows, raw_rows
from sim.machine.disk import SimulatedDisk

FOLDER = Path("/data/wheels/a.1")


def test_a_row_rewritten_while_its_segment_is_examined_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_module, "ROWS_PER_SEGMENT", 4)
    disk = SimulatedDisk()
    ones = np.ones(6, np.int64)
    rows = index_rows(10 * ones, 0 * ones, 8 * ones, ones, kind=Kind.MESSAGES).copy()
    good = rows[1:2].tobytes()
    rows[1] = raw_rows(HOLE_ROW)[0]
    writer = IndexWriter(disk, FOLDER)
    writer.append(rows)
    real = writer._top

    def meanwhile(segment: int) -> int | None:
        top = real(segment)
        writer.rewrite(2, good)  # by the thread that makes checkpoints
        return top

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_top", meanwhile)
        assert not list(writer.delete_below(99, print, Undeletable())), "it had a hole"
    assert list(writer.delete_below(99, print, Undeletable())) == [0]


def test_segments_are_deleted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of callers waited for as many deletions as there were finished segments."""
    monkeypatch.setattr(index_module, "ROWS_PER_SEGMENT", 4)
    disk, ones = SimulatedDisk(), np.ones(14, np.int64)
    writer = IndexWriter(disk, FOLDER)
    writer.append(index_rows(10 * ones, 0 * ones, 8 * ones, ones, kind=Kind.MESSAGES))
    noted: list[int] = []
    deleting = writer.delete_below(99, noted.append, Undeletable())
    assert (next(deleting), noted, list_segments(disk, FOLDER)) == (0, [1], [1, 2, 3])
    assert (list(deleting), noted, list_segments(disk, FOLDER)) == ([1, 2], [1, 2, 3], [3])
