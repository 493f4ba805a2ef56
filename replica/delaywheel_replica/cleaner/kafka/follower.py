"""The state of the control topic, as far as this node has read it.

The topic is compacted, and Kafka drops the record that removes a key once it is older than the
topic's `delete.retention.ms`. A reader that is further behind misses such a record, and takes for
present what was removed long ago. Then what was read is discarded, and the topic is read from its
beginning:

| when | because |
|---|---|
| this node led | it did not read meanwhile, for hours or days |
| no record arrived for `RESTART_AFTER_S`, or the end was not reached for that long | the same |
| an error | what was read may not be the topic's content |

`brokers.py` refuses a topic that keeps such records for less than `KEPT_S`.
"""

from __future__ import annotations

from collections.abc import Iterable

from delaywheel_replica.cleaner.outside.clocks import Clock, SystemClock
from delaywheel_replica.cleaner.outside.ports import (
    ControlNotReadInTime,
    ControlPort,
    ControlUnreadable,
    KafkaPort,
    StoredRecord,
)
from delaywheel_replica.core.protocol.control import ControlRecordMalformedError, ControlState

RESTART_AFTER_S = 600.0

KEPT_S = 3_600
"""The least time for which the topic must keep the records that remove a key."""


class ControlTopicBroken(Exception):
    """One of our records in the control topic is malformed."""


class ControlFollower:
    """Reads the control topic and keeps its state. For one thread at a time.

    After an error nothing that was read is trusted: the next reading starts over. A reading that
    takes too long is continued by the next one, since a long topic would never be read otherwise;
    what it has read so far is not visible.

    Attributes:
        state: The topic's content, once its end was reached.
        offset: The last offset read; -1: the end was not reached yet.
        marks: The ids of which a mark with the expected token was read.
        marked_at_ms: When a broker took the last of them, by its clock; -1: unknown.
    """

    def __init__(
        self,
        kafka: KafkaPort,
        clock: Clock | None = None,
        *,
        restart_after_s: float = RESTART_AFTER_S,
    ) -> None:
        """Begins with nothing read; reads again after so long without records."""
        self._kafka = kafka
        self._clock = clock or SystemClock()
        self._restart_after_s = restart_after_s
        # Monotonic and wall seconds when it was last near the end, or began to read.
        self._heard_s = (0.0, 0.0)
        self._reader: ControlPort | None = None
        self._read = ControlState()
        self._ended = False
        self._token = ""
        self.state = ControlState()
        self.offset = -1
        self.marks: frozenset[int] = frozenset()
        self.marked_at_ms = -1

    def expect(self, token: str) -> None:
        """Begins a candidacy, whose marks are noted even if newer ones follow."""
        self._token = token
        self.marks = frozenset()
        self.marked_at_ms = -1

    def poll(self) -> bool:
        """Takes records that have arrived, without waiting; returns whether there were any.

        Does nothing before the first `read_to_end`: the topic may not exist yet.
        """
        if self._reader is None:
            return False
        try:
            records = self._reader.poll()
            if records:
                self._take(records)
        except (ControlUnreadable, ControlTopicBroken):
            self.restart()
            return False
        return bool(records)

    def read_to_end(self, timeout_s: float) -> ControlState:
        """Reads up to the current last stable offset.

        Raises:
            ControlUnreadable: It could not be read in time.
            ControlTopicBroken: Its content is invalid.
        """
        if self._reader is not None and self._is_behind():
            self.restart()
        if self._reader is None:
            self._reader = self._kafka.control()
            self._hear()
        try:
            records = self._reader.read_to_end(timeout_s)
            self._ended = True
            self._take(records)
        except ControlNotReadInTime:
            self.poll()
            raise
        except (ControlUnreadable, ControlTopicBroken):
            self.restart()
            raise
        self.offset = self._reader.position
        return self.state

    def pause(self) -> None:
        """Stops reading: while this node leads, only it can commit. `restart` resumes."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def restart(self) -> None:
        """Forgets what was read, and starts again at the topic's beginning."""
        self.pause()
        self._ended = False
        self.state = self._read = ControlState()
        self.offset = -1

    def _take(self, records: Iterable[StoredRecord]) -> None:
        if self._is_behind():
            raise ControlUnreadable("the control topic was silent for too long: reading it again")
        self._apply(records)
        if self._ended:
            self._hear()

    def _hear(self) -> None:
        self._heard_s = self._now_s()

    def _is_behind(self) -> bool:
        """Whether so much time has passed that tombstones may be gone.

        The monotonic clock stands still while a machine is suspended, the wall clock may be set
        back: the longer time counts.
        """
        elapsed_s = (now - then for now, then in zip(self._now_s(), self._heard_s, strict=True))
        return max(elapsed_s) > self._restart_after_s

    def _now_s(self) -> tuple[float, float]:
        return self._clock.monotonic(), self._clock.wall_ms() / 1000

    def _apply(self, records: Iterable[StoredRecord]) -> None:
        try:
            for record in records:
                self._read = self._read.apply(record.key, record.value, record.offset)
                marks = self._read.marked(self._token)
                if not marks <= self.marks:
                    self.marks |= marks
                    self.marked_at_ms = record.appended_ms
                if self._ended:
                    self.offset = record.offset
        except ControlRecordMalformedError as error:
            raise ControlTopicBroken(str(error)) from error
        if self._ended:
            self.state = self._read
