"""Anonymous memory of accepting and forwarding over simulated time: it must stay flat.

    python -m local.costs.memory [--seconds N] [--folder DIR]

Two processes, each with the parts of a node that hold messages: the server's store and ledger, and
the cleaner's reader of what is due. Each simulated second brings small messages, one large one,
late ones for seconds that are done, and a repeated one; each is forwarded, its floor follows, and
files below it are deleted. Nothing sleeps: an hour takes some minutes. What gRPC and Kafka's client
hold is not in it. Exit code 1 if any later quarter of the time needs more than the first one, by
more than what malloc may keep of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.node_state import Spare
from delaywheel.storage.frames.columns import Columns, content_starts
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.cleaner.due.reader import DueReader
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.server.ledger.rows import Ledger
from delaywheel_replica.server.store.store import Store

SMALL, SMALL_BYTES = 100, 200
LARGE_BYTES = 900_000
LATE_UP_TO_S = 90
LATE_WINDOW_S = 120
START_S = 1_700_000_000
WHEEL = WheelId("n1", 1)
CAP_MESSAGES, CAP_BYTES = 10_000, 16 << 20
SAMPLES = 32
MARGIN_BYTES = 5 << 20
"""Pieces of malloc's heap, and one second more or less in memory: caches are full by then."""


def anonymous_bytes(pid: int | None = None) -> int:
    """Returns the anonymous memory of a process, or of this one, in bytes."""
    lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def traffic(second: int) -> Columns:
    """Yields the messages accepted in one second, most of them due in it, some late."""
    chance = np.random.default_rng(second)
    lengths = np.full(SMALL + 2, SMALL_BYTES, np.int64)
    lengths[0] = LARGE_BYTES
    dues_ms = second * 1_000 + chance.integers(0, 900, len(lengths), np.int64)
    dues_ms[1:4] -= 1_000 * chance.integers(1, LATE_UP_TO_S, 3)
    ids = chance.integers(0, 256, (len(lengths), 16)).astype(np.uint8)
    dues_ms[-1], ids[-1] = dues_ms[-2], ids[-2]  # a retry
    return Columns(
        due_ms=dues_ms,
        ids=ids,
        topics=("orders",),
        topic_numbers=np.zeros(len(lengths), np.uint32),
        key_lengths=np.full(len(lengths), -1, np.int32),
        value_lengths=lengths.astype(np.int32),
        headers_lengths=np.zeros(len(lengths), np.int32),
        partitions=np.full(len(lengths), -1, np.int32),
        timestamps_ms=np.full(len(lengths), -1, np.int64),
        blob=bytes(int(lengths.sum())),
        starts=content_starts(lengths),
    )


def accept(folder: Path, orders: Connection) -> None:
    """Runs the server's part: writes a second on request, and answers how far the wheel goes."""
    disk = PosixDisk()
    store = Store.open(disk, folder, node="n1", cluster_id="memory", boot_id="boot")
    ledger = Ledger(disk, folder)
    store.open_wheel(Spare(WHEEL, 0, {"n1": store.state.storage}, 1))
    while (second := orders.recv()) is not None:
        columns = traffic(second)
        places = store.append(columns, Kind.MESSAGES, second * 1_000)
        ledger.enter(WHEEL, columns, places, second * 1_000)
        for _ in store.sweep(second - LATE_WINDOW_S):
            pass
        if second % 10 == 0:
            store.checkpoint(lambda *_: None)
        orders.send((store.last_seq, anonymous_bytes()))
    store.release()


def forward(folder: Path, orders: Connection) -> None:
    """Runs the cleaner's part: takes all messages of a second, and answers their number."""
    reader = DueReader(PosixDisk(), folder)
    reader.start(Progress(START_S * 1_000 - 1, None, {}, START_S - LATE_WINDOW_S))
    while (order := orders.recv()) is not None:
        second, last_seq = order
        taken = 0
        while True:
            reader.update({WHEEL: last_seq})
            step = reader.next_step(second * 1_000 + 999, CAP_MESSAGES, CAP_BYTES)
            taken += sum(1 for _ in step.messages) + len(step.dropped)
            reader.done(step, replace(step.after, floor=second - LATE_WINDOW_S))
            if step.after.seqs.get(WHEEL) == last_seq and not step.behind:
                break
        orders.send((taken, anonymous_bytes()))
    reader.close()


def measure(folder: Path, seconds: int) -> list[tuple[int, int, int]]:
    """Yields the simulated second and the memory of both parts, at regular times."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for part in (accept, forward):
        here, there = context.Pipe()
        process = context.Process(target=part, args=(folder, there), daemon=True)
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    samples = drive(ends[0], ends[1], seconds)
    for end, process in zip(ends, processes, strict=True):
        end.send(None)
        process.join()
    return samples


def drive(server: Connection, cleaner: Connection, seconds: int) -> list[tuple[int, int, int]]:
    """Has each second accepted and then forwarded."""
    samples, accepted, forwarded = [], 0, 0
    for number in range(seconds):
        server.send(START_S + number)
        last_seq, server_bytes = server.recv()
        accepted += SMALL + 2
        cleaner.send((START_S + number, last_seq))
        taken, cleaner_bytes = cleaner.recv()
        forwarded += taken
        if (number + 1) % max(1, seconds // SAMPLES) == 0:
            samples.append((number + 1, server_bytes, cleaner_bytes))
    if forwarded != accepted:
        raise AssertionError(f"{accepted} accepted, {forwarded} taken")
    return samples


def quarters(samples: list[int]) -> list[int]:
    """Returns the maximum of each quarter of the time."""
    edges = [len(samples) * quarter // 4 for quarter in range(5)]
    return [max(samples[begin:end]) for begin, end in pairwise(edges)]


def is_flat(samples: list[int]) -> bool:
    """Whether no later quarter needs more than the first."""
    first, *later = quarters(samples)
    return max(later) <= first + MARGIN_BYTES


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m local.costs.memory")
    parser.add_argument("--seconds", type=int, default=3_600, help="of simulated time")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        samples = measure(Path(folder), options.seconds)
    print("second  server MB  cleaner MB")
    for second, server_bytes, cleaner_bytes in samples:
        print(f"{second:6}  {server_bytes / 1e6:9.1f}  {cleaner_bytes / 1e6:10.1f}")
    parts = [[sample[part] for sample in samples] for part in (1, 2)]
    for name, part in zip(("server", "cleaner"), parts, strict=True):
        sizes = ", ".join(f"{each / 1e6:.1f}" for each in quarters(part))
        print(f"{name}: at most {sizes} MB in the quarters of the time")
    flat = all(map(is_flat, parts))
    print("flat" if flat else "it grows")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
