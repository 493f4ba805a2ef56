"""The simulated ingress topics: when records become readable, what Kafka loses and reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaywheel_replica.cleaner.outside.ports import KafkaAway, Record
from delaywheel_replica.core.ingress.place import IngressPlace
from sim.kafka.ingress import SimIngress, partitions_of
from sim.kafka.line import KafkaLine
from sim.kafka.log import Partition
from sim.kafka.site import NAMES, Site

TOPIC = NAMES.ingress
AT = TOPIC, 0


class Ingress(Site):
    """A reader on node a, and a partition that other clients produce to."""

    def __init__(self) -> None:
        super().__init__()
        self.kafka.create(TOPIC, 2)
        self.line = KafkaLine(self.kafka, "a", NAMES, self.clock)
        self.reader = SimIngress(self.line)
        self.reader.assign({AT: 0})

    @property
    def log(self) -> Partition:
        return self.kafka.partitions(TOPIC)[0]

    def produce(self, *values: bytes) -> None:
        for value in values:
            record = Record(TOPIC, None, value, [], timestamp_ms=7)
            self.kafka.produce_plain(self.log, record, "sender")

    def transaction(self, value: bytes, *, name: str = "t") -> int:
        _, epoch = self.kafka.init_producer(name)
        record = self.log, Record(TOPIC, None, value, [])
        self.kafka.produce(name, epoch, "sender", [record], set())
        return epoch

    def end(self, epoch: int, *, commit: bool, name: str = "t") -> None:
        self.kafka.end_transaction(name, epoch, commit=commit)
        self.settle()

    def read(self, most: int = 100) -> list[bytes | None]:
        return [each.value for fetched in self.reader.poll(most) for each in fetched.records]

    def read_all(self, most: int = 100) -> list[bytes | None]:
        """Polls several times: one poll does not return everything."""
        self.settle()
        return [value for _ in range(20) for value in self.read(most)]


@pytest.fixture
def ingress() -> Iterator[Ingress]:
    ingress = Ingress()
    yield ingress
    ingress.kafka.check()
    ingress.scheduler.close()


def test_a_record_is_read_where_it_lies(ingress: Ingress) -> None:
    ingress.produce(b"1", b"2")
    ingress.settle()
    (fetched,) = ingress.reader.poll(1)
    assert (fetched.at, fetched.position, fetched.first_kept) == (AT, 1, None)
    assert fetched.records[0][:4] == (IngressPlace(TOPIC, 0, 0), 7, None, b"1")
    assert ingress.reader.lags() == {AT: 1}
    assert ingress.read_all() == [b"2"]


def test_what_is_open_hides_what_comes_behind_it(ingress: Ingress) -> None:
    epoch = ingress.transaction(b"1")
    ingress.produce(b"2")
    assert ingress.read_all() == []
    ingress.end(epoch, commit=True)
    assert ingress.read_all() == [b"1", b"2"]


def test_what_was_aborted_is_passed(ingress: Ingress) -> None:
    epoch = ingress.transaction(b"1")
    ingress.end(epoch, commit=False)
    (fetched,) = ingress.reader.poll(9)
    assert (fetched.records, fetched.position) == ((), 2)


def test_a_node_that_reaches_no_broker_hears_nothing_new(ingress: Ingress) -> None:
    ingress.kafka.cut("a")
    ingress.produce(b"1")
    assert ingress.read_all() == []
    ingress.kafka.mend("a")
    assert ingress.read_all() == [b"1"]


def test_a_reader_goes_on_behind_what_was_deleted_and_says_so(ingress: Ingress) -> None:
    ingress.produce(b"1", b"2", b"3")
    ingress.log.delete_before(2)
    ingress.settle()
    (fetched,) = ingress.reader.poll(9)
    assert (fetched.records, fetched.position, fetched.first_kept) == ((), 2, 2)
    assert ingress.read_all() == [b"3"]


def test_a_partition_that_ends_before_what_was_read_is_read_no_more(ingress: Ingress) -> None:
    ingress.produce(b"1", b"2", b"3")
    assert ingress.read_all() == [b"1", b"2", b"3"]
    assert [entry.value for entry in ingress.log.cut_off(1)] == [b"2", b"3"]
    assert ingress.read_all() == []
    assert ingress.reader.cut_off == {AT: 1}
    ingress.produce(b"4", b"5", b"6")
    assert ingress.read_all() == []


def test_no_half_of_a_transaction_is_kept(ingress: Ingress) -> None:
    ingress.produce(b"1")
    ingress.end(ingress.transaction(b"2"), commit=True)
    ingress.log.cut_off(2)
    assert [entry.value for entry in ingress.log.log] == [b"1"]


def test_a_recreated_topic_is_another_one(ingress: Ingress) -> None:
    ids = []
    for _ in range(2):
        found = ingress.do(lambda: partitions_of(ingress.line, [TOPIC, "no topic"]))
        assert list(found) == [TOPIC]
        assert found[TOPIC].partitions == 2
        ids.append(found[TOPIC].topic_id)
        ingress.kafka.delete(TOPIC)
        ingress.kafka.create(TOPIC, 2)
    assert len(set(ids)) == 2


def test_a_missing_topic_is_reported_at_intervals(ingress: Ingress) -> None:
    ingress.kafka.delete(TOPIC)
    with pytest.raises(KafkaAway, match=TOPIC):
        ingress.reader.poll(1)
    assert ingress.reader.poll(1) == []


def test_the_group_shows_the_committed_offset(ingress: Ingress) -> None:
    ingress.reader.report_to_group({AT: 5}, frozenset())
    ingress.settle()
    assert ingress.kafka.group_offset(NAMES.ingress_group, *AT) == 5
