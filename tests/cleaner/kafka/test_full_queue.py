"""A record that is larger than the client's queue, which `config check` refuses."""

from __future__ import annotations

from confluent_kafka import Producer

from delaywheel_replica.cleaner.kafka.producers import TransactionalProducer
from delaywheel_replica.cleaner.outside.ports import Record, RefusedRecord
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings

CLIENT = {"bootstrap.servers": "127.0.0.1:1", "queue.buffering.max.kbytes": "512"}


def test_it_alone_is_refused() -> None:
    producer = TransactionalProducer(KafkaSettings(KafkaNames("c"), CLIENT), "id", log_level=0)
    # One that needs no broker to begin a transaction.
    producer._producer = Producer({**CLIENT, "message.max.bytes": 90_000_000, "log_level": 0})
    refused = producer.write([Record("t", None, bytes(600_000), [])])
    assert refused == [RefusedRecord(0, "_QUEUE_FULL")]
    assert not producer.failed, "the transaction is none the worse"
    producer.write_own([Record("t", None, bytes(600_000), [])])
    assert producer.failed, "without a record of ours it must not be committed"
