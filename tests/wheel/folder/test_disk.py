"""The same promises, kept by the real disk and by the simulated one."""

import ast
import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

from delaywheel.storage.folder import disk as disk_module
from delaywheel.storage.folder.disk import Disk, FolderInUseError, PosixDisk
from sim.machine.disk import SimulatedDisk

Place = tuple[Disk, Path]


@pytest.fixture(params=["posix", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return (PosixDisk(), tmp_path) if request.param == "posix" else (SimulatedDisk(), Path("/data"))


def test_what_is_written_is_read(place: Place) -> None:
    disk, data = place
    file = disk.open(data / "a" / "b" / "file", create=True)
    file.write_at([b"hello"], 0)
    file.write_at([b" ", bytearray(b"wide"), memoryview(b" world")], 5)
    assert file.size() == 16
    assert file.read_at(100, 0) == b"hello wide world"
    assert file.read_at(4, 6) == b"wide"
    assert file.read_at(4, 16) == b""
    file.sync_data()
    file.truncate(5)
    reader = disk.open_read(data / "a" / "b" / "file")
    assert reader.read_at(100, 0) == b"hello"
    file.close()
    reader.close()


def test_more_buffers_than_one_call_takes(place: Place) -> None:
    disk, data = place
    file = disk.open(data / "file", create=True)
    parts = [bytes([number % 256]) * (number % 3) for number in range(5000)]
    file.write_at(parts, 7)
    assert file.read_at(1 << 20, 7) == b"".join(parts)
    file.close()


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, pwritev = os.pwrite, os.pwritev
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    monkeypatch.setattr(
        os, "pwritev", lambda fd, buffers, at: pwritev(fd, [bytes(buffers[0])[:2]], at)
    )
    monkeypatch.setattr(disk_module, "_BUFFERS_PER_CALL", 2)
    file = PosixDisk().open(tmp_path / "file", create=True)
    file.write_at([b"0123456789"], 0)
    file.write_at([b"abc", b"", b"defgh"], 10)
    assert file.read_at(100, 0) == b"0123456789abcdefgh"
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="wrote nothing"):
        file.write_at([b"a", b"b"], 0)
    file.close()


def test_an_open_file_outlives_its_name(place: Place) -> None:
    disk, data = place
    file = disk.open(data / "file", create=True)
    file.write_at([b"kept"], 0)
    disk.delete(data / "file")
    assert not disk.exists(data / "file")
    assert file.read_at(4, 0) == b"kept"
    file.close()
    disk.delete(data / "file")


def test_missing_files_are_named(place: Place) -> None:
    disk, data = place
    for missing in (disk.open, disk.open_read, disk.read_file):
        with pytest.raises(FileNotFoundError):
            missing(data / "nothing")


def test_replacing_a_file(place: Place) -> None:
    disk, data = place
    for content in (b"first, longer", b"second"):
        disk.replace_file(data / "deep" / "file", content)
        assert disk.read_file(data / "deep" / "file") == content
    assert disk.list_folder(data / "deep") == ["file"]
    file = disk.open_read(data / "deep" / "file")
    assert not file.is_replaced()
    disk.replace_file(data / "deep" / "file", b"third")
    assert file.is_replaced()
    file.close()


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = PosixDisk()
    disk.replace_file(tmp_path / "file", b"first")

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="full"):
            disk.replace_file(tmp_path / "file", b"second")
    assert disk.list_folder(tmp_path) == ["file"]
    assert disk.read_file(tmp_path / "file") == b"first"


def test_a_mapped_array_is_shared(place: Place) -> None:
    disk, data = place
    disk.make_folder(data)
    dtype = np.dtype("<i8")
    array = disk.map_array(data / "array", dtype, 10, writable=True)
    view = disk.map_array(data / "array", dtype, 10, writable=False)
    array[3] = 42
    assert view.tolist() == [0, 0, 0, 42, 0, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    file = disk.open_read(data / "array")
    assert file.size() == 80
    file.close()
    again = disk.map_array(data / "array", dtype, 5, writable=True)
    assert again.tolist() == [0] * 5, "recreated"


def test_a_mapped_array_lies_on_no_medium(tmp_path: Path) -> None:
    PosixDisk().map_array(tmp_path / "array", np.dtype("<i8"), 10, writable=True)
    assert (tmp_path / "array").is_symlink()
    with pytest.raises(FileNotFoundError):  # its process, here its disk, is gone
        PosixDisk().map_array(tmp_path / "array", np.dtype("<i8"), 10, writable=False)


def test_folders(place: Place) -> None:
    disk, data = place
    assert disk.list_folder(data / "x") == []
    disk.make_folder(data / "x" / "y")
    disk.open(data / "x" / "file", create=True).close()
    disk.sync_folder(data / "x")
    assert disk.list_folder(data / "x") == ["file", "y"]
    disk.delete_folder(data / "x")
    disk.delete_folder(data / "x")
    assert not disk.exists(data / "x")
    assert disk.free_bytes(data.parent) > 0
    assert disk.free_inodes(data.parent) is None or disk.free_inodes(data.parent)


def test_a_lock_is_held_once(place: Place) -> None:
    disk, data = place
    disk.make_folder(data)
    lock = disk.lock(data / "lock")
    with pytest.raises(FolderInUseError):
        disk.lock(data / "lock")
    lock.close()
    lock.close()
    disk.lock(data / "lock").close()


def test_the_simulated_disk_runs_full_as_a_real_one_does() -> None:
    disk = SimulatedDisk(capacity_bytes=10)
    file = disk.open(Path("/file"), create=True)
    with pytest.raises(OSError, match="No space left") as full:
        file.write_at([bytes(11)], 0)
    assert full.value.errno == errno.ENOSPC
    assert file.size() == 10
    assert disk.free_bytes(Path("/")) == 0


# --- names that cannot be read

PACKAGES = [
    Path(__file__).parents[3] / package
    for package in ("wheel/delaywheel", "replica/delaywheel_replica", "scripts/delaywheel_audit")
]
SWALLOWS = {"exists", "lexists", "is_file", "is_dir", "is_symlink", "is_mount", "isfile", "isdir"}
"""Since Python 3.14 these take an error of the medium for "no"."""
LISTS = {"glob", "rglob", "walk", "ismount", "islink", "is_socket", "is_fifo", "is_junction"}
"""These leave out what they cannot look at: some in every release, others since 3.13 or 3.14."""
SOURCES = ("ast", "package")
"""What the audit lists with them: its own modules."""


def test_what_the_medium_cannot_read_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def refused(path: Path, **rest: bool) -> os.stat_result:
        if path == tmp_path / "bad":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **rest)

    monkeypatch.setattr(os, "stat", refused)
    monkeypatch.setattr(Path, "exists", os.path.exists)  # as in 3.14
    disk = PosixDisk()
    assert disk.exists(tmp_path / "bad")
    assert disk.exists(tmp_path)
    (tmp_path / "file").touch()
    assert not disk.exists(tmp_path / "file" / "inside")
    assert not disk.exists(tmp_path / "absent")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_error_of_the_medium_is_taken_for_an_absent_file(package: Path) -> None:
    named = re.compile(rf"\b({'|'.join(SWALLOWS | LISTS)})\b")  # to parse all files takes seconds
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    found = [
        f"{path.name}:{call.lineno}"
        for path, source in sources.items()
        if named.search(source)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in SWALLOWS | LISTS
        and not ast.unparse(call.func.value).endswith(("disk", *SOURCES))
    ]
    assert found == []
