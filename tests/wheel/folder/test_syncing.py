"""Many files are synced as one file system; no writer takes another's failure for success."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from delaywheel.storage.files.handles import HandleCache, Placement
from delaywheel.storage.files.slot_files import SlotFiles, Unsynced
from delaywheel.storage.folder import syncing
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.syncing import (
    FEW_FILES,
    FileSystem,
    PosixManyFiles,
    keeps_its_word,
    syncfs,
)
from delaywheel.storage.frames.bundle import FrameBundle
from support.wheels.copies import bundled, copy_of


class Medium:
    """Refuses the next sync on request."""

    def __init__(self, folder: Path) -> None:
        self.syncs = 0
        self.refuses = False
        self.file_system = FileSystem(os.open(folder, os.O_RDONLY), self._sync)

    def _sync(self, _descriptor: int) -> None:
        self.syncs += 1
        refuses, self.refuses = self.refuses, False  # the kernel reports it once
        if refuses:
            raise OSError(errno.EIO, "refused")


@pytest.fixture
def medium(tmp_path: Path) -> Medium:
    return Medium(tmp_path)


@pytest.fixture
def many(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / str(number) for number in range(FEW_FILES + 1)]
    for path in paths:
        path.write_bytes(b"content")
    return paths


def test_a_failure_is_reported_to_each_writer_once(medium: Medium, many: list[Path]) -> None:
    one, other = (PosixManyFiles(medium.file_system) for _ in range(2))
    medium.refuses = True
    for writer in (one, other):
        with pytest.raises(OSError, match=r"refused|earlier sync"):
            writer.sync(many)
    for writer in (one, other):
        writer.sync(many)


def test_a_failure_between_two_syncs_of_a_writer_counts(medium: Medium, many: list[Path]) -> None:
    one, other = (PosixManyFiles(medium.file_system) for _ in range(2))
    one.sync(many)
    medium.refuses = True
    with pytest.raises(OSError, match="refused"):
        other.sync(many)
    with pytest.raises(OSError, match="earlier sync"):
        one.sync(many)


def test_what_failed_before_a_writer_began_is_not_reported_to_it(
    medium: Medium, many: list[Path]
) -> None:
    medium.refuses = True
    with pytest.raises(OSError, match="refused"):
        PosixManyFiles(medium.file_system).sync(many)
    PosixManyFiles(medium.file_system).sync(many)


def test_few_files_are_synced_by_themselves(
    medium: Medium, many: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    PosixManyFiles(medium.file_system).sync(many[1:])
    assert (medium.syncs, len(synced)) == (0, FEW_FILES)
    PosixManyFiles(medium.file_system).sync(many)
    assert (medium.syncs, len(synced)) == (1, FEW_FILES)


@pytest.mark.parametrize("release", ["5.7.19-generic", "4.19.0", "unknown"])
def test_a_kernel_that_keeps_failures_to_itself_is_not_asked(
    release: str, many: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    assert syncfs() is None
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    PosixDisk().many_files(many[0].parent).sync(many)
    assert len(synced) == len(many)


@pytest.mark.parametrize("syncs", [lambda paths: paths, lambda paths: paths[:3]])
def test_deleted_files_are_left_out(
    syncs: Callable[[list[Path]], list[Path]], many: list[Path]
) -> None:
    files = PosixDisk().many_files(many[0].parent)
    many[1].unlink()
    files.sync(syncs(many))


def test_the_kernels_word_is_an_error_of_the_system() -> None:
    call = syncfs()
    if call is None:
        pytest.skip("this kernel has no syncfs that reports failures")
    with pytest.raises(OSError, match="Bad file descriptor"):
        call(-1)


def test_only_a_file_system_that_is_known_is_synced_as_a_whole() -> None:
    assert not keeps_its_word(Path("/proc").stat().st_dev)
    assert not keeps_its_word(os.makedev(4095, 1)), "it is not mounted"


def test_folders_may_have_names_in_no_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = b"1 0 8:1 / /m\xfcll\xc2\x85x rw - tmpfs none rw\n2 0 8:2 / / rw - ext4 /dev/sda2 rw\n"
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(odd)
    monkeypatch.setattr(syncing, "_MOUNTS", mounts)
    assert keeps_its_word(os.makedev(8, 2))
    assert not keeps_its_word(os.makedev(8, 3))


def test_where_no_mounts_are_shown_no_file_system_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chroot without a mount below its root: a node could open no wheel."""
    mounts = tmp_path / "mountinfo"
    mounts.touch()
    monkeypatch.setattr(syncing, "_MOUNTS", mounts)
    assert not keeps_its_word(os.makedev(8, 2))


def test_files_that_were_closed_meanwhile_are_synced_with_their_file_system(
    medium: Medium, many: list[Path]
) -> None:
    writer = PosixManyFiles(medium.file_system)
    writer.sync(many[:1])
    assert medium.syncs == 0
    medium.refuses = True
    with pytest.raises(OSError, match="refused"):
        writer.sync(many[:1], were_closed=True)


def test_a_writer_knows_that_its_files_made_room_for_others(tmp_path: Path) -> None:
    handles = HandleCache(PosixDisk(), 2)
    synced: list[bool] = []

    class Noted(SlotFiles):
        def sync(self, unsynced: Unsynced) -> None:
            self._many_files = ManyFilesNoted(synced)
            super().sync(unsynced)

    def frame(slot: int, offset: int = 0) -> FrameBundle:
        return bundled([copy_of(1, b"frame", slot=slot, offset=offset)])

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = Noted(tmp_path / "a", handles), Noted(tmp_path / "b", handles)
    one.write(frame(3_600), Placement.ANYWHERE)
    one.sync(one.take_unsynced())
    one.write(frame(3_600, offset=8), Placement.ANYWHERE)
    for slot in range(7_200, 7_203):
        other.write(frame(slot), Placement.ANYWHERE)
    for files in (one, one):
        files.sync(files.take_unsynced())
    assert synced == [False, True, False]
    one.mark_unsynced([3_600])
    for files in (one, one):
        files.sync(files.take_unsynced())
    assert synced == [False, True, False, True, False]


class ManyFilesNoted:
    """Notes whether the files of each sync were closed."""

    def __init__(self, noted: list[bool]) -> None:
        self.noted = noted

    def sync(self, paths: Collection[Path], *, were_closed: bool = False) -> None:
        del paths
        self.noted.append(were_closed)
