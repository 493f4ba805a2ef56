"""The cost of finding a second, starting, and leaving a wheel, by what is pending.

    python -m local.costs.stored.pending_cost [--pending 0,1m,10m] [--spans 2h,7d] [--folder DIR]

A store is filled as the server fills it, with groups of small frames over the whole span, and with
some seconds that hold the same in each case. Then, with files in the page cache:

* finding: one of those seconds is found and read, by a reader that follows the wheel;
* leaving: the open wheel is left, as when its node drains or its medium refuses;
* start: a store is opened on the folder after the death of its process, opens a wheel and has
  written one message. Once more as after a crash of the machine;
* verifying: recovering the folder after that, in both cases.

Each should cost the same however much is pending; verifying after a crash of the machine examines
each slot file, so it grows with the seconds that have messages. Everything is done several times,
and the least CPU time of all is printed, which other work on the machine changes little; for a
start also the least elapsed time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.levels import duration_ms
from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.node_state import Spare
from delaywheel.storage.folder.steps import finish
from delaywheel.storage.frames.columns import Columns
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_replica.server.store.store import Store, StoreLimits

MESSAGES_A_FRAME = 8
VALUE_BYTES = 20
PROBES = 21
PROBE_FRAMES = 100
REPEATS = 3
_GROUP_FRAMES = 8_192
_CHECKPOINT_GROUPS = 16
_START_SLOT = 1_800_000_000
_NOW_MS = _START_SLOT * 1000


@dataclass(frozen=True, slots=True)
class Start:
    """Times until a message is written, and of the work after it; in milliseconds."""

    cpu_ms: float
    elapsed_ms: float
    verifying_cpu_ms: float

    @classmethod
    def least(cls, starts: Iterable[Start]) -> Start:
        """Returns the minimum of each figure."""
        return cls(*map(min, zip(*map(astuple, starts), strict=True)))


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of one amount pending over one span; CPU times in milliseconds."""

    pending: int
    span: str
    rows: int
    finding_ms: float
    leaving_ms: float
    after_death: Start
    after_crash: Start


class Folder:
    """A data folder with one wheel in it."""

    def __init__(self, data: Path, span_seconds: int) -> None:
        self._data = data
        self._span_seconds = span_seconds
        self._disk = PosixDisk()
        self._numbers = iter(range(1, 100))
        self.store = self._opened("boot 0")
        self.wheel = self._open_wheel()

    def fill(self, pending: int) -> None:
        """Creates pending messages evenly over the span, and the seconds to look for."""
        for group, slots in enumerate(self._slots(-(-pending // MESSAGES_A_FRAME)), 1):
            self._append(slots, MESSAGES_A_FRAME)
            if group % _CHECKPOINT_GROUPS == 0:
                self.store.checkpoint(lambda _wheel, _seq: None)
        for _ in range(PROBE_FRAMES):
            self._append(np.array(self.probes), MESSAGES_A_FRAME)
        self.store.checkpoint(lambda _wheel, _seq: None)

    @property
    def probes(self) -> list[int]:
        """Returns the seconds to look for: one in each of as many parts of the span."""
        return [_START_SLOT + part * self._span_seconds // PROBES for part in range(1, PROBES)]

    @property
    def rows(self) -> int:
        """Returns the number of index rows."""
        return self.store.last_seq

    def finding_ms(self) -> float:
        """Measures finding one second, by a reader that has followed the wheel."""
        reader = WheelReader(self._disk, self._data, self.wheel)
        list(reader.slot_frames(_START_SLOT + self._span_seconds, 1 << 40))
        costs = []
        for slot in self.probes * 3:
            began = time.process_time()
            frames = list(reader.slot_frames(slot, 1 << 40))
            costs.append(time.process_time() - began)
            assert len(frames) >= PROBE_FRAMES
        reader.close()
        return min(costs) * 1000

    def leaving_ms(self) -> float:
        """Measures leaving the open wheel, in a fork of this process."""
        announced = layout.writing_path(layout.wheel_folder(self._data, self.wheel))
        content = announced.read_bytes()
        reading, writing = os.pipe()
        if not os.fork():
            began = time.process_time()
            self.store.leave_wheel()
            os.write(writing, str(time.process_time() - began).encode())
            os._exit(0)
        os.wait()
        announced.write_bytes(content)
        return float(os.read(reading, 100)) * 1000

    def start(self, boot: str) -> Start:
        """Measures a restart: until a message is written, and the rest."""
        self.store._folder.release()  # noqa: SLF001 - as the kernel does for a process that died
        began, began_s = time.process_time(), time.perf_counter()
        self.store = self._opened(boot)
        self._open_wheel()
        self._append(np.array([_START_SLOT + 1]), 1)
        accepted, accepted_s = time.process_time(), time.perf_counter()
        for wheel in sorted(self.store.unverified):
            held = finish(self.store.verifying(wheel))
            assert wheel != self.wheel or held.applied
        times_s = accepted - began, accepted_s - began_s, time.process_time() - accepted
        return Start(*(seconds * 1000 for seconds in times_s))

    def _opened(self, boot: str) -> Store:
        limits = StoreLimits(self._span_seconds, self._span_seconds + 7_200, recent_bytes=1)
        return Store.open(
            self._disk, self._data, node="n1", cluster_id="c", boot_id=boot, limits=limits
        )

    def _open_wheel(self) -> WheelId:
        wheel = WheelId("n1", next(self._numbers))
        self.store.open_wheel(Spare(wheel, 0, {"n1": self.store.state.storage}, 1))
        return wheel

    def _slots(self, frames: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Yields the slots of each group's frames: the whole span, repeatedly."""
        others = np.setdiff1d(np.arange(1, self._span_seconds), np.array(self.probes) - _START_SLOT)
        others = others[:: max(1, len(others) // max(1, frames))]  # few go over all of it, too
        while frames > 0:
            for first in range(0, len(others), _GROUP_FRAMES):
                part = others[first : first + min(_GROUP_FRAMES, frames)]
                frames -= len(part)
                if len(part):
                    yield part + _START_SLOT

    def _append(self, slots: np.ndarray[tuple[int], np.dtype[np.int64]], messages: int) -> None:
        due_ms = np.repeat(slots * 1000, messages)
        rows = len(due_ms)
        columns = Columns(
            due_ms=due_ms,
            ids=np.frombuffer(os.urandom(16 * rows), np.uint8).reshape(rows, 16),
            topics=("orders",),
            topic_numbers=np.zeros(rows, np.uint32),
            key_lengths=np.full(rows, -1, np.int32),
            value_lengths=np.full(rows, VALUE_BYTES, np.int32),
            headers_lengths=np.zeros(rows, np.int32),
            partitions=np.full(rows, -1, np.int32),
            timestamps_ms=np.full(rows, -1, np.int64),
            blob=memoryview(bytes(VALUE_BYTES * rows)),
            starts=np.arange(rows, dtype=np.int64) * VALUE_BYTES,
        )
        self.store.append(columns, Kind.MESSAGES, _NOW_MS)


def measure(pending: int, span: str, folder: Path | None = None) -> Cost:
    """Fills a folder, measures, and deletes it."""
    data = Path(tempfile.mkdtemp(prefix="pending-", dir=folder))
    try:
        filled = Folder(data / "n1", duration_ms(span) // 1000)
        filled.fill(pending)
        rows, finding = filled.rows, filled.finding_ms()
        leaving = min(filled.leaving_ms() for _ in range(REPEATS))
        after_death = Start.least(filled.start("boot 0") for _ in range(REPEATS))
        after_crash = Start.least(filled.start(f"boot {1 + again}") for again in range(REPEATS))
        filled.store.release()
    finally:
        shutil.rmtree(data, ignore_errors=True)
    return Cost(pending, span, rows, finding, leaving, after_death, after_crash)


def show(costs: Iterator[Cost]) -> None:
    """Prints a table, row by row as they become available."""
    print(
        "CPU ms                                       "
        "      after a death          after a crash\n"
        "   pending  span        rows  finding  leaving"
        "  start elapsed verify  start elapsed  verify"
    )
    for cost in costs:
        starts = "".join(
            f" {start.cpu_ms:>6.1f} {start.elapsed_ms:>7.1f} {start.verifying_cpu_ms:>6.0f}"
            for start in (cost.after_death, cost.after_crash)
        )
        print(
            f"{cost.pending:>10,}  {cost.span:>4}  {cost.rows:>10,} {cost.finding_ms:>8.2f}"
            f" {cost.leaving_ms:>8.1f}{starts}",
            flush=True,
        )


def main() -> None:
    """Runs the requested measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pending", default="0,1m,10m", help="messages, separated by commas")
    parser.add_argument("--spans", default="2h,7d", help="separated by commas")
    parser.add_argument("--folder", type=Path, help="where to make the data folders")
    arguments = parser.parse_args()
    amounts = [int(text.replace("m", "000000")) for text in arguments.pending.split(",")]
    spans = arguments.spans.split(",")
    show(measure(amount, span, arguments.folder) for span in spans for amount in amounts)


if __name__ == "__main__":
    main()
