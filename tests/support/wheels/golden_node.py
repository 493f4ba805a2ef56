"""A whole node's data folder, as this version leaves it when it is killed.

Used as ``python tests/support/wheels/golden_node.py FOLDER`` where what a release writes has
changed (docs/FORMAT.md): earlier folders stay.
"""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta
from delaywheel.storage.folder.disk import Disk, PosixDisk
from delaywheel.storage.folder.node_state import Spare
from delaywheel.storage.frames.bundle import FrameBundle
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.writing.wheel import OriginWheel
from delaywheel_replica.core.protocol.messages import WheelCard
from delaywheel_replica.server.store.store import Store, StoreLimits
from support.wheels.golden import ACCEPTED_AT_MS, FIRST_GROUP, SECOND_GROUP, SLOT
from support.wheels.messages import columns_of

NODE, STORAGE, BOOT = "golden-1", "5f0c" * 8, "boot-1"
MEMBERS = {NODE: STORAGE, "golden-2": "77aa" * 8}
OWN, MIRROR = WheelId(NODE, 3), WheelId("golden-2", 7)
SPARE = Spare(WheelId(NODE, 4), SLOT - 300, MEMBERS, 2)
MADE_ANEW = frozenset({"dial", "lock"})
"""By each start: they are no part of the folder that is kept."""


def open_golden_node(disk: Disk, data: Path) -> Store:
    """The store of such a folder, or of an empty one."""
    limits = StoreLimits(dial_rows=64)
    return Store.open(
        disk,
        data,
        node=NODE,
        cluster_id="golden",
        boot_id=BOOT,
        limits=limits,
        new_storage=lambda: STORAGE,
    )


def write_golden_node(disk: Disk, data: Path) -> None:
    """An own wheel in use, a copy of another node's, a spare, a promise."""
    store = open_golden_node(disk, data)
    store.save(replace(store.state, open=OWN, last_number=3))
    store.open_wheel(Spare(OWN, 0, MEMBERS, 2))
    store.append(columns_of(FIRST_GROUP), Kind.MESSAGES, ACCEPTED_AT_MS)
    store.mirror(WheelCard(MIRROR, MEMBERS, 2, 7_200), _frames_of_the_other(disk))
    store.save(replace(store.state, spare=SPARE, last_number=4, fenced={"golden-2": 6}))
    store.checkpoint(lambda *_: None)
    store.release()
    for name in MADE_ANEW:
        (data / name).unlink()


def _frames_of_the_other(disk: Disk) -> FrameBundle:
    with TemporaryDirectory() as folder:
        data = Path(folder)
        meta = WheelMeta(MIRROR, MEMBERS, 2, 7_200)
        wheel = OriginWheel.create(disk, data, meta, HandleCache(disk, 4))
        wheel.append(columns_of(SECOND_GROUP), accepted_at_ms=ACCEPTED_AT_MS)
        wheel.close()
        reader = WheelReader(disk, data, MIRROR)
        frames, _ = reader.bundle(1, 1, floor=0)
        reader.close()
    return frames


if __name__ == "__main__":
    write_golden_node(PosixDisk(), Path(sys.argv[1]))
