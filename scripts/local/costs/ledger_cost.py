"""The cost of the ledger when messages are accepted: groups with and without it, in turn.

    python -m local.costs.ledger_cost [--groups N] [--folder DIR]

Each group goes into a wheel on a real disk as the server's store writes it (sorted, encoded, one
write a frame, index rows); every second one is also entered into the ledger. The steps before and
after (gRPC, decoding, mirrors, answers) are not included: the ledger's share of a whole acceptance
is smaller than printed here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.columns import Columns, content_starts
from delaywheel.storage.writing.wheel import OriginWheel
from delaywheel_replica.server.ledger.rows import Ledger

GROUPS = 2_000
VALUE_BYTES = 200
SECONDS_AHEAD = 60
# Messages of a group, and over how many seconds they are due.
SHAPES = ((1, 1), (100, 1), (100, SECONDS_AHEAD), (1_000, 1), (1_000, SECONDS_AHEAD))
_WARM_UP = 50


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one shape of groups: medians in microseconds for each group."""

    messages: int
    seconds: int
    without_us: float
    with_us: float

    @property
    def ratio(self) -> float:
        """Returns the cost with the ledger relative to the cost without."""
        return self.with_us / self.without_us


class Bench:
    """A wheel and its ledger in a folder."""

    def __init__(self, folder: Path) -> None:
        disk = PosixDisk()
        self._wheel = WheelId("n1", 1)
        meta = WheelMeta(self._wheel, {"n1": "s"}, 1, 7200)
        handles = HandleCache(disk, 2 * SECONDS_AHEAD)
        self._origin = OriginWheel.create(disk, folder, meta, handles)
        self._ledger = Ledger(disk, folder)

    def cost(self, messages: int, seconds: int, groups: int) -> Cost:
        """Measures this many groups."""
        without_us: list[float] = []
        with_us: list[float] = []
        for number in range(groups + _WARM_UP):
            columns = group(messages, seconds)
            is_entered = number % 2 == 0
            began = time.perf_counter_ns()
            self._write(columns, is_entered=is_entered)
            took_us = (time.perf_counter_ns() - began) / 1e3
            if number >= _WARM_UP:
                (with_us if is_entered else without_us).append(took_us)
        return Cost(messages, seconds, statistics.median(without_us), statistics.median(with_us))

    def _write(self, columns: Columns, *, is_entered: bool) -> None:
        now_ms = time.time_ns() // 1_000_000
        places = self._origin.append(columns, accepted_at_ms=now_ms)
        if is_entered:
            self._ledger.enter(self._wheel, columns, places, now_ms)


def group(messages: int, seconds: int) -> Columns:
    """Returns messages of one topic with random ids and random dues within this many seconds."""
    from_ms = time.time_ns() // 1_000_000_000 * 1_000 + 600_000
    chance = np.random.default_rng()
    lengths = np.full(messages, VALUE_BYTES, np.int64)
    return Columns(
        due_ms=from_ms + chance.integers(0, seconds * 1_000, messages, np.int64),
        ids=np.frombuffer(os.urandom(16 * messages), np.uint8).reshape(messages, 16),
        topics=("orders",),
        topic_numbers=np.zeros(messages, np.uint32),
        key_lengths=np.full(messages, -1, np.int32),
        value_lengths=lengths.astype(np.int32),
        headers_lengths=np.zeros(messages, np.int32),
        partitions=np.full(messages, -1, np.int32),
        timestamps_ms=np.full(messages, -1, np.int64),
        blob=bytes(VALUE_BYTES * messages),
        starts=content_starts(lengths),
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m local.costs.ledger_cost")
    parser.add_argument("--groups", type=int, default=GROUPS, help="of each shape")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        bench = Bench(Path(folder))
        print("messages  seconds  without µs  with µs  ratio")
        for messages, seconds in SHAPES:
            cost = bench.cost(messages, seconds, options.groups)
            print(
                f"{messages:8}  {seconds:7}  {cost.without_us:10.1f}  {cost.with_us:7.1f}"
                f"  {cost.ratio:5.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
