"""The leader's producers on the real broker: the outcome after each kind of failure."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from delaywheel_replica.cleaner.delivery.topics import TopicState
from delaywheel_replica.cleaner.kafka import producers as producing
from delaywheel_replica.cleaner.kafka.brokers import brokers_of, check_brokers, ensure_topics
from delaywheel_replica.cleaner.kafka.control_topic import ControlReader
from delaywheel_replica.cleaner.kafka.producers import LeaderProducers
from delaywheel_replica.cleaner.kafka.topic_admin import KafkaTopicAdmin
from delaywheel_replica.cleaner.outside.ports import (
    IDS,
    UNTAKEN,
    KafkaCallEnd,
    Record,
    StoredRecord,
)
from delaywheel_replica.core.protocol.transaction_outcomes import TransactionState
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from local.loopback.kafka import KafkaBroker
from support.kafka.proxy import KafkaProxy
from support.kafka.read_committed import create_topic, delete_topic, read_all, wait_decided

pytestmark = pytest.mark.kafka

PATIENT_MS = 9_000
"""For calls that are to succeed: as long as any may last, whatever the machine has to do."""
CALL_MS = 3_000
"""For those that cannot."""
SHORT_MS = 1_000
"""Less than what is waited for takes."""
SLACK_S = 3
"""Two calls and this end before the shortest time that only Kafka would end: 10 s."""


@pytest.fixture
def settings(kafka: KafkaBroker, cluster_id: str) -> KafkaSettings:
    settings = KafkaSettings(KafkaNames(cluster_id), {"bootstrap.servers": kafka.address})
    admin = AdminClient(settings.admin())
    brokers = brokers_of(admin, settings.names.control)
    check_brokers(admin, (broker.id for broker in brokers))
    ensure_topics(admin, settings, replicas=1, has_wheels=False)
    return settings


@pytest.fixture
def proxy(kafka: KafkaBroker) -> Iterator[KafkaProxy]:
    with KafkaProxy(kafka) as proxy:
        yield proxy


def through_proxy(settings: KafkaSettings, kafka: KafkaBroker) -> KafkaSettings:
    return KafkaSettings(settings.names, {"bootstrap.servers": kafka.proxy_address})


def inited(settings: KafkaSettings) -> LeaderProducers:
    """Producers that have fenced all others."""
    producers = LeaderProducers(settings)
    for number in range(IDS):
        assert producers.init(number, PATIENT_MS) == KafkaCallEnd(TransactionState.CONTINUE)
    return producers


def message(topic: str, value: bytes, **more: int) -> Record:
    return Record(topic, None, value, [], **more)


def progress(settings: KafkaSettings, value: bytes) -> Record:
    return Record(settings.names.control, b"progress", value, [], partition=0)


def values(kafka: KafkaBroker, topic: str, at_least: int = 0) -> list[bytes | None]:
    return [read.value() for read in read_all(kafka.address, topic, at_least=at_least)]


def control_values(
    kafka: KafkaBroker, settings: KafkaSettings, at_least: int = 0
) -> list[bytes | None]:
    return values(kafka, settings.names.control, at_least)


def test_two_ids_take_turns(kafka: KafkaBroker, settings: KafkaSettings, topic: str) -> None:
    producers = inited(settings)
    wanted = [b"%d" % n for n in range(20)]
    for n, value in enumerate(wanted):
        producers.begin(n % IDS)
        assert producers.write(n % IDS, [message(topic, value)]) == []
        assert producers.commit(n % IDS, progress(settings, value), PATIENT_MS).verdict.is_committed
    assert values(kafka, topic, len(wanted)) == wanted
    assert control_values(kafka, settings, len(wanted)) == wanted


def test_what_the_broker_refuses_ends_the_transaction_alone(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str
) -> None:
    small = f"small-{topic}"
    create_topic(kafka.address, small, config={"max.message.bytes": "1000"})
    producers = inited(settings)
    producers.begin(0)
    producers.write(0, [message(topic, b"with it"), message(small, b"x" * 5_000)])
    ended = producers.commit(0, progress(settings, b"1"), PATIENT_MS)
    assert ended.verdict in (TransactionState.ABORTED, TransactionState.ABANDONED)
    assert ended.cause is not None
    assert ended.cause.startswith("MSG_SIZE_TOO_LARGE")
    producers.begin(0)  # the same producer continues
    producers.write(0, [message(topic, b"after it")])
    assert producers.commit(0, progress(settings, b"2"), PATIENT_MS).verdict.is_committed
    assert values(kafka, topic, 1) == [b"after it"]
    assert control_values(kafka, settings, 1) == [b"2"]


def test_what_the_client_refuses_is_named_and_the_rest_goes_out(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str
) -> None:
    producers = inited(settings)
    assert producers.warm([topic], PATIENT_MS)
    producers.begin(0)
    records = [message(topic, b"a"), message(topic, b"b", partition=7), message(topic, b"c")]
    (refused,) = producers.write(0, records)
    assert (refused.number, refused.reason) == (1, "_UNKNOWN_PARTITION")
    assert producers.commit(0, progress(settings, b"1"), PATIENT_MS).verdict.is_committed
    assert values(kafka, topic, 2) == [b"a", b"c"]


@pytest.mark.parametrize("known", [False, True], ids=["never seen", "deleted"])
def test_a_missing_topic_leaves_nothing_visible(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str, known: bool
) -> None:
    gone = f"gone-{topic}"
    producers = inited(settings)
    if known:
        create_topic(kafka.address, gone)
        producers.begin(0)
        producers.write(0, [message(gone, b"x")])
        assert (
            producers.commit(0, progress(settings, b"1"), PATIENT_MS).verdict
            is TransactionState.COMMITTED
        )
        delete_topic(kafka.address, gone)
    producers.begin(1)
    producers.write(1, [message(topic, b"beside"), message(gone, b"x")])
    ended = producers.commit(1, progress(settings, b"2"), CALL_MS)
    assert ended.verdict in (TransactionState.ABORTED, TransactionState.ABANDONED)
    inited(settings)
    assert values(kafka, topic) == []
    assert b"2" not in control_values(kafka, settings)


def test_a_fenced_leader_commits_nothing(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str
) -> None:
    old = inited(settings)
    old.begin(0)
    old.write(0, [message(topic, b"old")])
    old.flush(0, PATIENT_MS)
    new = inited(settings)  # over an open transaction
    assert old.commit(0, progress(settings, b"old"), PATIENT_MS).verdict is TransactionState.TAKEN
    old.begin(1)
    old.write(1, [message(topic, b"old")])
    assert old.commit(1, progress(settings, b"old"), PATIENT_MS).verdict is TransactionState.TAKEN
    new.begin(0)
    new.write(0, [message(topic, b"new")])
    assert new.commit(0, progress(settings, b"new"), PATIENT_MS).verdict.is_committed
    assert values(kafka, topic, 1) == [b"new"]
    assert control_values(kafka, settings, 1) == [b"new"]


def test_a_leader_that_is_fenced_hears_it_from_its_calls_whatever_the_client_logs(
    kafka: KafkaBroker, settings: KafkaSettings, cluster_id: str
) -> None:
    topics = [f"orders-{number}-{cluster_id}" for number in range(20)]
    for topic in topics:
        create_topic(kafka.address, topic)
    talkative = {**settings.client, "debug": "eos,msg", "log_level": 7}
    old = inited(KafkaSettings(settings.names, talkative))
    old.begin(0)
    old.write(0, [message(topic, b"v") for topic in topics])
    old.flush(0, PATIENT_MS)
    new = inited(settings)
    old.write(0, [message(topic, b"v") for topic in topics])
    assert old.commit(0, progress(settings, b"lost"), PATIENT_MS).verdict is TransactionState.TAKEN
    assert values(kafka, topics[0]) == []
    old.destroy()
    new.destroy()


def test_topics_that_are_reported_as_present_take_messages_at_once(
    settings: KafkaSettings, cluster_id: str
) -> None:
    topics = [f"new-{number}-{cluster_id}" for number in range(300)]
    admin, leader = KafkaTopicAdmin(settings), inited(settings)
    maker = AdminClient(settings.admin())
    for future in maker.create_topics([NewTopic(topic, 1) for topic in topics]).values():
        future.result()
    waiting, deadline = set(topics), time.monotonic() + 60
    while waiting and time.monotonic() < deadline:
        answers = admin.describe(sorted(waiting))
        present = [name for name in waiting if answers[name].state is TopicState.PRESENT]
        ready = present[:100]  # no transaction may last longer than 9 s, on a busy machine either
        leader.begin(0)
        leader.write(0, [message(topic, b"v") for topic in ready])
        last = progress(settings, b"done")
        assert leader.commit(0, last, PATIENT_MS).verdict.is_committed
        waiting -= set(ready)
    assert not waiting
    leader.destroy()


def test_records_that_are_being_answered_are_waited_for(
    kafka: KafkaBroker,
    settings: KafkaSettings,
    cluster_id: str,
    proxy: KafkaProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker that is busy takes its time for each partition, and so would the next leader's."""
    monkeypatch.setattr(producing, "ANSWER_MS", 4_000)  # a busy machine stops for a second
    topic = f"many-{cluster_id}"
    create_topic(kafka.address, topic, partitions=40)
    producers = inited(through_proxy(settings, kafka))
    assert producers.warm([topic, settings.names.control], PATIENT_MS)
    proxy.delay_produces(0.1)
    producers.begin(0)
    producers.write(0, [message(topic, b"v", partition=number) for number in range(40)])
    began_s = time.monotonic()
    ended = producers.commit(0, progress(settings, b"1"), 2_500)
    assert ended.verdict.is_committed
    assert time.monotonic() - began_s > 3
    answered_ms = producers.answered_ms
    assert answered_ms is not None
    assert answered_ms > (began_s + 3) * 1000
    producers.begin(0)
    assert producers.answered_ms is None
    producers.destroy()


def test_while_kafka_answers_questions_no_call_ends(
    kafka: KafkaBroker,
    settings: KafkaSettings,
    topic: str,
    proxy: KafkaProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Partitions and coordinators that move answer late, whoever leads."""
    monkeypatch.setattr(producing, "ANSWER_S", 4.0)  # a busy machine stops for a second
    producers = inited(through_proxy(settings, kafka))
    assert producers.warm([topic, settings.names.control], PATIENT_MS)
    at_once = proxy.delay_produces(2.5)
    producers.begin(0)
    producers.write(0, [message(topic, b"once")])
    assert producers.flush(0, SHORT_MS)
    at_once()
    at_once = proxy.delay_ends(2.5)
    ended = producers.commit(0, progress(settings, b"1"), SHORT_MS)
    assert ended.verdict is TransactionState.COMMITTED_LOOSE
    at_once()
    assert values(kafka, topic, 1) == [b"once"]
    producers.destroy()


def test_a_broker_that_kafka_has_not_missed_yet_is_outlasted(
    kafka: KafkaBroker,
    settings: KafkaSettings,
    topic: str,
    proxy: KafkaProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its copies count as in sync until its session has ended: nobody is answered before."""
    monkeypatch.setattr(producing, "ANSWER_S", 4.0)  # a busy machine stops for a second
    monkeypatch.setattr(producing, "MOVES_S", 0.0)
    producers = inited(through_proxy(settings, kafka))
    monkeypatch.setattr(producers, "misses_broker", lambda: True)
    assert producers.warm([topic, settings.names.control], PATIENT_MS)
    at_once = proxy.delay_produces(2.5)
    producers.begin(0)
    producers.write(0, [message(topic, b"once")])
    assert producers.flush(0, SHORT_MS)
    at_once()
    assert producers.commit(0, progress(settings, b"1"), PATIENT_MS).verdict.is_committed
    assert values(kafka, topic, 1) == [b"once"]
    producers.destroy()


def test_an_end_whose_reply_is_lost_is_sent_again_and_counts_once(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str, proxy: KafkaProxy
) -> None:
    producers = inited(through_proxy(settings, kafka))
    producers.begin(0)
    producers.write(0, [message(topic, b"once")])
    producers.flush(0, PATIENT_MS)
    proxy.lose_next_end_txn_reply()
    ended = producers.commit(0, progress(settings, b"1"), PATIENT_MS)
    assert ended.verdict is TransactionState.COMMITTED_LOOSE
    assert proxy.lost_replies == 1
    producers.destroy()
    inited(settings)
    assert values(kafka, topic, 1) == [b"once"]
    assert control_values(kafka, settings, 1) == [b"1"]


def test_a_late_copy_of_an_end_tears_no_transaction_of_an_id_that_was_inited_again(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str, proxy: KafkaProxy
) -> None:
    producers = inited(through_proxy(settings, kafka))
    producers.begin(0)
    producers.write(0, [message(topic, b"held")])
    producers.flush(0, PATIENT_MS)
    proxy.hold_next_end_txn()
    ended = producers.commit(0, progress(settings, b"1"), PATIENT_MS)
    assert ended.verdict is TransactionState.COMMITTED_LOOSE
    assert proxy.held_requests == 1
    assert producers.init(0, PATIENT_MS).verdict is TransactionState.CONTINUE
    producers.begin(0)
    producers.write(0, [message(topic, b"first half")])
    producers.flush(0, PATIENT_MS)
    proxy.release_held()
    assert values(kafka, topic, 1) == [b"held"]
    producers.write(0, [message(topic, b"second half")])
    ended = producers.commit(0, progress(settings, b"2"), PATIENT_MS)
    assert ended.verdict.is_committed
    assert values(kafka, topic, 3) == [b"held", b"first half", b"second half"]
    assert control_values(kafka, settings, 2) == [b"1", b"2"]
    producers.destroy()


def test_what_was_written_in_a_transaction_without_answer_never_counts(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str, proxy: KafkaProxy
) -> None:
    """The id is inited again, and the same is written once more with the other one."""
    producers = inited(through_proxy(settings, kafka))
    assert producers.warm([topic, settings.names.control], PATIENT_MS)
    answer_again = proxy.swallow_produces(topic)
    producers.is_untaken = lambda: True
    producers.begin(0)
    producers.write(0, [message(topic, b"once")])
    ended = producers.commit(0, progress(settings, b"1"), CALL_MS)
    assert ended.verdict is TransactionState.ABANDONED
    assert (ended.cause or "").startswith(f"{UNTAKEN}: no answer to 1 records")
    answer_again()
    assert producers.init(0, PATIENT_MS).verdict is TransactionState.CONTINUE
    for number in (1, 0):
        producers.begin(number)
        producers.write(number, [message(topic, b"once" if number else b"next")])
        ended = producers.commit(number, progress(settings, b"%d" % number), PATIENT_MS)
        assert ended.verdict.is_committed
    assert values(kafka, topic, 2) == [b"once", b"next"]
    producers.destroy()


def test_a_record_whose_connection_breaks_is_sent_again_and_stored_once(
    kafka: KafkaBroker, settings: KafkaSettings, topic: str, proxy: KafkaProxy
) -> None:
    producers = inited(through_proxy(settings, kafka))
    producers.begin(0)
    proxy.break_at_next_produce(topic)
    producers.write(0, [message(topic, b"once")])
    ended = producers.commit(0, progress(settings, b"1"), PATIENT_MS)
    assert ended.verdict.is_committed
    assert values(kafka, topic, 1) == [b"once"]
    producers.destroy()


def test_the_control_topic_is_read_to_its_last_stable_offset(
    kafka: KafkaBroker, settings: KafkaSettings
) -> None:
    producers = inited(settings)
    reader = ControlReader(settings)

    def commit(key: bytes, value: bytes | None) -> None:
        producers.begin(0)
        record = Record(settings.names.control, key, value, [], partition=0)
        assert producers.commit(0, record, PATIENT_MS).verdict.is_committed
        wait_decided(kafka.address, settings.names.control)

    try:
        commit(b"a", b"1")
        producers.begin(1)
        producers.write(1, [progress(settings, b"open")])
        producers.flush(1, PATIENT_MS)
        now_ms = time.time() * 1000
        (first,) = reader.read_to_end(60)
        assert first[:3] == StoredRecord(b"a", b"1", 0)[:3]
        assert abs(first.appended_ms - now_ms) < 60_000, "the broker stamps it"
        inited(settings).begin(0)  # ends the open transaction
        producers = inited(settings)
        assert reader.read_to_end(60) == []
        commit(b"a", None)
        (removed,) = reader.read_to_end(60)
        assert (removed.key, removed.value) == (b"a", None)
        assert reader.position > removed.offset
    finally:
        reader.close()
