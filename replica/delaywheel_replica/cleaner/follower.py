"""What the control topic says, as far as this node has read it."""

from __future__ import annotations

from collections.abc import Iterable

from delaywheel_replica.cleaner.ports import (
    ControlNotReadInTime,
    ControlPort,
    ControlUnreadable,
    KafkaPort,
    StoredRecord,
)
from delaywheel_replica.core.control import ControlRecordMalformedError, ControlState


class ControlTopicBroken(Exception):  # noqa: N818 - named after what happened
    """A record of ours in the control topic is not what we ever write."""


class ControlFollower:
    """Reads the control topic and keeps its state. One thread at a time calls it.

    After an error nothing that was read is believed: the next reading begins anew. A reading that
    takes too long is gone on with by the next one, or a long topic would never be read; what it
    has read so far is told to nobody.

    Attributes:
        state: What was read, since the end was reached once.
        offset: How far; -1: the end was not reached yet.
        marks: The ids of which a mark with the token of `expect` was read.
    """

    def __init__(self, kafka: KafkaPort) -> None:
        self._kafka = kafka
        self._reader: ControlPort | None = None
        self._read = ControlState()
        self._ended = False
        self._token = ""
        self.state = ControlState()
        self.offset = -1
        self.marks: frozenset[int] = frozenset()

    def expect(self, token: str) -> None:
        """A candidacy begins: from now on its marks are watched for, be they newest or not."""
        self._token = token
        self.marks = frozenset()

    def poll(self) -> bool:
        """Takes in what arrived, without waiting; whether there was anything.

        Before the first `read_to_end` there is nothing to follow, and nothing happens: the topic
        may not be there yet.
        """
        if self._reader is None:
            return False
        try:
            records = self._reader.poll()
            self._apply(records)
        except (ControlUnreadable, ControlTopicBroken):
            self._begin_anew()
            return False
        return bool(records)

    def read_to_end(self, timeout_s: float) -> ControlState:
        """Reads up to the last stable offset of now.

        Raises:
            ControlUnreadable: it could not be read in time.
            ControlTopicBroken: what is there cannot be right.
        """
        if self._reader is None:
            self._reader = self._kafka.control()
        try:
            records = self._reader.read_to_end(timeout_s)
            self._ended = True
            self._apply(records)
        except ControlNotReadInTime:
            self.poll()
            raise
        except (ControlUnreadable, ControlTopicBroken):
            self._begin_anew()
            raise
        self.offset = self._reader.position
        return self.state

    def pause(self) -> None:
        """Stops reading: while this node leads, only it can commit."""
        if self._reader is not None:
            self._reader.pause()

    def resume(self) -> None:
        """Goes on reading."""
        if self._reader is not None:
            self._reader.resume()

    def close(self) -> None:
        """Lets go of the reader."""
        self._begin_anew()

    def _apply(self, records: Iterable[StoredRecord]) -> None:
        try:
            for record in records:
                self._read = self._read.apply(record.key, record.value, record.offset)
                self.marks |= self._read.marked(self._token)
                if self._ended:
                    self.offset = record.offset
        except ControlRecordMalformedError as error:
            raise ControlTopicBroken(str(error)) from error
        if self._ended:
            self.state = self._read

    def _begin_anew(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        self._ended = False
        self.state = self._read = ControlState()
        self.offset = -1
