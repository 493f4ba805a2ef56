"""The messages of the golden data folders, and how to make a folder of a version.

Used as ``python tests/support/wheels/golden.py FOLDER VERSION`` by the procedure in docs/FORMAT.md.
"""

import sys
from pathlib import Path

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta
from delaywheel.storage.folder.disk import Disk, PosixDisk
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import FIRST_VERSIONS, Kind
from delaywheel.storage.writing.wheel import OriginWheel
from support.wheels.messages import Message, columns_of

WHEEL = WheelId("golden-1", 3)
META = WheelMeta(WHEEL, {"golden-1": "5f0c" * 8}, 1, 7200)
SLOT = 1_763_700_000
ACCEPTED_AT_MS = 1_763_699_999_123

# Seq 1 and 2 are one group over two slots, seq 3 another; then seq 4 cancels two of them. From
# version 2 on seq 5 commits one message, and seq 6 releases another.
FIRST_GROUP = [
    Message(
        SLOT * 1000 + 999,
        bytes(range(16)),
        "orders",
        key=b"key",
        value=b"value",
        headers=(("trace", b"1"), ("trace", b""), ("é", None)),
        partition=7,
        timestamp_ms=1_763_600_000_001,
    ),
    Message((SLOT + 1) * 1000, bytes(range(1, 17)), "payments.eu", key=None, value=b""),
    Message(SLOT * 1000, bytes(range(2, 18)), "payments.eu", key=b"", value=None),
]
SECOND_GROUP = [Message(SLOT * 1000 + 500, bytes(range(3, 19)), "orders", value=bytes(100))]
FRAMES = {1: [FIRST_GROUP[0], FIRST_GROUP[2]], 2: [FIRST_GROUP[1]], 3: SECOND_GROUP}
NAMED = {
    4: (Kind.CANCELS, [FIRST_GROUP[0], SECOND_GROUP[0]]),
    5: (Kind.COMMITS, [FIRST_GROUP[1]]),
    6: (Kind.RELEASES, [FIRST_GROUP[2]]),
}


def last_seq(version: int) -> int:
    """How many frames there are."""
    return len(FRAMES) + sum(FIRST_VERSIONS[kind] <= version for kind, _ in NAMED.values())


def write_golden(disk: Disk, data: Path, version: int) -> None:
    """Makes a data folder with frames of every kind that a version has."""
    wheel = OriginWheel.create(disk, data, META, HandleCache(disk, 4))
    wheel.append(columns_of(FIRST_GROUP), accepted_at_ms=ACCEPTED_AT_MS)
    wheel.append(columns_of(SECOND_GROUP), accepted_at_ms=ACCEPTED_AT_MS + 1)
    for seq in range(len(FRAMES) + 1, last_seq(version) + 1):
        kind, named = NAMED[seq]
        ids = np.frombuffer(b"".join(each.id for each in named), dtype=np.uint8)
        due_ms = np.array([each.due_ms for each in named])
        columns = Columns.of_cancels(due_ms, ids.reshape(-1, 16))
        wheel.append(columns, kind=kind, accepted_at_ms=ACCEPTED_AT_MS + seq - 2)
    wheel.checkpoint()
    wheel.close()


if __name__ == "__main__":
    write_golden(PosixDisk(), Path(sys.argv[1]), int(sys.argv[2]))
