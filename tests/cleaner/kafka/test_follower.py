"""How a follower treats a compacted topic after a long time without reading it, or far away."""

from __future__ import annotations

import socket

import pytest

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.kafka.control_topic import ControlReader
from delaywheel_replica.cleaner.kafka.follower import KEPT_S, RESTART_AFTER_S, ControlFollower
from delaywheel_replica.cleaner.outside.ports import (
    ControlNotReadInTime,
    ControlUnreadable,
    StoredRecord,
)
from delaywheel_replica.core.protocol.control import (
    ControlRecord,
    WheelRecord,
    progress_record,
    wheel_record,
)
from delaywheel_replica.core.protocol.progress import Progress
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings

C1, C2 = WheelId("c", 1), WheelId("c", 2)
RECORD = WheelRecord({"c": "disk-c"}, 1, 1_000)


class CompactedTopic:
    """A topic whose tombstones are gone at once, with all earlier records of the key.

    Attributes:
        log: everything that was ever written.
        readers: how many were made.
        is_slow: its end is not reached.
        long_s: so long a reading of it takes.
    """

    def __init__(self, clock: Clock) -> None:
        self.log: list[StoredRecord] = []
        self.readers = 0
        self.is_slow = False
        self.long_s = 0.0
        self.clock = clock

    def put(self, *records: ControlRecord) -> None:
        for key, value in records:
            self.log.append(StoredRecord(key.encode(), value, len(self.log)))

    def left(self) -> list[StoredRecord]:
        last = {record.key: record for record in self.log}
        return [r for r in self.log if last[r.key] is r and r.value is not None]

    def control(self) -> Reader:
        self.readers += 1
        return Reader(self)


class Reader:
    """Reads the topic from its beginning."""

    def __init__(self, topic: CompactedTopic) -> None:
        self._topic = topic
        self.position = 0

    def poll(self) -> list[StoredRecord]:
        found = [record for record in self._topic.left() if record.offset >= self.position]
        self.position = len(self._topic.log)
        return found

    def read_to_end(self, timeout_s: float) -> list[StoredRecord]:
        self._topic.clock.now_s += self._topic.long_s
        if self._topic.is_slow:
            raise ControlNotReadInTime(f"{timeout_s} s")
        return self.poll()

    def close(self) -> None: ...


class Clock:
    """A clock that stands still, except for `suspended_s`, which only the wall clock notices."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.suspended_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ms(self) -> int:
        return round(self.now_s * 1000)

    def wall_ms(self) -> int:
        return round((self.now_s + self.suspended_s) * 1000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def topic(clock: Clock) -> CompactedTopic:
    topic = CompactedTopic(clock)
    topic.put(wheel_record(C1, RECORD), progress(1))
    return topic


@pytest.fixture
def follower(topic: CompactedTopic, clock: Clock) -> ControlFollower:
    made = ControlFollower(topic, clock)  # type: ignore[arg-type]  # it gives no producers
    assert made.read_to_end(1).wheels.keys() == {C1}
    return made


def progress(due_ms: int) -> ControlRecord:
    return progress_record(Progress(due_ms, None))


def test_a_follower_that_hears_something_now_and_then_reads_on(
    follower: ControlFollower, topic: CompactedTopic, clock: Clock
) -> None:
    for due_ms in range(2, 10):
        clock.now_s += RESTART_AFTER_S - 1
        topic.put(progress(due_ms))
        assert follower.poll()
    clock.now_s += RESTART_AFTER_S - 1
    follower.read_to_end(1)  # nothing is new: that is news as well
    clock.now_s += RESTART_AFTER_S - 1
    follower.read_to_end(1)
    assert topic.readers == 1


def test_a_topic_whose_end_is_not_reached_for_too_long_is_read_again(
    topic: CompactedTopic, clock: Clock
) -> None:
    follower = ControlFollower(topic, clock)  # type: ignore[arg-type]
    topic.is_slow = True
    for _ in range(3):
        with pytest.raises(ControlNotReadInTime):
            follower.read_to_end(1)
        clock.now_s += RESTART_AFTER_S / 2 - 1
    topic.put((f"wheel/{C1}", None), progress(2))
    clock.now_s += RESTART_AFTER_S / 2
    topic.is_slow = False
    assert follower.read_to_end(1).wheels == {}
    assert topic.readers == 2


def test_what_a_process_that_stood_still_has_read_is_not_believed(
    follower: ControlFollower, topic: CompactedTopic
) -> None:
    topic.put((f"wheel/{C1}", None), progress(2))
    topic.long_s = RESTART_AFTER_S + 1
    with pytest.raises(ControlUnreadable):
        follower.read_to_end(1)
    topic.long_s = 0
    assert follower.read_to_end(1).wheels == {}


def test_the_topic_keeps_what_is_removed_for_much_longer() -> None:
    assert KEPT_S >= 6 * RESTART_AFTER_S


def test_who_connects_for_longer_than_one_reading_goes_on_with_the_next() -> None:
    """Else whoever is far from Kafka never reads: each reading would begin with connecting."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        settings = KafkaSettings(KafkaNames("a"), {"bootstrap.servers": address})
        reader = ControlReader(settings)
        with pytest.raises(ControlNotReadInTime):
            reader.read_to_end(0.2)
        reader.close()
