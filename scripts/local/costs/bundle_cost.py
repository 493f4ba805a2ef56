"""The cost of a frame from a group to a mirror's slot file, step by step.

    python -m local.costs.bundle_cost [--rounds N] [--folder DIR]

Each round appends a group to a wheel on a real disk, makes a message of its frames, reads that, and
appends them to a copy, and reads them there for a node that is behind. What lies between (threads,
sockets, the machine) is not included. Printed is the least of all rounds, in microseconds of CPU
per frame.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta, make_wheel
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.columns import Columns, content_starts
from delaywheel.storage.writing.mirror import MirrorWheel
from delaywheel.storage.writing.wheel import OriginWheel
from delaywheel_replica.core.protocol.messages import Frames, WheelCard
from delaywheel_replica.peers.encoding import decode, encode_in_parts

VALUE_BYTES = 200
# Messages of a group, and over how many seconds they are due.
SHAPES = {
    "sparse": (1_000, 100_000),
    "an hour": (1_000, 3_600),
    "dense": (1_000, 10),
    "few": (4, 4),
    "one": (1, 1),
}
_FIRST_SLOT = 1_763_700_000


class Steps:
    """The least time of each step, in seconds of CPU."""

    def __init__(self) -> None:
        self.least_s: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measures what is done within its context."""
        began_s = time.thread_time()
        yield
        took_s = time.thread_time() - began_s
        self.least_s[name] = min(took_s, self.least_s.get(name, took_s))


def columns_of(messages: int, seconds: int) -> Columns:
    """Returns a group of values, due at random seconds."""
    chance = np.random.default_rng(1)
    lengths = np.full(messages, VALUE_BYTES, np.int32)
    null = np.full(messages, -1, np.int32)
    return Columns(
        due_ms=(_FIRST_SLOT * 1000 + chance.integers(0, seconds * 1000, messages)).astype(np.int64),
        ids=chance.integers(0, 256, (messages, 16)).astype(np.uint8),
        topics=("topic",),
        topic_numbers=np.zeros(messages, np.uint32),
        key_lengths=null,
        value_lengths=lengths,
        headers_lengths=np.zeros(messages, np.int32),
        partitions=null,
        timestamps_ms=np.full(messages, -1, np.int64),
        blob=bytes(messages * VALUE_BYTES),
        starts=content_starts(lengths.astype(np.int64)),
    )


def measure(folder: Path, columns: Columns, rounds: int) -> tuple[int, Steps]:
    """Returns the frames of a group, and the cost of each step."""
    disk, steps = PosixDisk(), Steps()
    members = {"a": "s", "b": "t"}
    meta = WheelMeta(WheelId("a", 1), members, 2, 604_800)
    card = WheelCard(meta.wheel, members, 2, meta.span_seconds)
    origin = OriginWheel.create(disk, folder / "a", meta, HandleCache(disk, 4_096))
    make_wheel(disk, folder / "b", meta)
    copy = finish(MirrorWheel.opening(disk, folder / "b", meta.wheel, HandleCache(disk, 4_096)))
    for _ in range(rounds):
        with steps.step("encode and write"):
            group = origin.append(columns, accepted_at_ms=_FIRST_SLOT * 1000)
        with steps.step("make a message"):
            parts = encode_in_parts(Frames(card, group.bundle))
        with steps.step("read it"):
            message = decode(b"".join(parts))
        assert isinstance(message, Frames)
        with steps.step("check and write"):
            refused = copy.append(message.frames)
        assert refused is None
        with steps.step("read the files"):
            found, _ = copy.reader.bundle(group.bundle.first_seq, group.bundle.last_seq, floor=0)
        assert found == group.bundle
    origin.close()
    copy.close()
    return len(group.bundle), steps


def main() -> None:
    """Prints one line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            frames, steps = measure(Path(folder), columns_of(*shape), arguments.rounds)
        least = steps.least_s.items()
        listed = ", ".join(f"{step} {took_s * 1e6 / frames:.1f}" for step, took_s in least)
        print(f"{name}: {frames} frames; µs a frame: {listed}")


if __name__ == "__main__":
    main()
