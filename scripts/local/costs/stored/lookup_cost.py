"""The cost of finding messages: by id, by how many their second holds, and by searching.

    python -m local.costs.stored.lookup_cost [--messages 100,100000] [--pending 1m] [--wheels 1,3]
        [--folder DIR]

A store is filled as the server fills it. Then, with files in the page cache, the part of a server
that answers is measured by itself, without calls:

* first: a message is found and read in a second that nobody has asked about;
* get: the same for others of that second, the median, and beside it the most of 99 %;
* look: a thousand of its messages are looked up together, the time for each;
* search: all that is pending in an hour, in one wheel or shared out among three, is searched for a
  key that no message has, with the topic that all have, page by page. In elapsed time and in CPU
  time: the least of several times.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import WheelId
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.node_state import Spare
from delaywheel.storage.frames.columns import Columns, content_starts
from delaywheel.storage.frames.kinds import Kind
from delaywheel_replica.core.protocol.frames import NO_FRAMES
from delaywheel_replica.server.lookup.filters import Wanted
from delaywheel_replica.server.lookup.references import Reference
from delaywheel_replica.server.lookup.scan import Scanner
from delaywheel_replica.server.lookup.search import Asked, NodeHoldings, PageStart, Walk
from delaywheel_replica.server.store.store import Store, StoreLimits

VALUE_BYTES = 100
GROUP = 1_000
SPAN_S = 3_600
GETS = 2_000
_START_SLOT = 1_800_000_000
_SEARCHES = 5


class Filled:
    """A data folder with some wheels in it.

    Attributes:
        limits: The last frame of each wheel.
        ids: The ids of all messages, in the order of acceptance: (n, 16).
    """

    def __init__(self, data: Path, slots: NDArray[np.int64], *, wheels: int = 1) -> None:
        """Fills it with messages of these seconds, in groups, one wheel after the other."""
        limits = StoreLimits(2 * SPAN_S, 2 * SPAN_S, recent_bytes=1)
        store = Store.open(
            PosixDisk(), data, node="n1", cluster_id="c", boot_id="boot", limits=limits
        )
        self.ids = np.frombuffer(os.urandom(16 * len(slots)), np.uint8).reshape(-1, 16)
        self.limits: dict[WheelId, int] = {}
        for number, places in enumerate(np.array_split(np.arange(len(slots)), wheels), 1):
            wheel = WheelId("n1", number)
            store.open_wheel(Spare(wheel, 0, {"n1": store.state.storage}, 1))
            for begin in range(0, len(places), GROUP):
                part = places[begin : begin + GROUP]
                store.append(
                    _columns(slots[part], self.ids[part]), Kind.MESSAGES, _START_SLOT * 1000
                )
                if begin // GROUP % 64 == 63:
                    store.checkpoint(lambda _wheel, _seq: None)
            store.checkpoint(lambda _wheel, _seq: None)
            self.limits[wheel] = store.last_seq
            store.leave_wheel()
        self.slots = slots
        store.release()


class Dial:
    """All seconds of the span, as a dial lists them."""

    def rows(self, first: int, end: int | None = None) -> NDArray[np.void]:
        """Returns those in [first, end)."""
        slots = np.arange(max(first, _START_SLOT), min(end or 1 << 32, _START_SLOT + SPAN_S))
        rows = np.zeros(len(slots), [("slot", "<i8")])
        rows["slot"] = slots
        return rows


def _columns(slots: NDArray[np.int64], ids: NDArray[np.uint8]) -> Columns:
    rows, key_bytes = len(slots), 8
    return Columns(
        due_ms=slots * 1000 + np.arange(rows) % 1000,
        ids=ids,
        topics=("orders",),
        topic_numbers=np.zeros(rows, np.uint32),
        key_lengths=np.full(rows, key_bytes, np.int32),
        value_lengths=np.full(rows, VALUE_BYTES, np.int32),
        headers_lengths=np.zeros(rows, np.int32),
        partitions=np.full(rows, -1, np.int32),
        timestamps_ms=np.full(rows, -1, np.int64),
        blob=memoryview(bytes((key_bytes + VALUE_BYTES) * rows)),
        starts=content_starts(np.full(rows, key_bytes + VALUE_BYTES, np.int64)),
    )


def gets(data: Path, messages: int) -> Iterator[str]:
    """Measures lookups in a second with this many messages."""
    filled = Filled(data, np.full(messages, _START_SLOT))
    scanner, limits = Scanner(PosixDisk(), data), filled.limits
    random = np.random.default_rng(1)
    costs = []
    for number in random.integers(0, messages, GETS + 1).tolist():
        reference = Reference(_START_SLOT, filled.ids[number].tobytes(), "orders", None)
        began_s = time.perf_counter()
        (found,) = scanner.find_many([reference], limits)
        frame = scanner.frame(_START_SLOT, found.copies[0])
        costs.append((time.perf_counter() - began_s) * 1e3)
        assert frame is not None
    many = [
        Reference(_START_SLOT, filled.ids[number].tobytes(), "orders", None)
        for number in random.integers(0, messages, GROUP).tolist()
    ]
    began_s = time.perf_counter()
    assert all(found.copies for found in scanner.find_many(many, limits))
    each_us = (time.perf_counter() - began_s) * 1e6 / GROUP
    later = sorted(costs[1:])
    yield f"{messages:>10,} {costs[0]:>9.2f} {statistics.median(later):>7.3f}"
    yield f" {later[len(later) * 99 // 100]:>7.3f} {each_us:>8.1f}"


def search(data: Path, pending: int, wheels: int) -> str:
    """Measures searches through this many messages."""
    slots = _START_SLOT + np.random.default_rng(1).integers(0, SPAN_S, pending)
    filled = Filled(data, slots, wheels=wheels)
    walk = Walk(Scanner(PosixDisk(), data), Dial())  # type: ignore[arg-type]
    held = NodeHoldings(filled.limits, None, NO_FRAMES)
    elapsed_s, cpu_s = [], []
    for _ in range(_SEARCHES):
        began_s, used_s = time.perf_counter(), time.process_time()
        pages = _pages(walk, held, pending)
        elapsed_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - used_s)
    return (
        f"{pending:>10,} {wheels:>6} {sum(filled.limits.values()):>10,} {min(elapsed_s):>10.2f}"
        f" {min(cpu_s):>7.2f} {min(cpu_s) * 1e6 / pending:>8.2f} {pages:>6}"
    )


def _pages(walk: Walk, held: NodeHoldings, pending: int) -> int:
    """Searches for what is not there; returns in how many pages."""
    asked, place, pages, looked = Asked(Wanted(topic="orders", key=b"mine")), PageStart(0), 0, 0
    while True:
        page = walk.page(asked, place, held)
        pages, looked = pages + 1, looked + page.read_messages
        assert page.complete
        assert not page.messages
        if page.next is None:
            assert looked == pending
            return pages
        place = page.next


def main() -> None:
    """Runs the requested measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", default="100,100000", help="of a second, or none")
    parser.add_argument("--pending", default="1m", help="messages in an hour, or none")
    parser.add_argument("--wheels", default="1,3", help="that these lie in")
    parser.add_argument("--folder", type=Path, help="where to make the data folders")
    arguments = parser.parse_args()
    data = Path(tempfile.mkdtemp(prefix="lookup-", dir=arguments.folder))
    try:
        print("  messages  first ms  get ms   99 %  look us")
        for amount in filter(None, arguments.messages.split(",")):
            print("".join(gets(data / amount, int(amount))), flush=True)
        print("   pending wheels     frames  elapsed s   CPU s  us each  pages")
        for amount in filter(None, arguments.pending.split(",")):
            for wheels in map(int, arguments.wheels.split(",")):
                folder, pending = data / f"p{amount}{wheels}", int(amount.replace("m", "000000"))
                print(search(folder, pending, wheels), flush=True)
                shutil.rmtree(folder)
    finally:
        shutil.rmtree(data, ignore_errors=True)


if __name__ == "__main__":
    main()
