"""A cleaner without Kafka: registers wheels, closes them, and commits as the test says.

Of several nodes one leads, and the others follow its `state`; it closes no wheels then.

It speaks to the server as the real one does: through `cleaner.row` and the link. What it would
have committed to the control topic is its `state`; a test may change it.

Its row is stamped ahead while it lives, and is old once it has stopped: that a test did not come to
its thread for a second is not to look like a cleaner that has died.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from delaywheel.identity import WheelId
from delaywheel.storage.folder.boot import read_boot_id
from delaywheel.storage.folder.status_file import RowReader, RowWriter
from delaywheel_replica.core.leader.closing import wheels_to_close
from delaywheel_replica.core.leader.lost_frames import Sought, frames_lost, frames_missing
from delaywheel_replica.core.leader.registration import RegistrationRefusal, register
from delaywheel_replica.core.protocol.codec import from_json, to_json
from delaywheel_replica.core.protocol.control import (
    ControlState,
    Leader,
    WheelRecord,
    lost_records,
    node_record,
    reschedule_record,
)
from delaywheel_replica.core.protocol.frames import NO_FRAMES
from delaywheel_replica.core.protocol.heartbeat import Fence, Heartbeat, Promise
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.core.protocol.reschedules import (
    Reschedule,
    RescheduleProposal,
    RescheduleWritten,
)
from delaywheel_replica.core.protocol.status_files import (
    CLEANER_FRESH_MS,
    CleanerStatus,
    Role,
    ServerStatus,
)
from delaywheel_replica.link import (
    AskTopic,
    DeadLetter,
    DeadLettered,
    Link,
    LinkMessage,
    NodeStorage,
    StopRequested,
    TopicInfo,
    Topics,
    Wake,
)

STAYS_FRESH_MS = 60_000
"""Longer than any test is kept waiting."""


class FakeCleaner:
    """Runs on a thread of the test.

    Attributes:
        node: Whose it is.
        nodes: How many there are; all are members of all wheels.
        follows: Leads, and what it commits is reported here as well; None: this one leads.
        registers: Gives wheels to nodes that want one.
        members: Of new wheels, beside the node itself.
        min_insync: W of new wheels.
        role: What it says that it does.
        kafka_error: What it says is wrong.
        topics: What Kafka has; anything else is absent.
        answers_topics: Whether it answers questions about topics at all.
        passes_time: Commits w again and again, as a leader does: seals follow it.
        received: Every message that came through the link.
        dead_lettered: Messages that it has counted as dead letters.
    """

    def __init__(
        self, data: Path, link_fd: int, node: str = "n1", *, row: Path | None = None
    ) -> None:
        """Prepares; `start` starts it; the server's status may be elsewhere than in its folder."""
        self.node = node
        self.nodes = 1
        self.follows: FakeCleaner | None = None
        self.registers = True
        self.members: dict[str, str] = {}
        self.min_insync = 1
        self.role = Role.LEADING
        self.kafka_error: str | None = None
        self.topics = {"orders": TopicInfo(3, 1_000_000)}
        self.answers_topics = True
        self.passes_time = False
        self.received: list[LinkMessage] = []
        self.dead_lettered = 0
        now_ms = time.time_ns() // 1_000_000
        self._started_ms = now_ms
        self.state = ControlState(progress=Progress(now_ms - 1_000, None, {}, 0))
        self.stopped = threading.Event()
        self._link = Link(link_fd)
        self._server_row = RowReader(row or data / "server.row", partial(from_json, ServerStatus))
        self._row = RowWriter(data / "cleaner.row")
        self._boot = read_boot_id(data)
        self._lock = threading.Lock()
        self._fences: dict[str, Fence] = {}
        self._missing = NO_FRAMES
        self._ended = threading.Event()
        self._hears = threading.Event()
        self._hears.set()
        self._waits = threading.Event()
        self._stays_fresh_ms = STAYS_FRESH_MS
        self._thread = threading.Thread(target=self._live, name="fake cleaner", daemon=True)

    def start(self) -> None:
        """Begins to lead."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, if it still runs."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._link.close()

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Meanwhile it reads nothing of the link, like one whose call to Kafka takes long."""
        self._waits.clear()
        self._hears.clear()
        assert self._waits.wait(30)  # it may be about to read
        try:
            yield
        finally:
            self._hears.set()

    def commit(self, change: Callable[[ControlState], ControlState]) -> None:
        """Changes the committed state, and informs the server."""
        with self._lock:
            self.state = change(self.state)
            self._write_row()
        self._link.send(Wake())

    def report_topics(self, *absent: str) -> None:
        """Reports unasked which topics Kafka has, and that it lacks these.

        An answer to a question counts only if it comes in time. The server hears this before any
        call that is made from now on, and does not forget it.
        """
        self._link.send(
            Topics(
                topics=self.topics,
                absent=absent,
                checked_at_ms=time.monotonic_ns() // 1_000_000 + STAYS_FRESH_MS,
            )
        )

    def commit_progress(self, **changes: object) -> None:
        """Commits another progress."""

        def moved(state: ControlState) -> ControlState:
            assert state.progress is not None
            return replace(state, progress=replace(state.progress, **changes))  # type: ignore[arg-type]

        self.commit(moved)

    def commit_dead(self, *letters: DeadLetter, reported: bool = True, **changes: object) -> None:
        """Commits another progress, and these messages as dead letters.

        Args:
            letters: They.
            reported: Whether the server hears of them; False: the link was full.
            changes: Of the progress.
        """
        before = self.dead_lettered
        if reported:
            self._link.send(DeadLettered(self._started_ms, before, letters))
        self.dead_lettered = before + len(letters)
        self.commit_progress(**changes)

    def server_status(self) -> ServerStatus | None:
        """The newest row of the server."""
        return self._server_row.read()

    def heartbeat(self) -> Heartbeat | None:
        """The newest of the server."""
        status = self.server_status()
        return None if status is None else status.heartbeat

    def fence(self, node: str, upto: int) -> None:
        """Requests a promise, and no further one about this node."""
        self._fences[node] = Fence(node, upto)
        self._link.send(Wake())

    def fenced(self, node: str, upto: int) -> Promise | None:
        """The answer to a fence, once it exists."""
        status = self.server_status()
        answers = () if status is None else status.answers
        wanted = (a for a in answers if a.fence.origin == node and a.fence.upto >= upto)
        return next(wanted, None)

    def _live(self) -> None:
        self._run()
        with self._lock:
            self._stays_fresh_ms = -CLEANER_FRESH_MS
            self._write_row()
        self._link.close()  # the server sees that its cleaner has ended

    def _run(self) -> None:
        while not self._ended.is_set():
            if not self._hears.is_set():
                self._waits.set()
                self._hears.wait(0.02)
            elif select.select([self._link], [], [], 0.02)[0]:
                try:
                    for message in self._link.receive():
                        self.received.append(message)
                        self._take(message)
                except EOFError:
                    return
            status = self.server_status()
            with self._lock:
                if self.follows is not None:
                    self.state = self.follows.state
                elif status is not None and self.nodes > 1:
                    self._register_all(status)
                elif status is not None:
                    self._register(status.heartbeat)
                    self._close(status.heartbeat)
                    self._lose(status)
                self._write_row()
                if self.stopped.is_set() and not self._open_wheels():
                    return

    def _take(self, message: LinkMessage) -> None:
        if isinstance(message, AskTopic) and self.answers_topics:
            info = self.topics.get(message.name)
            self._link.send(
                Topics(
                    topics={} if info is None else {message.name: info},
                    absent=() if info is not None else (message.name,),
                    checked_at_ms=time.monotonic_ns() // 1_000_000,
                )
            )
        elif isinstance(message, NodeStorage):
            with self._lock:
                known = self.state.nodes[message.node]
                record = known.on(message.storage)
                self.state = self.state.apply_all([node_record(message.node, record)])
        elif isinstance(message, RescheduleProposal):
            with self._lock:
                progress = self.state.progress
                is_to_come = progress is None or message.to_ms > progress.due_ms + 1
                if message.key not in self.state.reschedules and is_to_come:
                    reschedule = Reschedule(message.to_ms, message.place)
                    self.state = self.state.apply_all([reschedule_record(message.key, reschedule)])
        elif isinstance(message, RescheduleWritten):
            with self._lock:
                self.state = self.state.apply_all([reschedule_record(message.key, None)])
        elif isinstance(message, StopRequested):
            self.stopped.set()

    def _register(self, heartbeat: Heartbeat) -> None:
        if not self.registers or heartbeat.spare is not None or heartbeat.draining:
            return
        registered = register(
            self.state,
            heartbeat.node,
            heartbeat.storage,
            heartbeat.last_number,
            saves=heartbeat.saves,
            members={heartbeat.node: heartbeat.storage, **self.members},
            min_insync=self.min_insync,
            floor=self.state.progress.floor if self.state.progress is not None else 0,
        )
        if not isinstance(registered, RegistrationRefusal) and registered.records:
            self.state = self.state.apply_all(registered.records)
            self._link.send(Wake())

    def _register_all(self, status: ServerStatus) -> None:
        """Waits until all are received."""
        heartbeats = [status.heartbeat, *(known.heartbeat for known in status.peers.values())]
        if len(heartbeats) == self.nodes:
            self.members = {heartbeat.node: heartbeat.storage for heartbeat in heartbeats}
            for heartbeat in heartbeats:
                self._register(heartbeat)

    def _close(self, heartbeat: Heartbeat) -> None:
        """Requests a fence of each wheel to be closed, and closes it at the answer."""
        for wheel in wheels_to_close(self.state, {heartbeat.node: heartbeat}):
            answer = self.fenced(wheel.node, wheel.number)
            if answer is None:
                self.fence(wheel.node, wheel.number)
                continue
            self._change(wheel, closed_at=answer.applied.get(wheel, 0))

    def _lose(self, status: ServerStatus) -> None:
        """Commits frames as lost that should exist, and that the only member is missing."""
        heartbeats = {status.heartbeat.node: status.heartbeat}
        ends = {wheel: record.closed_at or 0 for wheel, record in self.state.wheels.items()}
        self._missing = frames_missing(self.state, ends, heartbeats)
        node, answers = status.heartbeat.node, status.answers
        sought = Sought(node, heartbeats, answers, status.looked_for, status.lacks)
        lost = frames_lost(self.state, ends, sought)
        self.state = self.state.apply_all(lost_records(self.state, lost))

    def _change(self, wheel: WheelId, *, closed_at: int) -> None:
        record: WheelRecord = replace(self.state.wheels[wheel], closed_at=closed_at)
        self.state = replace(self.state, wheels={**self.state.wheels, wheel: record})
        self._write_row()
        self._link.send(Wake())

    def _open_wheels(self) -> list[WheelId]:
        heartbeat = self.heartbeat()
        return (
            wheels_to_close(self.state, {heartbeat.node: heartbeat})
            if heartbeat is not None
            else []
        )

    def _write_row(self) -> None:
        leads = self.role is Role.LEADING and self.follows is None
        if self.passes_time and self.state.progress is not None:
            progress = replace(self.state.progress, due_ms=time.time_ns() // 1_000_000)
            self.state = replace(self.state, progress=progress)
        status = CleanerStatus(
            node=self.node,
            boot=self._boot,
            pid=os.getpid(),
            monotonic_ms=time.monotonic_ns() // 1_000_000 + self._stays_fresh_ms,
            wall_ms=time.time_ns() // 1_000_000,
            role=Role.STANDBY if self.follows is not None else self.role,
            epoch=7 if leads else None,
            leader=Leader(self.node, 7) if leads else None,
            progress=self.state.progress,
            control_offset=7,
            wheels=self.state.wheels,
            nodes=self.state.nodes,
            kafka_error=self.kafka_error,
            started_ms=self._started_ms,
            counters={"dead_lettered": self.dead_lettered},
            fences=tuple(self._fences.values()),
            unreadable=self._missing,
            lost=self.state.lost,
            reschedules=self.state.reschedules,
            needs=self.state.needs,
        )
        self._row.write(to_json(status))
