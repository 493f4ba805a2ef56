"""Folders written by every released format version must be read for ever.

How a new one is made, and when, is described in docs/FORMAT.md.
"""

import shutil
from pathlib import Path

import pytest

from delaywheel.seqset import NO_SEQS
from delaywheel.storage.files.wheel_folder import list_wheels, load_meta
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.format import VERSION, Frame, Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.recovery.recover import Recovered
from delaywheel.storage.recovery.verify import verify_folder
from support.wheels.copies import recover_wheel
from support.wheels.golden import (
    ACCEPTED_AT_MS,
    CANCELLED,
    FRAMES,
    META,
    SLOT,
    WHEEL,
    write_golden,
)
from support.wheels.messages import messages_of

GOLDEN = Path(__file__).parents[2] / "golden"
FOLDERS = sorted(GOLDEN.glob("format-*"))


def test_there_is_a_folder_for_every_version() -> None:
    assert [folder.name for folder in FOLDERS] == [
        f"format-{version}" for version in range(1, VERSION + 1)
    ]


@pytest.mark.parametrize("golden", FOLDERS, ids=lambda folder: folder.name)
def test_a_golden_folder_is_read(golden: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(golden, tmp_path / golden.name)
    disk = PosixDisk()
    assert list_wheels(disk, folder) == [WHEEL]
    assert load_meta(disk, folder, WHEEL) == META
    reader = WheelReader(disk, folder, WHEEL)
    assert reader.last_seq() == 4
    frames = [reader.frame(seq) for seq in range(1, 5)]
    for seq, frame in enumerate(frames[:3], 1):
        assert isinstance(frame, Frame)
        assert frame.kind is Kind.MESSAGES
        assert messages_of(frame.columns) == FRAMES[seq]
    cancels = frames[3]
    assert isinstance(cancels, Frame)
    assert (cancels.kind, cancels.accepted_at_ms) == (Kind.CANCELS, ACCEPTED_AT_MS + 2)
    assert cancels.columns.due_ms.tolist() == [each.due_ms for each in CANCELLED]
    assert [row.tobytes() for row in cancels.columns.ids] == [each.id for each in CANCELLED]
    assert [frame.seq for frame in reader.slot_frames(SLOT, 9)] == [1, 3, 4]
    assert list(verify_folder(disk, folder)) == []
    assert recover_wheel(disk, folder, WHEEL, os_crashed=False) == Recovered(4, [], NO_SEQS)
    reader.close()


def test_the_bytes_of_this_version_have_not_changed(tmp_path: Path) -> None:
    write_golden(PosixDisk(), tmp_path)
    golden = GOLDEN / f"format-{VERSION}"
    assert _contents(tmp_path) == _contents(golden)


def _contents(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
