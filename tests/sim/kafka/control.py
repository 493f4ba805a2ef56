"""The reader of the simulated control topic, as `ControlPort` wants it."""

from __future__ import annotations

from bisect import bisect_left

from delaywheel_replica.cleaner.outside.ports import (
    ControlNotReadInTime,
    ControlUnreadable,
    StoredRecord,
)
from sim.kafka.line import KafkaLine
from sim.kafka.log import Partition
from sim.machine.scheduler import US_PER_S

FETCH_RECORDS = 1_000


class SimControl:
    """The control topic as a reader that starts at its beginning, as `ControlPort` wants it.

    It fetches between calls, like a consumer: `poll` returns what has
    arrived by now.

    Attributes:
        position: The offset of the next record to read.
    """

    def __init__(self, line: KafkaLine) -> None:
        self.position = 0
        self._line = line
        partition = self._partition()
        self._elections = 0 if partition is None else partition.elections
        self._read: list[StoredRecord] = []  # not yet handed out

    def poll(self) -> list[StoredRecord]:
        """Returns what arrived since the last call, without waiting."""
        partition = self._partition()
        if partition is not None:
            self._check(partition)
            line = self._line
            stable = partition.stable_at(line.kafka.contact_us(line.node) - line.round_trip_us)
            self._take(_fetch(partition, self.position, stable), stable)
        return self._hand_out()

    def read_to_end(self, timeout_s: float) -> list[StoredRecord]:
        """Returns everything not returned yet, up to the present last stable offset."""
        line = self._line
        deadline_us = line.scheduler.now_us + round(timeout_s * US_PER_S)
        end = line.ask(self._end, timeout_s)
        if end is None:
            raise ControlNotReadInTime("the control topic's end: no answer")
        if end < 0:
            raise ControlUnreadable("the control topic's end: not known")
        partition = self._partition()
        assert partition is not None
        self._check(partition)
        if self.position > end:
            raise ControlUnreadable(f"the control topic ends at {end}, was read to {self.position}")
        while self.position < end:
            left_s = (deadline_us - line.scheduler.now_us) / US_PER_S
            fetched = line.ask(self._fetch_next, left_s) if left_s > 0 else None
            if fetched is None:
                raise ControlNotReadInTime(f"read {self.position} of {end} in {timeout_s:g} s")
            self._take(*fetched)
        return self._hand_out()

    def close(self) -> None:
        """Closes the reader."""
        self._read.clear()

    def _partition(self) -> Partition | None:
        partitions = self._line.kafka.partitions(self._line.names.control)
        return partitions[0] if partitions else None

    def _end(self) -> int:
        partition = self._partition()
        return -1 if partition is None else partition.last_stable_offset

    def _check(self, partition: Partition) -> None:
        """Raises an error for a reader of a former log, as the leaders' epochs show."""
        if partition.elections != self._elections:
            raise ControlUnreadable("the control topic's log was cut off")

    def _fetch_next(self) -> tuple[list[StoredRecord], int]:
        """Fetches at the brokers: the next records, and the position behind them."""
        partition = self._partition()
        assert partition is not None
        records = _fetch(partition, self.position, partition.last_stable_offset)
        if len(records) <= FETCH_RECORDS:
            return records, partition.last_stable_offset
        records = records[:FETCH_RECORDS]
        return records, records[-1].offset + 1

    def _take(self, records: list[StoredRecord], position: int) -> None:
        self._read += records
        self.position = max(self.position, position)

    def _hand_out(self) -> list[StoredRecord]:
        records, self._read = self._read, []
        return records


def _fetch(partition: Partition, position: int, end: int) -> list[StoredRecord]:
    """Returns what a compacted log still has of these offsets."""
    stored = partition.compacted
    assert stored is not None
    first = bisect_left(stored, position, key=lambda record: record.offset)
    last = bisect_left(stored, end, key=lambda record: record.offset)
    return stored[first:last]
