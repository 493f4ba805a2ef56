"""A candidacy's slow calls on a Kafka that misbehaves: each ends, and nothing is read twice."""

from __future__ import annotations

import pytest

from delaywheel_replica.cleaner.candidacy import Candidacy
from delaywheel_replica.cleaner.follower import ControlFollower
from delaywheel_replica.cleaner.ports import ControlNotReadInTime, ControlUnreadable, StoredRecord
from delaywheel_replica.core.control import NodeRecord, node_record
from delaywheel_replica.core.election_events import ControlRead, Event, ReadFailed
from support.service import wait_until


class LongTopic:
    """A control topic of which so many records can be read in one call."""

    def __init__(self, records: int, at_once: int) -> None:
        self._records = [_record(number) for number in range(records)]
        self._at_once = at_once
        self._unread: list[StoredRecord] = []
        self.position = 0
        self.fails = False

    def poll(self) -> list[StoredRecord]:
        unread, self._unread = self._unread, []
        return unread

    def read_to_end(self, timeout_s: float) -> list[StoredRecord]:
        del timeout_s
        if self.fails:
            raise ControlUnreadable("it was made anew")
        end = self.position + self._at_once
        self._unread += self._records[self.position : end]
        self.position = min(end, len(self._records))
        if self.position < len(self._records):
            raise ControlNotReadInTime(f"read {self.position}")
        return self.poll()

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class FakeKafka:
    """Hands out control topics."""

    def __init__(self, *topics: LongTopic) -> None:
        self._topics = list(topics)

    def check(self, *, has_wheels: bool) -> None: ...

    def producers(self) -> None:
        raise AssertionError

    def control(self) -> LongTopic:
        return self._topics.pop(0)


def _record(number: int) -> StoredRecord:
    key, value = node_record("a", NodeRecord("disk-a", number))
    return StoredRecord(key.encode(), value, number)


def _candidacy(kafka: FakeKafka) -> tuple[Candidacy, ControlFollower]:
    follower = ControlFollower(kafka)  # type: ignore[arg-type]  # it gives no producers
    return Candidacy(kafka, follower, node="a", control_topic="control"), follower  # type: ignore[arg-type]


def _next_event(candidacy: Candidacy) -> Event:
    return wait_until("the call ended", candidacy.events)[0]


def test_a_topic_too_long_for_one_call_is_read_by_several() -> None:
    candidacy, follower = _candidacy(FakeKafka(LongTopic(25, at_once=10)))
    for _ in range(2):
        candidacy.read("t")
        assert isinstance(_next_event(candidacy), ReadFailed)
        # What was read so far is not the state of anything.
        assert (follower.offset, follower.state.nodes) == (-1, {})
    candidacy.read("t")
    read = _next_event(candidacy)
    assert isinstance(read, ControlRead)
    assert read.state.nodes == {"a": NodeRecord("disk-a", 24)}
    assert follower.state is read.state
    assert follower.offset == 25
    candidacy.close()


def test_after_an_error_nothing_that_was_read_is_believed() -> None:
    broken, whole = LongTopic(25, at_once=10), LongTopic(5, at_once=10)
    candidacy, follower = _candidacy(FakeKafka(broken, whole))
    candidacy.read("t")
    assert isinstance(_next_event(candidacy), ReadFailed)
    broken.fails = True
    candidacy.read("t")
    assert isinstance(_next_event(candidacy), ReadFailed)
    candidacy.read("t")
    assert isinstance(_next_event(candidacy), ControlRead)
    assert follower.state.nodes["a"].last_number == 4
    candidacy.close()


def test_what_a_call_was_not_prepared_for_is_raised_where_it_is_heard() -> None:
    """Without an event the election would wait for ever."""
    candidacy, _ = _candidacy(FakeKafka())  # it has no topic to give: IndexError
    candidacy.read("t")
    with pytest.raises(IndexError):
        wait_until("the call ended", candidacy.events, timeout_s=5)
    candidacy.close()
