"""A node continues with the folder that an earlier release has left: tests/golden/node-*."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from delaywheel.seqset import NO_SEQS
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.recovery.verify import verify_folder
from support.wheels.copies import verified
from support.wheels.golden import ACCEPTED_AT_MS, FIRST_GROUP, SECOND_GROUP
from support.wheels.golden_node import (
    MEMBERS,
    MIRROR,
    OWN,
    SPARE,
    STORAGE,
    open_golden_node,
    write_golden_node,
)
from support.wheels.messages import columns_of, messages_of

GOLDEN = Path(__file__).parents[2] / "golden"
FOLDERS = sorted(GOLDEN.glob("node-*"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_this_release_leaves_is_recorded(tmp_path: Path) -> None:
    write_golden_node(PosixDisk(), tmp_path / "now")
    assert contents(tmp_path / "now") == contents(FOLDERS[-1])


@pytest.mark.parametrize("golden", FOLDERS, ids=lambda folder: folder.name)
def test_a_node_goes_on_where_an_earlier_release_was_killed(golden: Path, tmp_path: Path) -> None:
    data = shutil.copytree(golden, tmp_path / "data")
    disk = PosixDisk()
    store = verified(open_golden_node(disk, data))
    state = store.state
    assert (state.storage, state.open, state.spare) == (STORAGE, OWN, SPARE)
    assert (state.last_number, dict(state.fenced)) == (4, {"golden-2": 6})
    held = store.held_wheels()
    assert {wheel: (each.applied, each.missing) for wheel, each in held.items()} == {
        OWN: (2, NO_SEQS),
        MIRROR: (1, NO_SEQS),
    }
    assert all(each.card.members == MEMBERS for each in held.values())

    store.save(replace(state, open=SPARE.wheel, spare=None))
    store.open_wheel(SPARE)
    store.append(columns_of(FIRST_GROUP), Kind.MESSAGES, ACCEPTED_AT_MS)
    store.checkpoint(lambda *_: None)
    store.release()

    assert list(verify_folder(disk, data)) == []
    for wheel, messages in ((OWN, FIRST_GROUP), (SPARE.wheel, FIRST_GROUP), (MIRROR, SECOND_GROUP)):
        reader = WheelReader(disk, data, wheel)
        frames = [reader.frame(seq) for seq in range(1, reader.last_seq() + 1)]
        reader.close()
        read = [
            message
            for frame in frames
            if isinstance(frame, Frame)
            for message in messages_of(frame.columns)
        ]
        assert sorted(read, key=lambda each: each.id) == sorted(messages, key=lambda each: each.id)
    kept = contents(data)
    for path, written in contents(golden).items():
        if path.suffix == ".slot":
            assert kept[path] == written
