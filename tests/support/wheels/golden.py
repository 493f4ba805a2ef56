"""The messages of the golden data folders, and how to make a folder of them.

Used as ``python tests/support/wheels/golden.py FOLDER`` by the procedure in docs/FORMAT.md.
"""

import sys
from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta
from delaywheel.storage.folder.disk import Disk, PosixDisk
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.writing.wheel import OriginWheel
from support.wheels.messages import Message, columns_of, names_of

WHEEL = WheelId("golden-1", 3)
META = WheelMeta(WHEEL, {"golden-1": "5f0c" * 8}, 1, 7200)
SLOT = 1_763_700_000
ACCEPTED_AT_MS = 1_763_699_999_123

# Seq 1 and 2 are one group over two slots, seq 3 another; then seq 4 cancels two of them, seq 5
# commits one message, and seq 6 releases another.
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


LAST_SEQ = max(NAMED)


def write_golden(disk: Disk, data: Path) -> None:
    """Makes a data folder with frames of every kind."""
    wheel = OriginWheel.create(disk, data, META, HandleCache(disk, 4))
    wheel.append(columns_of(FIRST_GROUP), accepted_at_ms=ACCEPTED_AT_MS)
    wheel.append(columns_of(SECOND_GROUP), accepted_at_ms=ACCEPTED_AT_MS + 1)
    for seq, (kind, named) in NAMED.items():
        wheel.append(
            names_of(columns_of(named)), kind=kind, accepted_at_ms=ACCEPTED_AT_MS + seq - 2
        )
    wheel.checkpoint()
    wheel.close()


if __name__ == "__main__":
    write_golden(PosixDisk(), Path(sys.argv[1]))
