"""The cost of a wheel as a journal and seconds, in turn with that of today's storage.

    python -m local.costs.stored.journal_cost [--rounds N] [--folder DIR] [--week MIB ...]

*hour:* groups of 5,000 messages of 200 bytes, due at random within an hour, until 64 MiB wait for a
fill; each round appends the same to today's storage, to the journal, and fills. Round 1 makes all
files. *week:* the same due within a week, as many bytes a fill as are asked for, new files. *read:*
a second of 200 sections with ten messages each, as often as rounds, against 200 groups of today's.
Printed is CPU, in microseconds a message, and the machine's load.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.files.handles import HandleCache
from delaywheel.storage.files.wheel_folder import WheelMeta
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.columns import Columns, content_starts
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel.storage.seconds.wheel import FILL_BYTES, JournalWheel
from delaywheel.storage.writing.wheel import OriginWheel

_VALUE_BYTES = 200
_GROUP = 5_000
_ROW_BYTES = 252
_FIRST_SLOT = 1_763_700_000
_WHEEL = WheelId("a", 1)
_HOUR_S = 3_600
_WEEK_S = 604_800
_SECTIONS = 200


def groups(messages: int, seconds: int, group: int, seed: int) -> Iterator[Columns]:
    """Yields groups of values, due at random seconds."""
    chance = np.random.default_rng(seed)
    lengths, null = np.full(group, _VALUE_BYTES, np.int32), np.full(group, -1, np.int32)
    for _ in repeat(None, messages // group):
        dues_ms = _FIRST_SLOT * 1000 + chance.integers(0, seconds * 1000, group)
        yield Columns(
            due_ms=dues_ms.astype(np.int64),
            ids=chance.integers(0, 256, (group, 16)).astype(np.uint8),
            topics=("topic",),
            topic_numbers=np.zeros(group, np.uint32),
            key_lengths=null,
            value_lengths=lengths,
            headers_lengths=np.zeros(group, np.int32),
            partitions=null,
            timestamps_ms=np.full(group, -1, np.int64),
            blob=bytes(group * _VALUE_BYTES),
            starts=content_starts(lengths.astype(np.int64)),
        )


def cpu_us(work: Callable[[], object], messages: int) -> float:
    """Does some work; returns its CPU, in microseconds a message."""
    began_s = time.process_time()
    work()
    return (time.process_time() - began_s) * 1e6 / messages


class Both:
    """A wheel of today's, and one with a journal."""

    def __init__(self, folder: Path) -> None:
        disk = PosixDisk()
        meta = WheelMeta(_WHEEL, {"a": "s"}, 1, _WEEK_S)
        self._origin = OriginWheel.create(disk, folder / "today", meta, HandleCache(disk, 4_096))
        (folder / "journal").mkdir()
        self._wheel = JournalWheel(disk, folder / "journal", _WHEEL)
        self._today = WheelReader(disk, folder / "today", _WHEEL)
        self._reader = self._wheel.reader()

    def round(self, parts: list[Columns], *, with_today: bool) -> list[float]:
        """Appends groups to both, and fills; returns what each took."""
        messages = sum(map(len, parts))
        took = [cpu_us(lambda: [*map(self._append_today, parts)], messages)] if with_today else []
        took.append(cpu_us(lambda: [*map(self.append, parts)], messages))
        return [*took, cpu_us(self.fill, messages)]

    def _append_today(self, part: Columns) -> None:
        self._origin.append(part, accepted_at_ms=_FIRST_SLOT * 1000)

    def append(self, part: Columns) -> None:
        """Appends a group to the journal."""
        self._wheel.append(
            part,
            kind=Kind.MESSAGES,
            accepted_at_ms=_FIRST_SLOT * 1000,
            max_frame_messages=20_000,
            max_frame_bytes=8 << 20,
        )

    def fill(self) -> None:
        """Records a fill, and carries it out."""
        self._wheel.record_fill(_FIRST_SLOT * 1000)
        self._wheel.acknowledged(self._wheel.end)
        finish(self._wheel.fill(self._wheel.end))
        self._wheel.checkpoint(lambda _first, _last: None)

    def read(self) -> tuple[float, float]:
        """Reads a second; returns what it takes, in milliseconds: today, and from sections."""
        took = []
        for read in (
            lambda: [*self._today.slot_batches(_FIRST_SLOT, self._origin.last_seq)],
            lambda: self._reader.rows(_FIRST_SLOT),
        ):
            read()
            took.append(cpu_us(read, 1) / 1000)
        return took[0], took[1]


def main() -> None:
    """Prints a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--week", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    messages = FILL_BYTES // _ROW_BYTES // _GROUP * _GROUP
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        both = Both(Path(folder))
        for number in range(arguments.rounds):
            took = both.round([*groups(messages, _HOUR_S, _GROUP, number)], with_today=True)
            report("hour", "today {:.1f}, journal {:.1f}, fill {:.1f}", *took)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        both = Both(Path(folder))
        for part in groups(_SECTIONS * 10, 1, 10, 0):
            both.round([part], with_today=True)
        for _ in range(arguments.rounds):
            report("read", "today {:.2f} ms, sections {:.2f} ms", *both.read())
    for mib in arguments.week:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            count = (mib << 20) // _ROW_BYTES // _GROUP * _GROUP
            took = Both(Path(folder)).round(
                [*groups(count, _WEEK_S, _GROUP, 0)], with_today=mib <= FILL_BYTES >> 20
            )
            report(f"week, {mib} MiB a fill", "  ".join("{:.1f}" for _ in took), *took)


def report(name: str, text: str, *values: float) -> None:
    """Prints what was measured."""
    print(f"{name}: {text.format(*values)} (load {os.getloadavg()[0]:.0f})", flush=True)


if __name__ == "__main__":
    main()
