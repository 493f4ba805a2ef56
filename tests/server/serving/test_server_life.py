"""The server process through its lives: kill -9, no Kafka, draining, fences, the floor."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow.parquet as pq
import pytest

from delaywheel.identity import WheelId
from delaywheel.storage.files.wheel_folder import WheelState, list_wheels, load_meta
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel.storage.folder.node_file import load_node_state
from delaywheel.storage.frames.format import Frame, decode_header
from delaywheel.storage.reading.reader import WheelReader
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.core.protocol.heartbeat import WheelHeartbeat
from delaywheel_replica.link import AskTopic, StopRequested
from delaywheel_replica.server import serving
from support.server.server_process import ServerProcess
from support.services.waiting import wait_until
from support.wheels.wheels import mark_wheel

ONE, TWO, THREE = (WheelId("n1", number) for number in (1, 2, 3))
CLEANER_STOP_S = serving._CLEANER_STOP_S


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def row(id_: bytes | None = None, *, due_ms: int | None = None) -> pb.DelayedMessage:
    return pb.DelayedMessage(
        topic="orders",
        value=b"v",
        id=id_ if id_ is not None else os.urandom(16),
        deliver_at_ms=due_ms if due_ms is not None else now_ms() + 60_000,
    )


def stored_ids(data: Path) -> list[bytes]:
    disk = PosixDisk()
    ids = []
    for wheel in list_wheels(disk, data):
        reader = WheelReader(disk, data, wheel)
        for seq in range(1, reader.last_seq() + 1):
            frame = reader.frame(seq)
            assert isinstance(frame, Frame)
            ids += [id_.tobytes() for id_ in frame.columns.ids]
        reader.close()
    return ids


def last_seq(data: Path, wheel: WheelId) -> int:
    reader = WheelReader(PosixDisk(), data, wheel)
    try:
        return reader.last_seq()
    finally:
        reader.close()


def published(data: Path) -> list[bytes]:
    files = (data / "ledger" / "published").rglob("*.parquet")
    ids: list[bytes] = []
    for file in files:
        ids += pq.read_table(file)["id"].to_pylist()  # type: ignore[arg-type]  # never null here
    return ids


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path / "n1", late_window_seconds="1")
    server.start()
    server.wait_accepting()
    yield server
    server.kill()


def state(server: ServerProcess) -> Any:
    return load_node_state(PosixDisk(), server.data)


def test_draining_answers_those_who_wait_and_refuses_the_rest(server: ServerProcess) -> None:
    wait_until("a spare", lambda: state(server).spare is not None)
    server.cleaner.answers_topics = False
    waits = [row(), pb.DelayedMessage(topic="in-doubt", delay_ms=60_000)]
    slow = server.stub.DelayProduce.future(pb.DelayProduceRequest(messages=waits), timeout=20)
    wait_until("it waits", lambda: AskTopic("in-doubt") in server.cleaner.received)
    reasons: list[str] = []
    ended = threading.Event()

    def caller() -> None:
        while not ended.is_set():
            try:
                server.produce(row())
            except grpc.RpcError as error:
                reasons.append(str(error))
                return

    thread = threading.Thread(target=caller)
    thread.start()
    with server.cleaner.deaf():  # it drains until its cleaner knows of it
        server.process.send_signal(signal.SIGTERM)
        wait_until("it refuses", lambda: reasons)
    code = server.process.wait(60)
    ended.set()
    thread.join()
    server.kill()
    assert code == 0
    assert all(result.handle for result in slow.result().results)
    assert "The node is stopping" in reasons[0]
    # The wheel is closed with all that was acknowledged, and its spare is kept for the next start.
    assert server.cleaner.state.wheels[ONE].closed_at == last_seq(server.data, ONE)
    assert server.cleaner.state.wheels[TWO].closed_at is None
    assert (state(server).open, state(server).spare.wheel) == (None, TWO)
    assert set(published(server.data)) == set(stored_ids(server.data))


def test_a_cleaner_that_was_busy_hears_of_a_clean_stop(server: ServerProcess) -> None:
    """Kafka is slow: the link is full of wake-ups, and is not read for a while."""
    server.produce(row())  # from now on the topic is known to exist
    with server.cleaner.deaf():
        sent = [server.produce(row(due_ms=now_ms() + 100)) for _ in range(400)]
        taken = sum(bool(result.handle) for (result,) in sent)  # but for those that came too late
        assert taken > 300
        server.process.send_signal(signal.SIGTERM)
        wait_until("it has left its wheel", lambda: state(server).open is None)
        time.sleep(2)  # longer than one try to be heard may take
    wait_until("stopped", server.cleaner.stopped.is_set)
    assert server.process.wait(60) == 0
    assert server.cleaner.state.wheels[ONE].closed_at == 1 + taken


def test_a_clean_stop_without_a_cleaner_ends_all_the_same(server: ServerProcess) -> None:
    server.cleaner.stop()
    started = time.monotonic()
    assert server.terminate() == 0
    assert time.monotonic() - started < CLEANER_STOP_S, "it waited for one that is gone"


_CALLS_END = """
import asyncio, sys
from delaywheel_replica.server.listening import GrpcListener
from delaywheel_replica.server.main import main
async def until_ended(_):
    await asyncio.sleep(1)
GrpcListener.until_ended = until_ended
sys.exit(main())
"""


def test_a_server_whose_grpc_has_ended_ends_without_telling_its_cleaner(tmp_path: Path) -> None:
    """The supervisor, which knows of no stop, would start the cleaner again and again."""
    server = ServerProcess(tmp_path / "n1")
    server.program = "-c", _CALLS_END
    with server:
        assert server.process.wait(60) == 1
        assert StopRequested() not in server.cleaner.received


def test_below_the_floor_everything_goes(server: ServerProcess) -> None:
    due = now_ms() + 20_000
    server.produce(row(due_ms=due), row(due_ms=due + 60_000))
    files = {file.stem: file for file in (server.data / "wheels").rglob("*.slot")}
    first, second = str(due // 1000), str(due // 1000 + 60)
    assert set(files) == {first, second}
    server.cleaner.commit_progress(floor=due // 1000 + 1)
    wait_until("deleted", lambda: not files[first].exists())
    assert files[second].exists()
    listed = wait_until(
        "off the dial",
        lambda: [
            row.slot
            for row in server.stub.ListSlots(pb.ListSlotsRequest()).slots
            if not files[first].exists()
        ],
    )
    wait_until(
        "off the dial",
        lambda: (
            [row.slot for row in server.stub.ListSlots(pb.ListSlotsRequest()).slots]
            == [due // 1000 + 60]
        ),
    )
    assert int(second) in listed
    # A restart knows the floor from the cleaner's row, though Kafka is away.
    server.kill()
    server.start(leads=False)
    rows = server.stub.ListSlots(pb.ListSlotsRequest(), wait_for_ready=True).slots
    assert [row.slot for row in rows] == [due // 1000 + 60]


@pytest.mark.parametrize("noted", [True, False])
def test_frames_of_a_closed_wheel_that_a_crash_of_the_machine_took_hold_up_nothing(
    server: ServerProcess, *, noted: bool
) -> None:
    """The node alone held them: waiting for another to bring them would never end."""
    for _ in range(3):
        server.produce(row())
    server.kill()
    server.start()  # with the next wheel; the first is closed at 3
    wait_until("closed", lambda: _final_seq(server) == 3)
    server.kill()
    folder = server.data / "wheels" / "n1.1"
    (folder / "checkpoint").unlink(missing_ok=True)
    (folder / "index.0").write_bytes((folder / "index.0").read_bytes()[:16])
    for file in (folder / "slots").rglob("*.slot"):
        _cut_behind_the_first_frame(file)
    shutil.rmtree(server.data / "ledger")  # not published yet
    if not noted:
        mark_wheel(PosixDisk(), server.data, ONE, WheelState.OPEN)
    _change_boot(server)
    server.start()
    wait_until("they are lost", lambda: {(ONE, 2), (ONE, 3)} <= server.cleaner.state.lost)
    wait_until("nothing is waited for", lambda: not _reported(server).missing)
    wait_until("its end is noted", lambda: _final_seq(server) == 3)
    wait_until("the books go on", lambda: _is_published(server, 3))


def test_the_supervisors_end_ends_it(server: ServerProcess) -> None:
    os.close(server.life_write)
    server.life_write = -1
    assert server.process.wait(60) == 111


def _change_boot(server: ServerProcess) -> None:
    """The machine restarts, as far as the node can see."""
    file = server.data / "node.json"
    document = json.loads(file.read_text())
    document["boot_id"] = "another"
    file.write_text(json.dumps(document))
    (server.data / "cleaner.row").unlink()  # it would be of that boot, too


def _cut_behind_the_first_frame(slot_file: Path) -> None:
    content = slot_file.read_bytes()
    header = decode_header(content, available_bytes=len(content))
    slot_file.write_bytes(content[: header.length_bytes] if header.seq == 1 else b"")


def _final_seq(server: ServerProcess) -> int | None:
    return load_meta(PosixDisk(), server.data, ONE).final_seq


def _is_published(server: ServerProcess, seq: int) -> bool:
    heartbeat = server.cleaner.heartbeat()
    return heartbeat is not None and heartbeat.wheels[ONE].ledger_seq == seq


def _reported(server: ServerProcess) -> WheelHeartbeat:
    heartbeat = server.cleaner.heartbeat()
    assert heartbeat is not None
    return heartbeat.wheels[ONE]
