import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.identity import NameInvalidError, WheelId
from delaywheel.storage.folder.boot import read_boot_id
from delaywheel.storage.folder.disk import Disk, PosixDisk
from delaywheel.storage.folder.node_file import (
    NodeFileDamaged,
    NodeFolder,
    NodeFolderForeign,
    NodeFolderInUse,
    load_node_state,
    open_node_folder,
)
from delaywheel.storage.folder.node_state import Spare
from sim.machine.disk import Crash, SimulatedDisk

DATA = Path("/data")


def opened(
    disk: Disk,
    data: Path = DATA,
    *,
    node: str = "node-1",
    cluster_id: str = "cluster-1",
    boot_id: str = "boot-1",
) -> NodeFolder:
    return open_node_folder(disk, data, node=node, cluster_id=cluster_id, boot_id=boot_id)


def test_a_new_folder_gets_a_storage_uuid_and_keeps_it(tmp_path: Path) -> None:
    folder = opened(PosixDisk(), tmp_path / "deep" / "data")
    storage = folder.state.storage
    assert len(storage) == 32
    folder.release()
    again = opened(PosixDisk(), tmp_path / "deep" / "data", boot_id="boot-2")
    assert again.state.storage == storage
    assert again.state.boot_id == "boot-1", "the caller sees and saves the change"
    again.release()


def test_everything_saved_comes_back() -> None:
    disk = SimulatedDisk()
    folder = opened(disk)
    state = replace(
        folder.state,
        boot_id="boot-2",
        last_number=9,
        open=WheelId("node-1", 8),
        spare=Spare(WheelId("node-1", 9), 1_763_700_000, {"node-1": "storage"}, 1),
        fenced={"node-2": 4},
        incomplete=(WheelId("node-2", 3),),
        all_incomplete=True,
        unsynced=False,
    )
    folder.put(state)
    assert load_node_state(disk, DATA) == state == folder.state


def test_one_process_at_a_time(tmp_path: Path) -> None:
    for disk, data in ((SimulatedDisk(), DATA), (PosixDisk(), tmp_path)):
        first = opened(disk, data)
        with pytest.raises(NodeFolderInUse):
            opened(disk, data)
        first.release()
        opened(disk, data).release()


def test_a_foreign_folder_is_refused_and_left_unlocked() -> None:
    disk = SimulatedDisk()
    opened(disk).release()
    for node, cluster_id in (("node-2", "cluster-1"), ("node-1", "cluster-2")):
        with pytest.raises(NodeFolderForeign, match="belongs to node node-1"):
            opened(disk, node=node, cluster_id=cluster_id)
    opened(disk).release()
    with pytest.raises(NameInvalidError):
        opened(disk, node="Node")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"version": 2}'])
def test_a_damaged_file_is_named(content: bytes) -> None:
    disk = SimulatedDisk()
    opened(disk).release()
    disk.set_content(DATA / "node.json", content)
    with pytest.raises(NodeFileDamaged):
        opened(disk)


def test_a_file_with_a_list_for_an_object_is_damaged() -> None:
    disk = SimulatedDisk()
    opened(disk).release()
    content = disk.content(DATA / "node.json")
    assert b'"fenced": {}' in content
    disk.set_content(DATA / "node.json", content.replace(b'"fenced": {}', b'"fenced": []'))
    with pytest.raises(NodeFileDamaged):
        opened(disk)


def test_a_promise_is_durable_when_save_returns() -> None:
    for effects in range(10):
        disk = SimulatedDisk()
        folder = opened(disk)
        disk.crash_after(effects)
        try:
            folder.put(replace(folder.state, fenced={"node-2": 7}))
            saved = True
        except Crash:
            saved = False
        disk.restart()
        state = load_node_state(disk, DATA)
        assert state is not None
        assert state.fenced == {"node-2": 7} or not saved


def test_the_file_is_readable_json() -> None:
    disk = SimulatedDisk()
    opened(disk)
    assert json.loads(disk.content(DATA / "node.json"))["node"] == "node-1"


def test_a_boot_ends_with_the_mount_of_its_device(tmp_path: Path) -> None:
    data, sys = tmp_path / "data", tmp_path / "sys"
    data.mkdir()
    boot = read_boot_id(data, sys=sys)
    assert boot == read_boot_id(data / "not made yet", sys=sys)
    device = data.stat().st_dev
    (sys / "dev/block").mkdir(parents=True)
    (sys / "devices/sda1").mkdir(parents=True)
    (sys / "fs/ext4").mkdir(parents=True)
    (sys / f"dev/block/{os.major(device)}:{os.minor(device)}").symlink_to(sys / "devices/sda1")
    assert read_boot_id(data, sys=sys) == boot, "it is not shown"
    mounts = []
    for number in range(2):
        mounted = sys / "fs/ext4/sda1"
        mounted.mkdir()
        mounts.append(read_boot_id(data, sys=sys))
        mounted.rename(sys / f"fs/ext4/unmounted-{number}")
    assert len({boot, *mounts}) == 3


def test_the_names_of_a_new_folder_and_of_those_above_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = PosixDisk.sync_folder

    def sync(self: PosixDisk, path: Path) -> None:
        synced.append(path)
        real(self, path)

    monkeypatch.setattr(PosixDisk, "sync_folder", sync)
    opened(PosixDisk(), tmp_path / "deep" / "data").release()
    assert {tmp_path, tmp_path / "deep", tmp_path / "deep" / "data"} <= set(synced)
    synced.clear()
    (tmp_path / "made").mkdir()  # by a process that died then
    opened(PosixDisk(), tmp_path / "made").release()
    assert tmp_path in synced
