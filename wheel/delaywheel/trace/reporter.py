"""Gathers events, and has them written to Kafka by a thread of its own; never in anybody's way.

| an event is | while | and then |
|---|---|---|
| gathered | in the columns of its kind: 1 s, or until there are 2,000, or 512 KiB | encoded |
| encoded | in the queue of the producer | acknowledged by Kafka, which is its end; or dropped |
| dropped | no room, Kafka refuses it or is away too long, the end comes first | counted, and the |
|   | | count is told with the next batch |

docs/TRACE.md, "A program's trace", says what becomes of them while Kafka is away, at the end, and
after a fork. `flush` has all that are gathered encoded at once, and waits for them, until its time
is over.

Callers add columns under a lock that is never held while anything is encoded or sent. The thread
starts with the first event. One line a minute, and one at the end, says how many were dropped, and
why the last one was; another that counts are not written, and why, until they are.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from math import inf
from threading import Condition, Thread
from typing import Any, Final, Protocol
from weakref import WeakSet

from delaywheel.ingress import counts_topic, trace_topic
from delaywheel.message import clock_ns
from delaywheel.trace.batch import BatchHead, Rows, encode
from delaywheel.trace.counts import Cell, CellKey, CountsPart, EndCounts, Sign

_LOG: Final = logging.getLogger("delaywheel.trace")

MOST_ROWS: Final = 2_000
MOST_BYTES: Final = 512 * 1024
"""Of a batch."""
GATHER_S: Final = 1.0
QUEUE_BYTES: Final = 8 * 1024 * 1024
CLOSE_S: Final = 2.0
ROW_BYTES: Final = 250
"""What an event takes, gathered or encoded, besides its texts, about."""

COUNT_S: Final = 10.0
"""How often counts are written that have changed."""
LIVE_S: Final = 60.0
"""How often a reporter that has counted says that it lives."""

_LOOK_AGAIN_S: Final = 10.0
_SAY_AGAIN_S: Final = 60.0
_POLL_S: Final = 0.05


class EventSink(Protocol):
    """Where events go."""

    def add(self, kind: str, rows: Rows, length_bytes: int) -> None:
        """Takes events of a kind, whose texts have so many bytes."""

    def drop(self, count: int, why: str) -> None:
        """Counts events that were dropped before."""

    def count(self, cells: Mapping[CellKey, Cell]) -> None:
        """Adds to the counts."""

    def begin_counts(self) -> CountsPart | None:
        """Returns a part of the counts that the caller writes itself; None: not known where."""

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was taken is written, or dropped; False on timeout."""


class TracePort(Protocol):
    """What a reporter needs of Kafka; used by one thread."""

    def clusters(self) -> list[str]:
        """Returns the clusters that have a topic for events; may block for 2 s. Else an OSError."""

    def has_topic(self, topic: str) -> bool:
        """Whether Kafka listed it when it was asked for the clusters."""

    def send(self, topic: str, key: bytes, value: bytes, on_end: Callable[[str], object]) -> None:
        """Has a record written; raises OSError if it is not taken.

        `on_end` is called in `poll`, with an error or with an empty text.
        """

    def poll(self, timeout_s: float) -> None:
        """Has `on_end` called of what has ended, and waits for that."""

    def close(self) -> None:
        """Drops what is not sent."""


@dataclass(slots=True)
class _Gathered:
    """Columns of one kind that become one batch, or a few."""

    kind: str
    rows: dict[str, list[Any]]
    count: int
    length_bytes: int
    since_s: float

    def add(self, rows: Rows, count: int, length_bytes: int) -> None:
        for name, column in self.rows.items():
            column.extend(rows[name])
        self.count += count
        self.length_bytes += length_bytes

    @property
    def is_full(self) -> bool:
        return self.count >= MOST_ROWS or self.length_bytes >= MOST_BYTES


class Reporter:
    """One run of one program, as a source of events. Thread-safe."""

    def __init__(
        self,
        port: Callable[[], TracePort],
        prepared: Callable[[Rows], Rows],
        *,
        share: float,
        kafka: Mapping[str, Any],
        cluster: str | None = None,
    ) -> None:
        """Prepares.

        On the reporter's thread `port` makes the producer, and `prepared` what is sent of columns
        as they were gathered. The share, and names in the settings `kafka`, are for the heads of
        batches. Without a cluster it is the only one in that Kafka that has a topic.
        """
        self._open_port: Final = port
        self._prepared: Final = prepared
        self._share: Final = share
        self._kafka: Final = kafka
        self._wanted_cluster: Final = cluster
        self._port: TracePort | None = None
        self._begin_anew()
        _reporters.add(self)

    def _begin_anew(self) -> None:
        """Begins without events, as after a fork."""
        if self._port is not None:
            # It has no threads here: to end it would wait for them.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._port))
        self._port = None
        self._changed = Condition()  # guards all below
        self._gathered: dict[str, _Gathered] = {}
        self._full: deque[_Gathered] = deque()
        self._held_bytes = 0
        self._added = self._ended = 0  # events; those dropped at once are in neither
        self._counts = EndCounts()
        self._counting = 0  # records of counts under way
        self._why_uncounted = ""
        self._say_uncounted_at_s = 0.0
        self._dropped = self._unsaid = 0
        self._why_dropped = ""
        self._say_at_s = 0.0
        self._is_urgent = self._is_closed = False
        self._thread: Thread | None = None
        # The thread's own:
        self._id = uuid.uuid4().hex
        self._number = 0
        self._under_way = 0
        self._cluster: str | None = None
        self._obstacle = ""
        self._look_at_s = 0.0
        self._has_counts = False
        self._is_asked = False  # for where counts are written
        self._count_at_s = 0.0
        self._live_at_s = 0.0
        self._since_ms = clock_ns() // 1_000_000

    def add(self, kind: str, rows: Rows, length_bytes: int) -> None:
        """See `EventSink`."""
        count = len(rows["time_ms"])
        length_bytes += count * ROW_BYTES
        with self._changed:
            if self._is_closed or self._held_bytes + length_bytes > QUEUE_BYTES:
                why = "the trace is closed" if self._is_closed else "the queue is full"
                self._drop(count, self._obstacle or why)
                return
            self._held_bytes += length_bytes
            self._added += count
            gathered = self._gathered.get(kind)
            if gathered is None:
                own = {name: list(column) for name, column in rows.items()}
                gathered = _Gathered(kind, own, count, length_bytes, time.monotonic())
                self._gathered[kind] = gathered
                self._changed.notify_all()
            else:
                gathered.add(rows, count, length_bytes)
            if gathered.is_full:
                self._full.append(self._gathered.pop(kind))
                self._changed.notify_all()
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="delaywheel-trace", daemon=True)
            self._thread.start()

    def count(self, cells: Mapping[CellKey, Cell]) -> None:
        """See `EventSink`."""
        with self._changed:
            if not cells or self._is_closed:
                return
            was_changed = self._counts.is_changed
            self._counts.add(cells)
            if not was_changed:
                self._changed.notify_all()
            self._start()

    def begin_counts(self) -> CountsPart | None:
        """See `EventSink`."""
        with self._changed:
            if self._is_closed:
                return None
            if self._cluster is None or not self._has_counts:
                self._is_asked = True
                self._start()
                self._changed.notify_all()
                return None
            topic, head = counts_topic(self._cluster), self._counts_head(self._cluster)
            return CountsPart(topic, head, self._counts.begin_part())

    def drop(self, count: int, why: str) -> None:
        """See `EventSink`."""
        with self._changed:
            self._drop(count, why)

    def flush(self, timeout_s: float) -> bool:
        """See `EventSink`."""
        with self._changed:
            wanted = self._added
            self._is_urgent = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: self._ended >= wanted and not self._counting and not self._has_new_counts(),
                timeout_s,
            )

    def close(self) -> None:
        """Writes what is gathered, for 2 s at most; what comes later is dropped."""
        self.end_of_program()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def end_of_program(self) -> None:
        """Does the same, but takes what comes later: other ends may have something to report."""
        with self._changed:
            self._counts.say(Sign.END)
            self._live_at_s = inf
        self.flush(CLOSE_S)
        with self._changed:
            if left := self._added - self._ended:
                self._ended = self._added
                self._drop(left, self._obstacle or "the end came first")
            self._say_at_s = 0.0  # nobody may say it later
            self._say_what_is_dropped()

    def _drop(self, count: int, why: str) -> None:
        """Counts dropped events; the caller has the lock."""
        self._dropped += count
        self._unsaid += count
        self._why_dropped = why

    def _say_what_is_dropped(self) -> None:
        now_s = time.monotonic()
        if self._unsaid and now_s >= self._say_at_s:
            self._say_at_s = now_s + _SAY_AGAIN_S
            _LOG.warning("events dropped: %d (%s)", self._unsaid, self._why_dropped)
            self._unsaid = 0

    def _run(self) -> None:
        try:
            port = self._port = self._open_port()
            while self._step(port):
                pass
            port.close()
        except Exception as defect:  # noqa: BLE001 - the program goes on without a trace
            _LOG.exception("the trace has ended")
            with self._changed:
                self._is_closed = True
                self._obstacle = f"the trace has ended: {defect!r}"
                self._ended = self._added
                self._changed.notify_all()

    def _step(self, port: TracePort) -> bool:
        """Waits for what is to be sent, and sends it; False at the end."""
        with self._changed:
            if not self._has_work():
                self._changed.wait(self._wait_s())
            if self._is_closed:
                return False
        if self._looks() and time.monotonic() >= self._look_at_s:
            self._find_cluster(port)
        if self._cluster is not None:
            self._send_counts(port, self._cluster)
            for gathered in self._taken():
                self._send(port, self._cluster, gathered.kind, gathered.rows)
                with self._changed:
                    self._held_bytes -= gathered.length_bytes
        if self._under_way:
            port.poll(_POLL_S)
        with self._changed:
            self._say_what_is_dropped()
        return True

    def _looks(self) -> bool:
        """Whether a topic is still to be found."""
        lacks_counts = self._is_asked or self._counts.is_changed
        return self._cluster is None or (lacks_counts and not self._has_counts)

    def _has_work(self) -> bool:
        """Whether the thread goes on at once; the caller has the lock, as below."""
        can_send = self._cluster is not None and (self._is_urgent or bool(self._full))
        return self._is_closed or bool(self._under_way) or can_send

    def _wait_s(self) -> float | None:
        """Returns for how long there is nothing to do; None: until something is added."""
        now_s = time.monotonic()
        has_some = bool(self._gathered) or bool(self._full) or self._counts.is_changed
        if self._cluster is None and (has_some or self._is_asked):
            return max(0.0, self._look_at_s - now_s)
        at_s = [one.since_s + GATHER_S for one in self._gathered.values()]
        if self._has_new_counts():
            at_s.append(self._count_at_s)
        if self._cluster is not None and self._looks():
            at_s.append(self._look_at_s)
        if self._has_counts and self._counts.has_any:
            at_s.append(self._live_at_s)
        soonest_s = min(at_s, default=inf)
        return None if soonest_s == inf else max(0.0, soonest_s - now_s)

    def _has_new_counts(self) -> bool:
        """Whether counts are to be written; the caller has the lock."""
        return self._counts.is_changed and (self._has_counts or self._cluster is None)

    def _taken(self) -> Iterator[_Gathered]:
        """Takes out what is full, or old enough, or urgent."""
        with self._changed:
            old_s = time.monotonic() - GATHER_S
            for kind, gathered in [*self._gathered.items()]:
                if self._is_urgent or gathered.since_s <= old_s:
                    self._full.append(self._gathered.pop(kind))
            self._is_urgent = False
            taken = [*self._full]
            self._full.clear()
        return iter(taken)

    def _find_cluster(self, port: TracePort) -> None:
        self._look_at_s = time.monotonic() + _LOOK_AGAIN_S
        try:
            found = port.clusters()
        except OSError as error:
            self._obstacle = f"Kafka does not say what topics it has: {error}"
            return
        wanted = self._wanted_cluster
        if wanted in found or (wanted is None and len(found) == 1):
            self._cluster, self._obstacle = wanted or found[0], ""
            self._has_counts = port.has_topic(counts_topic(self._cluster))
        elif wanted is None and found:
            self._obstacle = f"give Trace a cluster, one of {', '.join(sorted(found))}"
        else:
            name = trace_topic(wanted or "<cluster>")
            self._obstacle = f"there is no topic {name} that this program may write to"

    def _send_counts(self, port: TracePort, cluster: str) -> None:
        """Has counts written that have changed, each 10 s; they wait for their topic."""
        with self._changed:
            if not self._has_counts:
                return
            now_s = time.monotonic()
            if now_s >= self._live_at_s and self._counts.has_any:
                self._live_at_s = now_s + LIVE_S
                self._counts.say(Sign.LIVE)
            is_due = self._is_urgent or now_s >= self._count_at_s
            if not self._counts.is_changed or not is_due:
                return
            self._count_at_s = now_s + COUNT_S
            head = {**self._counts_head(cluster), "at_ms": clock_ns() // 1_000_000}
            taken = self._counts.take(head)
            self._counting += len(taken)
        self._under_way += len(taken)
        for key, value in taken.items():
            on_end = partial(self._counted, key, value)
            try:
                port.send(counts_topic(cluster), key, value, on_end)
            except OSError as error:
                on_end(str(error))

    def _counts_head(self, cluster: str) -> dict[str, Any]:
        return {
            "cluster": cluster,
            "reporter": self._id,
            "client": self._kafka.get("client.id"),
            "host": socket.gethostname(),
            "release": _release(),
            "since_ms": self._since_ms,
        }

    def _counted(self, key: bytes, value: bytes, error: str) -> None:
        """Takes in that counts are written, or not."""
        self._under_way -= 1
        with self._changed:
            self._counting -= 1
            self._counts.ended(key, value, is_written=not error)
            if error and error != self._why_uncounted:
                now_s = time.monotonic()
                if now_s >= self._say_uncounted_at_s:
                    self._say_uncounted_at_s = now_s + _SAY_AGAIN_S
                    self._why_uncounted = error
                    _LOG.warning("counts are not written, and are tried again: %s", error)
            elif not error:
                self._why_uncounted = ""
            self._changed.notify_all()

    def _send(self, port: TracePort, cluster: str, kind: str, rows: Rows) -> None:
        """Encodes events and has them written, in as many batches as that takes."""
        prepared = self._prepared(rows)
        count = len(rows["time_ms"])
        for begin in range(0, count, MOST_ROWS):
            self._send_batch(port, cluster, kind, _part(prepared, begin, begin + MOST_ROWS))

    def _send_batch(self, port: TracePort, cluster: str, kind: str, rows: Rows) -> None:
        count = len(rows["time_ms"])
        with self._changed:
            told = self._dropped
        head = BatchHead(
            kind=kind,
            cluster=cluster,
            reporter=self._id,
            number=self._number + 1,
            client=self._kafka.get("client.id"),
            host=socket.gethostname(),
            ip=_ip(str(self._kafka.get("bootstrap.servers"))),
            release=_release(),
            share=self._share,
            dropped=told,
        )
        record = encode(head, rows)
        if len(record) > MOST_BYTES and count > 1:
            self._send_batch(port, cluster, kind, _part(rows, 0, count // 2))
            self._send_batch(port, cluster, kind, _part(rows, count // 2, count))
            return
        self._number += 1
        self._under_way += 1
        with self._changed:
            self._dropped -= told
            self._held_bytes += len(record)
        on_end = partial(self._sent, count, told, len(record))
        try:
            port.send(trace_topic(cluster), self._id.encode(), record, on_end)
        except OSError as error:
            on_end(str(error))

    def _sent(self, count: int, told: int, length_bytes: int, error: str) -> None:
        """Takes in that a batch is written, or what kept it from that."""
        self._under_way -= 1
        with self._changed:
            self._ended += count
            self._held_bytes -= length_bytes
            if error and not self._is_closed:
                self._dropped += told
                self._drop(count, error)
                self._cluster = None  # the topic may be gone
            self._changed.notify_all()


def _part(rows: Rows, begin: int, end: int) -> Rows:
    return {name: column[begin:end] for name, column in rows.items()}


@cache
def _release() -> str:
    try:
        return version("delaywheel")
    except PackageNotFoundError:
        return ""


@cache
def _ip(servers: str) -> str | None:
    """Returns the address of this machine on the way to Kafka; sends nothing."""
    host, _, port = servers.partition(",")[0].rpartition("://")[2].rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[] "), port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


_reporters: Final[WeakSet[Reporter]] = WeakSet()


@atexit.register
def _end_of_program() -> None:
    for reporter in list(_reporters):
        reporter.end_of_program()


def _begin_anew() -> None:
    for reporter in _reporters:
        reporter._begin_anew()  # noqa: SLF001 - the hook cannot be the object's own


os.register_at_fork(after_in_child=_begin_anew)
