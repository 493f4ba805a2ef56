"""A cleaner in this process, on the real broker, beside a fake server.

The pretended server does what matters to a cleaner: it opens registered wheels, writes messages
into real slot files, writes its heartbeat to `server.row` and answers fences.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self
from unittest.mock import patch
from uuid import uuid4

from delaywheel.identity import WheelId
from delaywheel.storage.folder.boot import read_boot_id
from delaywheel.storage.folder.status_file import RowReader, RowWriter
from delaywheel_replica.cleaner.main import Cleaner
from delaywheel_replica.config_sources import load_config
from delaywheel_replica.core.protocol import status_files
from delaywheel_replica.core.protocol.codec import from_json, to_json
from delaywheel_replica.core.protocol.control import CONTROL_VERSION
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise, WheelHeartbeat
from delaywheel_replica.core.protocol.status_files import CleanerStatus, Role, ServerStatus
from delaywheel_replica.link import Link, StopRequested, Wake
from support.due.wheels import Sent, Wheels, Written

NODE = "n1"
STORAGE = "0" * 32
BEAT_S = 0.05
SILENCE_MS = 10_000
"""How long the server may be silent. It runs in the cleaner's own process: a busy machine stops
both for longer than the half second of nodes, and a leader would step down for that."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def sent(topic: str, in_ms: int, value: bytes | None = b"", **more: object) -> Sent:
    """One message that falls due after this long."""
    return Sent(now_ms() + in_ms, uuid4().bytes, topic, value=value, **more)  # type: ignore[arg-type]


class PretendedServer:
    """The server's side of one node."""

    def __init__(self, data: Path, link: Link, wheels: Wheels) -> None:
        self.draining = False
        self._link = link
        self._wheels = wheels
        self._boot = read_boot_id(data)
        self._row = RowWriter(data / "server.row")
        self._cleaner = RowReader(data / "cleaner.row", partial(from_json, CleanerStatus))
        self._open: WheelId | None = None
        self._spare: WheelId | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def status(self) -> CleanerStatus | None:
        """What the cleaner reports."""
        return self._cleaner.read()

    @property
    def has_wheels(self) -> bool:
        """Whether it has an open wheel and a spare."""
        with self._lock:
            return None not in {self._open, self._spare}

    def write(self, rows: Sequence[Sent]) -> list[Written]:
        """Accepts one group of messages."""
        with self._lock:
            assert self._open is not None, "no wheel is open"
            written = self._wheels.write(self._open, rows, now_ms=now_ms())
        self._report()
        return written

    def end(self) -> None:
        """Says nothing any more."""
        self._ended.set()
        self._thread.join()
        self._link.close()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._take_wheels()
            self._report()
            with contextlib.suppress(EOFError):
                for _ in self._link.receive():
                    """What the cleaner tells its server is nothing to these tests."""

    def _answers(self, seqs: Mapping[WheelId, int]) -> tuple[Promise, ...]:
        status = self.status()
        fences = () if status is None else status.fences
        return tuple(self._answer(fence, seqs) for fence in fences)

    def _answer(self, fence: Fence, seqs: Mapping[WheelId, int]) -> Promise:
        applied = {
            wheel: seq
            for wheel, seq in seqs.items()
            if wheel.node == fence.origin and wheel.number <= fence.upto
        }
        return Promise(NODE, STORAGE, fence, applied)

    def _take_wheels(self) -> None:
        status = self.status()
        if status is None:
            return
        with self._lock:
            known = self._last_number()
            new = [w for w, r in status.wheels.items() if w.number > known and r.closed_at is None]
            for wheel in sorted(new):
                if self._open is None:
                    self._open = wheel
                elif self._spare is None:
                    self._spare = wheel

    def _last_number(self) -> int:
        own = (self._open, self._spare)
        return max((wheel.number for wheel in own if wheel is not None), default=0)

    def _report(self) -> None:
        with self._lock:
            seqs = self._wheels.last_seqs()
            top_slots: dict[WheelId, int] = {}
            for frame in self._wheels.frames:
                top_slots[frame.wheel] = max(frame.slot, top_slots.get(frame.wheel, -1))
            seal_slot = now_ms() // 1000 - 5
            heartbeat = Heartbeat(
                node=NODE,
                storage=STORAGE,
                boot=self._boot,
                wall_ms=now_ms(),
                open=None if self.draining else self._open,
                spare=self._spare,
                last_number=self._last_number(),
                draining=self.draining,
                complete=True,
                control_version=CONTROL_VERSION,
                wheels={
                    wheel: WheelHeartbeat(
                        applied=seqs.get(wheel, 0),
                        high_watermark=seqs.get(wheel, 0),
                        seal_slot=seal_slot,
                        seal_seq=seqs.get(wheel, 0),
                        ledger_seq=seqs.get(wheel, 0),
                        top_slot=top_slots.get(wheel, -1),
                    )
                    for wheel in (self._open, self._spare)
                    if wheel is not None
                },
            )
            status = ServerStatus(
                heartbeat,
                os.getpid(),
                time.monotonic_ns() // 1_000_000,
                answers=self._answers(seqs),
            )
            self._row.write(to_json(status))
            self._link.send(Wake())


class World:
    """One node: a cleaner on a thread, and its fake server."""

    def __init__(
        self, bootstrap: str, data: Path, cluster_id: str, wheels: Wheels, **config: object
    ) -> None:
        data.mkdir(parents=True, exist_ok=True)
        self.config = load_config(
            flags={
                "cluster_id": cluster_id,
                "node_id": NODE,
                "data_dir": data,
                "late_window_seconds": 5,
                "kafka.bootstrap.servers": bootstrap,
                **config,
            }
        )
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mine = Link(mine.detach())
        self._its = Link(its.detach())
        self.server = PretendedServer(data, self._mine, wheels)
        self.failure: BaseException | None = None
        self._cleaner = Cleaner(self.config, self._its)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._silence = patch.object(status_files, "SERVER_FRESH_MS", SILENCE_MS)

    def __enter__(self) -> Self:
        self._silence.start()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.stop()
        finally:
            self._silence.stop()
        if error is None and self.failure is not None:
            raise self.failure

    @property
    def status(self) -> CleanerStatus:
        """What the cleaner reports now."""
        status = self.server.status()
        assert status is not None
        return status

    def wait_leading(self, *, timeout_s: float = 60) -> CleanerStatus:
        """Returns when the cleaner forwards and the server has a wheel and a spare."""
        return self.wait_for(
            "leading",
            lambda s: s.role is Role.LEADING and len(s.wheels) > 1 and self.server.has_wheels,
            timeout_s=timeout_s,
        )

    def wait_for(
        self, what: str, holds: Callable[[CleanerStatus], bool], *, timeout_s: float = 60
    ) -> CleanerStatus:
        """Waits until the cleaner's status satisfies the condition."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.server.status()
            if status is not None and holds(status):
                return status
            assert self.failure is None, self.failure
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}; {status}"
            time.sleep(0.01)

    def stop(self, *, timeout_s: float = 60) -> None:
        """Stops as a node does."""
        self.server.draining = True
        while self._thread.is_alive():
            self._mine.send(StopRequested())
            self._thread.join(0.2)
            timeout_s -= 0.2
            assert timeout_s > 0, "the cleaner did not stop"
        self.server.end()
        self._its.close()

    def _run(self) -> None:
        try:
            self._cleaner.run()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            self.failure = error
        finally:
            self._cleaner.close()
