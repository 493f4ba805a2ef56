"""kill -9 at any point: nothing acknowledged is missing in the ledger, and nothing is twice.

With a process that ends before every step in turn, of the place and of the disk (3 s), and with a
real one that is killed while callers send and the books publish (some 10 s).
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path

import grpc
import pyarrow.parquet as pq
import pytest

from delaywheel.storage.files.wheel_folder import list_wheels
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.frames.format import Frame
from delaywheel.storage.frames.kinds import Kind
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.server.ledger.notes import Notes
from sim.machine.disk import Crash, Fault, SimulatedDisk
from support.server.server_process import ServerProcess
from support.services.waiting import wait_until
from support.wheels.books import ACCEPTED_AT_MS, WHEEL, Bench, Died
from support.wheels.messages import BASE_SLOT, message

LATER_MS = ACCEPTED_AT_MS + 3_600_000
KILLS = 3
_NAME = re.compile(r"(.+)-(\d{19})-(\d{19})(?:-\d{10}-\d{10})?\.parquet")

LIFE: tuple[Callable[[Bench], object], ...] = (
    lambda bench: bench.write(message(1), message(2, slot=BASE_SLOT + 1)),
    lambda bench: bench.books.work(),
    lambda bench: bench.write(message(1), kind=Kind.CANCELS),
    lambda bench: bench.books.work(),
    lambda bench: bench.write(message(3), enter=False),
    lambda bench: bench.write(message(4), at_ms=LATER_MS),
    lambda bench: bench.write(
        *[message(n, slot=BASE_SLOT + n) for n in range(5, 9)], at_ms=LATER_MS
    ),
    lambda bench: bench.books.work(),
    lambda bench: bench.write(message(9), at_ms=LATER_MS),
    lambda bench: bench.books.work(),
)
"""The steps of a wheel and its books; the process may end in each of them."""


def test_what_is_noted_outlives_the_machine_with_its_folder() -> None:
    disk, data = SimulatedDisk(), Path("/data")
    disk.make_folder(data)
    Notes(disk, data).place(WHEEL, 7)
    disk.lose_unsynced()
    assert Notes(disk, data).placed(WHEEL) == 7


def test_what_an_earlier_process_noted_outlives_the_machine_once_it_was_read() -> None:
    """It died behind the rename: what was deleted since would count as lost otherwise."""
    disk, data = SimulatedDisk(), Path("/data")
    disk.make_folder(data)
    notes = Notes(disk, data)
    notes.place(WHEEL, 7)
    disk.faults.append(Fault("sync", path_part="books.json"))
    with pytest.raises(OSError, match="Input/output"):
        notes.place(WHEEL, 9)
    assert Notes(disk, data).placed(WHEEL) == 9
    disk.lose_unsynced()
    assert Notes(disk, data).placed(WHEEL) == 9


def ranges(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """The names of each wheel, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for path in folder.rglob("*.parquet"):
        match = _NAME.fullmatch(path.name)
        assert match is not None
        found.setdefault(match[1], []).append((int(match[2]), int(match[3])))
    return {wheel: sorted(names) for wheel, names in found.items()}


def check_names(folder: Path) -> None:
    for names in ranges(folder).values():
        assert names[0][0] == 1
        assert all(before[1] + 1 == after[0] for before, after in pairwise(names))


def check(bench: Bench) -> None:
    assert bench.rows() == bench.all_written()
    check_names(bench.folder)
    assert bench.published == {WHEEL: bench.high_watermark}


def test_the_process_may_end_at_any_step_of_the_place(tmp_path: Path) -> None:
    for step in count():
        bench = Bench(tmp_path / str(step))
        bench.place.dies_before_step = step
        has_died = False
        for event in LIFE:
            try:
                event(bench)
            except Died:
                has_died = True
                bench.restart()
        if has_died:
            bench.books.work()
        check(bench)
        if not has_died:
            break
    assert step > 15


def test_the_process_may_end_at_any_effect_on_the_disk(tmp_path: Path) -> None:
    for torn_share in (0.0, 0.5):
        for effect in count():
            folder = tmp_path / f"{torn_share}-{effect}"
            disk = SimulatedDisk()
            bench = Bench(Path("/data"), disk=disk, folder=folder)
            disk.crash_after(effect, torn_share=torn_share)
            has_died = False
            try:
                for event in LIFE:
                    event(bench)
            except Crash:
                has_died = True
            disk.restart()
            bench.restart()
            bench.books.work()
            if bench.high_watermark:
                check(bench)
            if not has_died:
                break
        assert effect > 40


def test_a_real_process_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "n1")
    acknowledged: set[str] = set()
    try:
        for kill in range(KILLS):
            server.start()
            server.wait_accepting()
            _send_until_killed(server, acknowledged, files=kill)
        server.start()
        server.wait_accepting()
        wait_until("all are closed", lambda: _open_wheels(server) <= {f"n1.{KILLS + 1}"})
        assert server.terminate() == 0
    finally:
        server.kill()
    folder = server.data / "ledger" / "published"
    stored, entered = _stored(server.data), _entered(folder)
    assert len(acknowledged) > 200
    assert acknowledged <= {id_.hex() for id_, *_ in entered}
    assert entered == stored
    assert max(entered.values()) == 1
    check_names(folder)
    assert len(ranges(folder)) == KILLS


def _send_until_killed(server: ServerProcess, acknowledged: set[str], *, files: int) -> None:
    """The kill comes at any moment once the open wheel has this many files."""
    ended, before = threading.Event(), len(acknowledged)
    wheel = next(row.wheel for row in server.describe().wheels if row.state == pb.WHEEL_STATE_OPEN)
    folder = server.data / "ledger" / "published"

    def call() -> None:
        while not ended.is_set():
            due_ms = time.time_ns() // 1_000_000 + 60_000
            rows = [
                pb.DelayedMessage(
                    topic="orders", value=b"v", id=os.urandom(16), deliver_at_ms=due_ms + 900 * n
                )
                for n in range(5)
            ]
            try:
                results = server.produce(*rows)
            except grpc.RpcError:
                return
            acknowledged.update(result.handle.split(":")[2] for result in results)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    wait_until("some are acknowledged", lambda: len(acknowledged) > before + 100)
    wait_until("some are published", lambda: len(ranges(folder).get(wheel, ())) >= files)
    server.process.send_signal(signal.SIGKILL)
    ended.set()
    for caller in callers:
        caller.join()
    server.kill()


def _open_wheels(server: ServerProcess) -> set[str]:
    """The open wheels, without spares."""
    heartbeat = server.cleaner.heartbeat()
    wheels = server.cleaner.state.wheels.items()
    spare = None if heartbeat is None else heartbeat.spare
    return {str(wheel) for wheel, record in wheels if record.closed_at is None and wheel != spare}


Entry = tuple[bytes, int, int, str, str, int]


def _stored(data: Path) -> Counter[Entry]:
    """Every row of every frame."""
    disk, found = PosixDisk(), Counter[Entry]()
    for wheel in list_wheels(disk, data):
        reader = WheelReader(disk, data, wheel)
        for seq in range(1, reader.last_seq() + 1):
            frame = reader.frame(seq)
            assert isinstance(frame, Frame)
            columns = frame.columns
            for id_, due_ms in zip(columns.ids, columns.due_ms.tolist(), strict=True):
                found[id_.tobytes(), due_ms, frame.accepted_at_ms, "orders", str(wheel), seq] += 1
        reader.close()
    return found


def _entered(folder: Path) -> Counter[Entry]:
    tables = [pq.ParquetFile(path).read() for path in folder.rglob("*.parquet")]
    return Counter(tuple(row.values()) for table in tables for row in table.to_pylist())
