"""Calls of the Kafka client that do not end in time, or are refused for a while."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]

from delaywheel.consumer import Partition
from delaywheel.consumer.kafka import KafkaBroker, member, topics, transaction
from delaywheel.consumer.kafka.topics import ends_of, first_since, ids_unable, topics_unable
from delaywheel.consumer.kafka.transaction import Transaction
from delaywheel.consumer.port import KafkaUnavailable, TransactionFailure
from delaywheel.consumer.records import Passed
from delaywheel.consumer.settings import read_settings, transactional_ids
from delaywheel.transactional import Outgoing
from support.kafka.fenced_admin import FencedAdmin

KILLED = 2


class FakeProducer:
    """Its offsets are taken once it learns of that, or are refused."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.goes_on = threading.Event()
        self.calls: list[str] = []
        self._refusal = refusal
        if refusal is not None:
            self.goes_on.set()

    def begin_transaction(self) -> None:
        self.calls.append("begin")

    def flush(self, _timeout_s: float) -> int:
        return 0

    def send_offsets_to_transaction(self, *_: Any) -> None:
        self.goes_on.wait()
        if self._refusal is not None:
            raise self._refusal

    def commit_transaction(self, _timeout_s: float) -> None:
        self.calls.append("commit")


class Coordinator:
    """Makes producers; it has not ended what those of the ids in `open` have begun."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.answers: list[int] = []
        self.ids: list[str] = []
        self.patience_s: list[float] = []

    def producer(self, settings: dict[str, Any], **_: Any) -> Coordinator:
        self.ids.append(settings["transactional.id"])
        return self

    def init_transactions(self, timeout_s: float) -> None:
        self.patience_s.append(timeout_s)
        if self.answers:
            raise KafkaException(KafkaError(self.answers.pop(), retriable=True))
        if self.ids[-1] in self.open:
            raise KafkaException(KafkaError(KafkaError.CONCURRENT_TRANSACTIONS, retriable=True))


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    coordinator = Coordinator()
    monkeypatch.setattr(member, "Producer", coordinator.producer)
    return coordinator


def test_a_transaction_that_kafka_cannot_end_now_keeps_its_id_alone(
    coordinator: Coordinator,
) -> None:
    broker = KafkaBroker(read_settings("orders", "group", "nowhere:1", {"instance": "a"}))
    broker.renew_producer(frozenset())
    for number in range(9):
        coordinator.open = {coordinator.ids[-1]}
        with pytest.raises(KafkaUnavailable, match="CONCURRENT"):
            broker.renew_producer(frozenset())
        broker.renew_producer(frozenset())
        assert coordinator.ids[-1] != coordinator.ids[-2], number
    broker.renew_producer(frozenset())
    assert coordinator.ids[-1] == coordinator.ids[-2]
    ids = set(coordinator.ids)
    assert len(ids) == 8, "those that are free again have their turn"
    assert all(one.startswith("delaywheel-retry-group-") for one in ids), "as rights are given"


def test_while_coordinators_move_each_id_is_waited_for_longer(coordinator: Coordinator) -> None:
    coordinator.answers = [KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError._TIMED_OUT]
    broker = KafkaBroker(read_settings("orders", "group", "nowhere:1", {}))
    for _ in range(2):
        with pytest.raises(KafkaUnavailable):
            broker.renew_producer(frozenset())
    for _ in range(2):
        broker.renew_producer(frozenset())
    first, second, third, again = coordinator.patience_s
    assert first < second <= third
    assert again == first, "once an id was had"
    assert len(set(coordinator.ids[:3])) == 3
    assert coordinator.ids[2] == coordinator.ids[3]


def answer(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Metadata:
    """What brokers answer about one topic: two of them are there, and the third one was killed."""

    def __init__(self, name: str, partitions: list[tuple[int, int, int]]) -> None:
        """The leader of each partition, and how many replicas are in sync, and are."""
        self._name, self._partitions, self._listening = name, partitions, ExitStack()

    def __enter__(self) -> AdminClient:
        with self._listening:
            sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
            for each in sockets:
                self._listening.enter_context(each)
            brokers = {
                number: SimpleNamespace(host="127.0.0.1", port=each.getsockname()[1])
                for number, each in enumerate(sockets)
            }
            sockets[KILLED].close()
            found = [
                SimpleNamespace(leader=leader, isrs=range(in_sync), replicas=range(replicas))
                for leader, in_sync, replicas in self._partitions
            ]
            topic = SimpleNamespace(partitions=dict(enumerate(found)), error=None)
            self._answer = SimpleNamespace(brokers=brokers, topics={self._name: topic})
            self._listening = self._listening.pop_all()
        return cast("AdminClient", self)

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def list_topics(self, name: str, **_: Any) -> Any:
        assert name == self._name
        return self._answer

    def describe_configs(self, asked: list[ConfigResource], **_: Any) -> dict[Any, Future[Any]]:
        return {asked[0]: answer({"min.insync.replicas": SimpleNamespace(value="2")})}


@pytest.mark.parametrize(
    ("partitions", "is_unable"),
    [
        ([(0, 3, 3), (1, 2, 3)], False),
        ([(0, 3, 3), (-1, 1, 1)], True),
        ([(0, 3, 3), (KILLED, 3, 3)], True),
        ([(0, 1, 3)], True),
        ([(0, 1, 1)], False),
    ],
)
def test_a_topic_cannot_be_written_to_if_one_of_its_partitions_cannot(
    partitions: list[tuple[int, int, int]], is_unable: bool
) -> None:
    """Kafka names a broker that was killed for seconds as the leader."""
    with Metadata("bills", partitions) as admin:
        assert topics_unable(admin, ["bills"]) == ({"bills"} if is_unable else set())


def test_a_broker_is_tried_once_however_many_topics_it_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose machine is away says nothing for a second: a transaction has a few topics."""
    tried = list[object]()

    def is_there(broker: object) -> bool:
        tried.append(broker)
        return False

    monkeypatch.setattr(topics, "takes_connection", is_there)
    partition = SimpleNamespace(leader=1, isrs=[1], replicas=[1])
    led = SimpleNamespace(partitions={0: partition}, error=None)

    def list_topics(name: str, **_: Any) -> Any:
        return SimpleNamespace(brokers={1: "b1"}, topics={name: led})

    admin = cast("AdminClient", SimpleNamespace(list_topics=list_topics))
    assert topics_unable(admin, ["bills", "retries", "letters"]) == {"bills", "retries", "letters"}
    assert tried == ["b1"]


@pytest.mark.parametrize(
    ("id_", "partition"),
    [("hello", 22), ("delaywheel", 20), ("polygenelubricants", 0)],  # the last hash has no positive
)
def test_an_ids_coordinator_is_found_as_kafka_does(id_: str, partition: int) -> None:
    for away in range(50):
        led = [(KILLED if number == away else 0, 3, 3) for number in range(50)]
        with Metadata("__transaction_state", led) as admin:
            assert (ids_unable(admin, [id_], 1.0) == {id_}) == (away == partition)


def test_an_id_whose_coordinator_was_killed_is_left_for_one_that_has_its_own(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if no other one has: with one broker all are away, for a moment perhaps."""
    monkeypatch.setattr(transaction, "CALL_S", 3_600.0)  # for which this test would wait
    monkeypatch.setattr(transaction, "UNANSWERED_S", 0.01)
    settings = read_settings("orders", "group", "nowhere:1", {"instance": "a"})
    broker = KafkaBroker(settings)
    with Metadata("__transaction_state", [(0, 3, 3), (KILLED, 3, 3)]) as broker._admin:
        broker.renew_producer(frozenset())
        failure = commit(FakeProducer(), broker)
        assert failure == TransactionFailure("the coordinator of this transactional id is away")
        broker.renew_producer(frozenset())
    ids = transactional_ids("group", "a")
    assert coordinator.ids == [ids[0], ids[2]], "those of the first two are led by the killed one"
    with Metadata("__transaction_state", [(KILLED, 3, 3)]) as broker._admin:
        monkeypatch.setattr(transaction, "CALL_S", 0.05)
        assert commit(FakeProducer(), broker) == TransactionFailure(
            "the coordinator of the group did not answer"
        )


def test_records_without_coordinator_say_nothing_of_their_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else their partitions would be held up once another id has none, either."""
    monkeypatch.setattr(transaction, "CALL_S", 3_600.0)
    monkeypatch.setattr(transaction, "UNANSWERED_S", 0.0)
    failure = write_to({"bills"}, set(), should_leave=True)
    assert failure == TransactionFailure("the coordinator of this transactional id is away")


class SilentProducer(FakeProducer):
    """Never hears of its records."""

    def produce(self, *_: Any, **__: Any) -> None:
        pass

    def flush(self, _timeout_s: float) -> int:
        return 2


def write_to(
    topics: set[str], unable: set[str], *, should_leave: bool = False
) -> TransactionFailure | None:
    """Writes to topics that do not answer, of which Kafka says that some cannot be written to."""
    producer = cast("Producer", SilentProducer())
    written = Transaction(producer, unable.intersection, lambda: should_leave)
    return written.commit([Outgoing(one, None, b"", []) for one in sorted(topics)], {}, b"m")


def test_a_transaction_ends_as_soon_as_kafka_says_why_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all partitions would wait for `CALL_S`: this test, for an hour."""
    monkeypatch.setattr(transaction, "CALL_S", 3_600.0)
    monkeypatch.setattr(transaction, "UNANSWERED_S", 0.0)
    failure = write_to({"bills", "fine"}, {"bills", "other"})
    assert failure is not None
    assert failure.text == "bills: no leader, or too few replicas in sync, of a partition"
    assert failure.unanswered == {"bills", "fine"}
    assert failure.unable == {"bills"}
    assert not failure.is_late


def test_records_of_which_kafka_says_nothing_have_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transaction, "CALL_S", 0.05)
    monkeypatch.setattr(transaction, "UNANSWERED_S", 0.0)
    failure = write_to({"bills"}, set())
    assert failure is not None
    assert failure.text == "no answer to 2 records"
    assert failure.is_late


def test_an_id_that_kafka_said_it_cannot_end_is_hardly_waited_for(
    coordinator: Coordinator,
) -> None:
    broker = KafkaBroker(read_settings("orders", "group", "nowhere:1", {}))
    broker.renew_producer(frozenset())
    unable = TransactionFailure("no leader", unable=frozenset({"bills"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transaction, "commit", lambda *_, **__: unable)
        assert broker.commit((), {}, b"membership") == unable
    coordinator.open = {coordinator.ids[-1]}
    with pytest.raises(KafkaUnavailable, match="CONCURRENT"):
        broker.renew_producer(frozenset())
    broker.renew_producer(frozenset())
    assert coordinator.patience_s == [member.ENDED_S, member.UNENDED_S, member.ENDED_S]


def commit(producer: FakeProducer, broker: KafkaBroker | None = None) -> TransactionFailure | None:
    broker = broker or KafkaBroker(read_settings("orders", "group", "nowhere:1", {}))
    broker._producer = cast("Producer", producer)
    return broker.commit((), {Partition("orders", 0): Passed(5)}, b"membership")


def test_offsets_that_are_never_answered_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the only broker was restarted: its producer is replaced."""
    monkeypatch.setattr(transaction, "CALL_S", 0.05)
    producer = FakeProducer()
    assert commit(producer) == TransactionFailure("the coordinator of the group did not answer")
    assert producer.calls == ["begin"]
    producer.goes_on.set()


def test_offsets_that_are_refused_fail_the_transaction() -> None:
    producer = FakeProducer(KafkaException("ILLEGAL_GENERATION"))
    assert commit(producer) == TransactionFailure("ILLEGAL_GENERATION")
    assert producer.calls == ["begin"]


def test_offsets_that_are_taken_are_committed() -> None:
    producer = FakeProducer()
    producer.goes_on.set()
    assert commit(producer) is None
    assert producer.calls == ["begin", "commit"]


def test_offsets_are_asked_again_with_the_epoch_of_the_present_leader() -> None:
    at = Partition("orders", 0)
    assert ends_of(cast("AdminClient", FencedAdmin()), [at]) == {at: 7}
    assert first_since(cast("AdminClient", FencedAdmin()), at, 1) == 7
