"""What a format version has written must be read for ever.

How a new one is made, and when, is described in docs/FORMAT.md.
"""

import shutil
from pathlib import Path

import pytest

from delaywheel.seqset import NO_SEQS
from delaywheel.storage.files.wheel_folder import list_wheels, load_meta
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.format import NEWEST_READ, Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.recovery.recover import Recovered
from delaywheel.storage.recovery.verify import verify_folder
from support.wheels.copies import recover_wheel
from support.wheels.golden import (
    ACCEPTED_AT_MS,
    FRAMES,
    LAST_SEQ,
    META,
    NAMED,
    SLOT,
    WHEEL,
    write_golden,
)
from support.wheels.messages import messages_of

GOLDEN = Path(__file__).parents[2] / "golden"
FOLDERS = sorted(GOLDEN.glob("format-*"))


def test_there_is_a_folder_of_the_newest_version() -> None:
    assert FOLDERS[-1].name == f"format-{NEWEST_READ}"


@pytest.mark.parametrize("golden", FOLDERS, ids=lambda folder: folder.name)
def test_a_golden_folder_is_read(golden: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(golden, tmp_path / golden.name)
    disk = PosixDisk()
    assert list_wheels(disk, folder) == [WHEEL]
    assert load_meta(disk, folder, WHEEL) == META
    reader = WheelReader(disk, folder, WHEEL)
    assert reader.last_seq() == LAST_SEQ
    frames = [reader.frame(seq) for seq in range(1, LAST_SEQ + 1)]
    for seq, frame in enumerate(frames[:3], 1):
        assert isinstance(frame, Frame)
        assert frame.kind is Kind.MESSAGES
        assert messages_of(frame.columns) == FRAMES[seq]
    for seq, frame in enumerate(frames[3:], 4):
        kind, named = NAMED[seq]
        assert isinstance(frame, Frame)
        assert (frame.kind, frame.accepted_at_ms) == (kind, ACCEPTED_AT_MS + seq - 2)
        assert frame.columns.due_ms.tolist() == [each.due_ms for each in named]
        assert [row.tobytes() for row in frame.columns.ids] == [each.id for each in named]
        topics = [frame.columns.topic(row) for row in range(len(named))]
        assert topics == [each.topic for each in named]
    assert [frame.seq for frame in reader.slot_frames(SLOT, 9)] == [1, 3, 4, 6]
    assert list(verify_folder(disk, folder)) == []
    assert recover_wheel(disk, folder, WHEEL, os_crashed=False) == Recovered(LAST_SEQ, [], NO_SEQS)
    reader.close()


@pytest.mark.parametrize("golden", FOLDERS, ids=lambda folder: folder.name)
def test_the_bytes_of_each_version_have_not_changed(golden: Path, tmp_path: Path) -> None:
    write_golden(PosixDisk(), tmp_path)
    assert _contents(tmp_path) == _contents(golden)


def _contents(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
