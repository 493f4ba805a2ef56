"""The simulated Kafka's brokers: transactions, fencing, and what becomes visible when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delaywheel.transactional import LEADER_TIMEOUT_MS
from delaywheel_replica.cleaner.outside.ports import Record
from sim.kafka.brokers import Code, SimKafka
from sim.kafka.faults import KafkaFaults
from sim.kafka.log import Entry, Partition, SimKafkaError
from sim.machine.scheduler import US_PER_MS, Scheduler

ID, OTHER_ID = "id 0", "id 1"
TOPIC = "t"
SLOW_MARKERS = (50 * US_PER_MS, 50 * US_PER_MS)


class Brokers:
    """Kafka without clients: requests are made directly."""

    def __init__(self, **faults: object) -> None:
        self.scheduler = Scheduler(1)
        self.kafka = SimKafka(
            self.scheduler,
            {TOPIC: 2},
            faults=KafkaFaults(**faults),  # type: ignore[arg-type]
        )
        self.added: dict[tuple[str, int], set[Partition]] = {}

    def settle(self, seconds: float = 1.0) -> None:
        self.scheduler.run_for(seconds)

    def init(self, name: str = ID) -> int:
        code, epoch = self.kafka.init_producer(name)
        if code is Code.CONCURRENT:
            self.settle()
            code, epoch = self.kafka.init_producer(name)
        assert code is Code.OK
        return epoch

    def produce(
        self, epoch: int, *values: bytes, name: str = ID, partition: int = 0
    ) -> tuple[Code, int]:
        log = self.kafka.partitions(TOPIC)[partition]
        records = [(log, Record(TOPIC, value, value, [])) for value in values]
        added = self.added.setdefault((name, epoch), set())
        return self.kafka.produce(name, epoch, "node", records, added)

    def end(self, epoch: int, *, commit: bool = True, name: str = ID) -> Code:
        code = self.kafka.end_transaction(name, epoch, commit=commit)
        self.added.pop((name, epoch), None)
        return code

    def values(self) -> list[bytes | None]:
        return [entry.value for entry in self.kafka.visible(TOPIC)]


@pytest.fixture
def brokers() -> Iterator[Brokers]:
    brokers = Brokers(marker_us=SLOW_MARKERS)
    yield brokers
    brokers.kafka.check()


def test_a_transaction_is_visible_as_a_whole_when_its_marker_is_there(brokers: Brokers) -> None:
    epoch = brokers.init()
    assert brokers.produce(epoch, b"1", b"2") == (Code.OK, 2)
    assert brokers.end(epoch) is Code.OK
    assert brokers.values() == []
    brokers.settle()
    assert brokers.values() == [b"1", b"2"]
    first, second = brokers.kafka.visible(TOPIC)
    assert (first.offset, second.offset, first.visible_us) == (0, 1, 50_000)
    assert first.transaction.committed
    assert first.transaction.node == "node"


def test_an_aborted_transaction_is_never_visible(brokers: Brokers) -> None:
    epoch = brokers.init()
    brokers.produce(epoch, b"1")
    assert brokers.end(epoch, commit=False) is Code.OK
    brokers.settle()
    assert brokers.values() == []
    assert brokers.kafka.partitions(TOPIC)[0].last_stable_offset == 2


def test_nothing_is_visible_behind_a_transaction_that_is_open(brokers: Brokers) -> None:
    first, second = brokers.init(ID), brokers.init(OTHER_ID)
    brokers.produce(first, b"1")
    brokers.produce(second, b"2", name=OTHER_ID)
    brokers.end(second, name=OTHER_ID)
    brokers.settle()
    assert brokers.values() == []
    assert brokers.kafka.partitions(TOPIC)[0].last_stable_offset == 0
    brokers.end(first)
    brokers.settle()
    assert brokers.values() == [b"1", b"2"]


def _bring_to(brokers: Brokers, state: str) -> int:
    epoch = brokers.init()
    if state == "empty":
        return epoch
    brokers.produce(epoch, b"1")
    if state != "ongoing":
        brokers.end(epoch, commit="commit" in state)
    if "complete" in state:
        brokers.settle()
    return epoch


@pytest.mark.parametrize(
    ("state", "commit", "abort", "add", "init"),
    [
        ("empty", Code.INVALID_STATE, Code.INVALID_STATE, Code.OK, Code.OK),
        ("ongoing", Code.OK, Code.OK, Code.OK, Code.CONCURRENT),
        (
            "prepare commit",
            Code.CONCURRENT,
            Code.INVALID_STATE,
            Code.CONCURRENT,
            Code.CONCURRENT,
        ),
        ("prepare abort", Code.INVALID_STATE, Code.CONCURRENT, Code.CONCURRENT, Code.CONCURRENT),
        ("complete commit", Code.OK, Code.INVALID_STATE, Code.OK, Code.OK),
        ("complete abort", Code.INVALID_STATE, Code.OK, Code.OK, Code.OK),
    ],
)
def test_each_state_answers_as_kafka_does(
    state: str, commit: Code, abort: Code, add: Code, init: Code
) -> None:
    answers = []
    for request in ("commit", "abort", "add", "init"):
        brokers = Brokers(marker_us=SLOW_MARKERS)
        epoch = _bring_to(brokers, state)
        if request == "add":
            answers.append(brokers.produce(epoch, b"2", partition=1)[0])
        elif request == "init":
            answers.append(brokers.kafka.init_producer(ID)[0])
        else:
            answers.append(brokers.end(epoch, commit=request == "commit"))
    assert answers == [commit, abort, add, init]


@pytest.mark.parametrize("state", ["ongoing", "prepare commit", "complete commit", "empty"])
def test_an_older_epoch_changes_nothing(brokers: Brokers, state: str) -> None:
    old = _bring_to(brokers, state)
    new = brokers.init()
    assert new > old
    assert brokers.produce(old, b"x", partition=1) == (Code.FENCED, 0)
    for commit in (True, False):
        assert brokers.end(old, commit=commit) is Code.FENCED
    assert brokers.produce(new, b"new") == (Code.OK, 1)


def test_what_is_ongoing_is_aborted_by_the_next_init(brokers: Brokers) -> None:
    old = brokers.init()
    brokers.produce(old, b"1")
    assert brokers.kafka.init_producer(ID) == (Code.CONCURRENT, -1)
    # Until the abort's marker is written, its partition still takes records that stay invisible.
    assert brokers.produce(old, b"2") == (Code.OK, 1)
    brokers.settle()
    assert brokers.produce(old, b"3") == (Code.FENCED, 0)
    assert brokers.init() == 2
    brokers.settle()
    assert brokers.values() == []


def test_a_late_copy_of_an_end_tears_the_next_transaction(brokers: Brokers) -> None:
    epoch = brokers.init()
    brokers.produce(epoch, b"1")
    brokers.end(epoch)
    brokers.settle()
    brokers.produce(epoch, b"2", b"3")
    assert brokers.kafka.end_transaction(ID, epoch, commit=True) is Code.OK  # the copy
    brokers.settle()
    assert brokers.produce(epoch, b"4") == (Code.INVALID_STATE, 0)
    assert brokers.values() == [b"1", b"2", b"3"]


def test_after_a_tear_a_new_partition_begins_a_transaction_without_the_old(
    brokers: Brokers,
) -> None:
    epoch = brokers.init()
    brokers.produce(epoch, b"1")
    brokers.kafka.end_transaction(ID, epoch, commit=True)
    brokers.settle()
    assert brokers.produce(epoch, b"2", partition=1) == (Code.OK, 1)
    assert brokers.produce(epoch, b"3", partition=0) == (Code.INVALID_STATE, 0)


def test_a_transaction_that_takes_too_long_is_aborted_and_its_producer_fenced(
    brokers: Brokers,
) -> None:
    epoch = brokers.init()
    brokers.produce(epoch, b"1")
    brokers.settle(LEADER_TIMEOUT_MS / 1000 - 1)
    assert brokers.kafka.ongoing()[0].committed is None
    brokers.settle(2.0)
    assert not brokers.kafka.ongoing()
    assert brokers.end(epoch) is Code.FENCED


def test_markers_wait_for_brokers_that_are_down(brokers: Brokers) -> None:
    epoch = brokers.init()
    brokers.produce(epoch, b"1")
    brokers.end(epoch)
    brokers.kafka.stop()
    brokers.settle(30.0)
    assert brokers.values() == []
    brokers.kafka.start()
    brokers.settle()
    assert brokers.values() == [b"1"]


def test_observers_are_called_at_once(brokers: Brokers) -> None:
    seen: list[tuple[str, int]] = []
    brokers.kafka.on_decided(lambda t: seen.append(("decided", t.decided_us)))
    brokers.kafka.on_visible(lambda e: seen.append((str(len(e)), e[0].visible_us)))
    epoch = brokers.init()
    brokers.produce(epoch, b"1", b"2")
    brokers.end(epoch)
    brokers.settle()
    assert seen == [("decided", 0), ("2", 50_000)]


def test_a_compacted_topic_forgets_what_was_replaced() -> None:
    brokers = Brokers()
    kafka = brokers.kafka
    kafka.create("c", compacted=True)
    (log,) = kafka.partitions("c")
    epoch = brokers.init()
    for number in range(2_000):
        key = b"gone" if number == 5 else b"key %d" % (number % 3)
        value = None if number == 5 else b"%d" % number
        kafka.produce(ID, epoch, "node", [(log, Record("c", key, value, []))], set())
        kafka.end_transaction(ID, epoch, commit=True)
        brokers.settle(0.01)
    assert kafka.live("c") == {b"key 0": b"1998", b"key 1": b"1999", b"key 2": b"1997"}
    assert log.compacted is not None
    assert len(log.compacted) < 600
    assert len(kafka.records_of_key("c", b"key 1")) == 667
    assert [record.offset for record in log.compacted] == sorted(
        record.offset for record in log.compacted
    )


def test_what_was_stable_can_be_asked_for_any_time() -> None:
    brokers = Brokers(marker_us=SLOW_MARKERS)
    kafka = brokers.kafka
    kafka.create("c", compacted=True)
    (log,) = kafka.partitions("c")
    epoch = brokers.init()
    kafka.produce(ID, epoch, "node", [(log, Record("c", b"k", b"v", []))], set())
    kafka.end_transaction(ID, epoch, commit=True)
    brokers.settle()
    assert [log.stable_at(at_us) for at_us in (-5, 0, 49_999, 50_000, 10**9)] == [0, 0, 0, 2, 2]


Request = tuple[str, int, int, bool]
requests = st.lists(
    st.tuples(
        st.sampled_from(["init", "produce", "end", "wait"]),
        st.integers(0, 1),  # which id
        st.integers(0, 2),  # how many epochs ago
        st.booleans(),
    ),
    max_size=60,
)


@given(requests)
@settings(deadline=None)
def test_no_order_of_requests_breaks_the_logs(steps: list[Request]) -> None:
    brokers = Brokers()
    epochs = {ID: [brokers.init(ID)], OTHER_ID: [brokers.init(OTHER_ID)]}
    decided: set[int] = set()
    brokers.kafka.on_decided(lambda transaction: decided.add(id(transaction)))
    for number, (what, which, ago, flag) in enumerate(steps):
        name = (ID, OTHER_ID)[which]
        epoch = epochs[name][max(0, len(epochs[name]) - 1 - ago)]
        if what == "init":
            code, new = brokers.kafka.init_producer(name)
            epochs[name] += [new] if code is Code.OK else []
        elif what == "produce":
            brokers.produce(epoch, b"%d" % number, name=name, partition=int(flag))
        elif what == "end":
            brokers.end(epoch, commit=flag, name=name)
        else:
            brokers.settle(0.001)
    brokers.kafka.check()
    brokers.settle(30.0)
    brokers.kafka.check()
    logs = brokers.kafka.partitions(TOPIC)
    assert all(log.last_stable_offset == len(log.log) for log in logs)
    records = [entry for log in logs for entry in log.log if entry.marker is None]
    assert {id(entry.transaction) for entry in records} <= decided
    committed = {id(entry) for entry in records if entry.transaction.committed}
    assert {id(entry) for entry in brokers.kafka.visible(TOPIC)} == committed


def _an_offset_too_many(log: Partition) -> None:
    log.log[0].offset += 1


def _a_marker_twice(log: Partition) -> None:
    log.log.append(Entry(log, log.log[0].transaction, None, marker=True))


def _another_word(log: Partition) -> None:
    log.log[-1].marker = False


def _too_early(log: Partition) -> None:
    log.log[0].visible_us = -1


@pytest.mark.parametrize("spoil", [_an_offset_too_many, _a_marker_twice, _another_word, _too_early])
def test_a_log_that_cannot_be_is_found(spoil: object) -> None:
    brokers = Brokers()
    epoch = brokers.init()
    brokers.produce(epoch, b"1")
    brokers.end(epoch)
    brokers.settle()
    brokers.kafka.check()
    assert callable(spoil)
    spoil(brokers.kafka.partitions(TOPIC)[0])
    with pytest.raises(SimKafkaError):
        brokers.kafka.check()


def test_a_marker_of_nothing_is_found() -> None:
    brokers = Brokers()
    epoch = brokers.init()
    brokers.produce(epoch, b"1")
    (transaction,) = brokers.kafka.ongoing()
    with pytest.raises(SimKafkaError):
        brokers.kafka.partitions(TOPIC)[0].mark(transaction, 0)
