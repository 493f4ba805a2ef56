"""The slow calls of a candidacy, on a thread of their own: checks, inits, marks, reading.

The main thread goes on stamping its row meanwhile. Each call ends with one event for the election
machine (core/election.py), which alone decides what comes next; there is at most one call at a
time.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from delaywheel_replica.cleaner.follower import ControlFollower, ControlTopicBroken
from delaywheel_replica.cleaner.ports import (
    IDS,
    ControlUnreadable,
    KafkaAway,
    KafkaPort,
    ProducersPort,
    Record,
    Refusal,
)
from delaywheel_replica.core.control import leader_record
from delaywheel_replica.core.election_events import (
    ControlRead,
    Event,
    InitFailed,
    InitsDone,
    MarkReport,
    ReadFailed,
)
from delaywheel_replica.core.reports import Verdict

CALL_MS = 5_000


def monotonic_ms() -> int:
    """CLOCK_MONOTONIC in milliseconds: the same clock in all processes of one machine."""
    return time.monotonic_ns() // 1_000_000


class Candidacy:
    """Carries out what the election machine asks for before a node leads.

    Attributes:
        producers: Of the newest candidacy.
        error: Why the last call failed, for people; None once one went well.
    """

    def __init__(
        self,
        kafka: KafkaPort,
        follower: ControlFollower,
        *,
        node: str,
        control_topic: str,
        on_event: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts nothing yet.

        Args:
            kafka: Where producers come from.
            follower: Of the control topic; left alone by others while a call runs.
            node: This node's id.
            control_topic: Where marks go.
            on_event: Called on another thread when `events` has something.
        """
        self.producers: ProducersPort | None = None
        self.error: str | None = None
        self._kafka = kafka
        self._follower = follower
        self._node = node
        self._control_topic = control_topic
        self._on_event = on_event
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="candidacy")
        self._inits = ThreadPoolExecutor(IDS, thread_name_prefix="init")

    def events(self) -> list[Event]:
        """How the calls ended, since the last look.

        Raises:
            BaseException: whatever a call was not prepared for. No event would ever follow it, so
                the machine would wait for ever: it has to end the process.
        """
        found = []
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            found.append(event)
        return found

    def init(self, token: str, *, has_wheels: bool) -> None:
        """Makes the producers and inits every id; ends with InitsDone or InitFailed."""
        self.producers = producers = self._kafka.producers()
        self._start(lambda: self._init(producers, token, has_wheels=has_wheels))

    def mark(self, token: str, index: int) -> None:
        """Commits the leader record of one id; ends with MarkReport."""
        assert self.producers is not None
        producers = self.producers
        self._start(lambda: self._mark(producers, token, index))

    def read(self, token: str) -> None:
        """Reads the control topic to its end; ends with ControlRead or ReadFailed."""
        self._start(lambda: self._read(token))

    def destroy(self) -> None:
        """Lets go of the producers."""
        if self.producers is not None:
            self.producers.destroy()
            self.producers = None

    def close(self) -> None:
        """Ends the threads; what still runs is left to its time-outs."""
        self.destroy()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._inits.shutdown(wait=False, cancel_futures=True)

    def _start(self, call: Callable[[], Event]) -> None:
        def run() -> None:
            try:
                self._events.put(call())
            except BaseException as error:  # noqa: BLE001 - raised again where it is heard
                self._events.put(error)
            self._on_event()

        self._thread.submit(run)

    def _init(self, producers: ProducersPort, token: str, *, has_wheels: bool) -> Event:
        try:
            self._kafka.check(has_wheels=has_wheels)
        except (KafkaAway, Refusal) as refusal:
            self.error = str(refusal)
            return InitFailed(monotonic_ms(), token, Verdict.UNKNOWN, touched=False)
        ends = list(self._inits.map(lambda number: producers.init(number, CALL_MS), range(IDS)))
        failed = [end for end in ends if end.verdict is not Verdict.CONTINUE]
        if not failed:
            return InitsDone(monotonic_ms(), token)
        self.error = failed[0].cause
        fenced = any(end.verdict is Verdict.FENCED for end in failed)
        return InitFailed(monotonic_ms(), token, Verdict.FENCED if fenced else Verdict.UNKNOWN)

    def _mark(self, producers: ProducersPort, token: str, index: int) -> Event:
        key, value = leader_record(index, self._node, token)
        producers.begin(index)
        record = Record(self._control_topic, key.encode(), value, [], partition=0)
        ended = producers.commit(index, record, CALL_MS)
        if ended.verdict is not Verdict.COMMITTED:
            self.error = ended.cause
        return MarkReport(monotonic_ms(), token, index, ended.verdict)

    def _read(self, token: str) -> Event:
        try:
            state = self._follower.read_to_end(CALL_MS / 1000)
        except (ControlUnreadable, ControlTopicBroken) as error:
            self.error = str(error)
            return ReadFailed(monotonic_ms(), token)
        self.error = None
        return ControlRead(monotonic_ms(), token, state)
