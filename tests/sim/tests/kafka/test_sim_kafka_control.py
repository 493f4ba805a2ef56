"""The reader of the simulated control topic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaywheel_replica.cleaner.kafka.follower import ControlFollower
from delaywheel_replica.cleaner.outside.ports import (
    ControlNotReadInTime,
    ControlPort,
    ControlUnreadable,
    KafkaCallEnd,
    ProducersPort,
)
from delaywheel_replica.core.protocol.control import leader_record
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from sim.kafka.site import Site, control


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.settle(20.0)
    site.kafka.check()
    site.scheduler.close()


def _commit(site: Site, producers: ProducersPort, number: int, value: bytes) -> None:
    ended = site.transact(producers, value, number=number)
    assert ended.verdict is TransactionState.COMMITTED


def _read(site: Site, reader: ControlPort, timeout_s: float = 5.0) -> list[bytes | None]:
    return [record.value for record in site.do(lambda: reader.read_to_end(timeout_s))]


def test_a_reader_reads_to_the_last_stable_offset_of_now(site: Site) -> None:
    producers, reader = site.producers(site.a), site.b.control()
    assert _read(site, reader) == []
    _commit(site, producers, 0, b"1")
    site.settle()
    assert _read(site, reader) == [b"1"]
    assert reader.position == 2  # the marker is passed too
    site.faults(marker_us=(900_000, 900_000))
    _commit(site, producers, 1, b"2")
    assert _read(site, reader) == []
    site.settle()
    assert _read(site, reader) == [b"2"]
    assert _read(site, site.a.control()) == [b"1", b"2"]


def test_polling_hands_out_what_could_have_been_heard_of(site: Site) -> None:
    producers, reader = site.producers(site.a), site.b.control()
    _commit(site, producers, 0, b"1")
    site.settle(0.1)
    assert [record.value for record in reader.poll()] == [b"1"]
    site.kafka.cut("b")
    _commit(site, producers, 1, b"2")
    site.settle(5.0)
    assert reader.poll() == []
    site.kafka.mend("b")
    assert [record.value for record in reader.poll()] == [b"2"]
    assert reader.position == 4


def test_an_end_that_nobody_tells_is_unreadable(site: Site) -> None:
    site.producers(site.a)
    reader = site.b.control()
    site.kafka.cut("b")
    with pytest.raises(ControlUnreadable):
        site.do_raising(lambda: reader.read_to_end(1.0))


def test_reading_that_takes_too_long_is_gone_on_with(site: Site) -> None:
    producers, reader = site.producers(site.a), site.b.control()

    def write_many() -> KafkaCallEnd:
        producers.begin(0)
        producers.write_own(0, [control(b"key %d" % number, b"v") for number in range(3_500)])
        return producers.commit(0, control(b"progress", b"1"), 2_000)

    assert site.do(write_many).verdict is TransactionState.COMMITTED
    site.settle()
    site.faults(slow_us={"b": (100_000, 100_000)})
    with pytest.raises(ControlNotReadInTime):
        site.do_raising(lambda: reader.read_to_end(0.5))
    assert reader.position == 1_000
    assert len(site.do(lambda: reader.read_to_end(5.0))) == 3_501


def test_the_real_follower_reads_it(site: Site) -> None:
    producers, follower = site.producers(site.a), ControlFollower(site.b)
    key, value = leader_record(0, "a", "token")

    def mark() -> KafkaCallEnd:
        producers.begin(0)
        return producers.commit(0, control(key.encode(), value), 2_000)

    assert site.do(mark).verdict is TransactionState.COMMITTED
    site.settle()
    state = site.do(lambda: follower.read_to_end(5.0))
    assert state.leaders[0].token == "token"
    assert follower.offset == 2
