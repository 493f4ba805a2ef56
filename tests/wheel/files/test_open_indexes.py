"""Few index files are opened, and few stay open, however many wheels and segments there are."""

import errno
from pathlib import Path

import numpy as np
import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.files import index as index_module
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.index import IndexReader, IndexWriter, OpenIndexes
from delaywheel.storage.files.wheel_folder import WheelMeta, make_wheel
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.frames.rows import index_rows
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.writing.wheel import OriginWheel
from sim.machine.disk import SimulatedDisk, SimulatedFile
from support.process.descriptors import open_files
from support.wheels.copies import bundled, copies_of, open_copy
from support.wheels.messages import message
from support.wheels.wheels import append

WHEELS = [WheelId("n", number) for number in range(1, 13)]
LIMIT = 3
FOLDER = Path("/data/wheels/a.1")


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
        mirrors.append(open_copy(disk, here, wheel, handles))
    for seq in (1, 2):
        for wheel, mirror in zip(WHEELS, mirrors, strict=True):
            assert (
                mirror.append(bundled(copies_of(disk, tmp_path / "there", wheel)[seq - 1 : seq]))
                is None
            )
            held, damaged = mirror.reader.bundle(1, seq, floor=0)
            assert held.seqs.tolist() == [*range(1, seq + 1)]
            assert damaged is None
            assert open_files(here) <= LIMIT + 2  # a slot file, and its folder
    for wheel, mirror in zip(WHEELS, mirrors, strict=True):
        mirror.close()
        assert copies_of(disk, here, wheel) == copies_of(disk, tmp_path / "there", wheel)


def test_a_reader_that_is_segments_behind_opens_the_last_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a slow disk each one on the way kept a group of callers waiting."""
    monkeypatch.setattr(index_module, "ROWS_PER_SEGMENT", 4)
    disk, ones, opened = SimulatedDisk(), np.ones(4, np.int64), list[str]()
    rows = index_rows(10 * ones, 0 * ones, 8 * ones, ones, kind=Kind.MESSAGES)
    writer, reader = IndexWriter(disk, FOLDER), IndexReader(disk, FOLDER)
    writer.append(rows)
    assert reader.last_seq() == 4
    for _ in range(9):
        writer.append(rows)
    real = disk.open_read

    def open_read(path: Path) -> SimulatedFile:
        opened.append(path.name)
        return real(path)

    monkeypatch.setattr(disk, "open_read", open_read)
    assert (reader.last_seq(), opened) == (40, ["index.9"])
    assert (reader.last_seq(), opened) == (40, ["index.9"])


def test_a_full_segment_is_known_to_be_the_last_though_the_folder_cannot_be_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_module, "ROWS_PER_SEGMENT", 4)
    disk, ones = SimulatedDisk(), np.ones(4, np.int64)
    rows = index_rows(10 * ones, 0 * ones, 8 * ones, ones, kind=Kind.MESSAGES)
    writer, reader = IndexWriter(disk, FOLDER), IndexReader(disk, FOLDER)
    writer.append(rows)
    assert reader.last_seq() == 4

    def list_folder(_: Path) -> list[str]:
        raise OSError(errno.EIO, "unreadable")

    monkeypatch.setattr(disk, "list_folder", list_folder)
    assert reader.last_seq() == 4
    for _ in range(2):
        writer.append(rows)
    assert reader.last_seq() == 12
