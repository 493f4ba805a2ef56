"""Any number of wheels, with few open index files."""

from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.index import OpenIndexes
from delaywheel.storage.files.wheel_folder import WheelMeta, make_wheel
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel.storage.writing.wheel import OriginWheel
from support.process.descriptors import open_files
from support.wheels.copies import bundled, copies_of
from support.wheels.messages import message
from support.wheels.wheels import append

WHEELS = [WheelId("n", number) for number in range(1, 13)]
LIMIT = 3


def write_wheels(disk: PosixDisk, data: Path, rounds: int = 1) -> None:
    handles = HandleCache(disk, 1)
    for wheel in WHEELS:
        origin = OriginWheel.create(disk, data, WheelMeta(wheel, {"n": "s"}, 1, 7200), handles)
        for number in range(rounds):
            append(origin, [message(number)])
        origin.close()


def test_readers_of_many_wheels_keep_few_files_open(tmp_path: Path) -> None:
    disk = PosixDisk()
    write_wheels(disk, tmp_path)
    opened = OpenIndexes(LIMIT)
    readers = [WheelReader(disk, tmp_path, wheel, opened=opened) for wheel in WHEELS]
    for _ in range(3):
        for reader in readers:
            assert reader.last_seq() == 1
            assert len(reader.rows(1, 1)) == 1
            assert 1 <= open_files(tmp_path) <= LIMIT
    for reader in readers:
        reader.close()
    assert open_files(tmp_path) == 0


def test_those_in_use_stay_open(tmp_path: Path) -> None:
    disk = PosixDisk()
    write_wheels(disk, tmp_path)
    opened = OpenIndexes(LIMIT)
    readers = [WheelReader(disk, tmp_path, wheel, opened=opened) for wheel in WHEELS]
    readers[0].last_seq()
    file = readers[0]._index._file
    assert file is not None
    for reader in readers[1:]:
        reader.last_seq()
        assert readers[0].last_seq() == 1
        assert readers[0]._index._file is file


def test_copies_of_many_wheels_keep_few_files_open(tmp_path: Path) -> None:
    disk, here = PosixDisk(), tmp_path / "here"
    write_wheels(disk, tmp_path / "there", rounds=2)
    handles = HandleCache(disk, 1)
    handles.indexes = OpenIndexes(LIMIT)
    mirrors = []
    for wheel in WHEELS:
        make_wheel(disk, here, WheelMeta(wheel, {"n": "s"}, 1, 7200))
        mirrors.append(MirrorWheel.open(disk, here, wheel, handles))
    for seq in (1, 2):
        for wheel, mirror in zip(WHEELS, mirrors, strict=True):
            assert (
                mirror.append(bundled(copies_of(disk, tmp_path / "there", wheel)[seq - 1 : seq]))
                is None
            )
            assert [copy.seq for copy in mirror.copies(1, seq, floor=0)] == [*range(1, seq + 1)]
            assert open_files(here) <= LIMIT + 2  # a slot file, and its folder
    for wheel, mirror in zip(WHEELS, mirrors, strict=True):
        mirror.close()
        assert copies_of(disk, here, wheel) == copies_of(disk, tmp_path / "there", wheel)
