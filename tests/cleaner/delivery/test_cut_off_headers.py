"""A header's name with U+0000, which an earlier version accepted, is in a wheel."""

from __future__ import annotations

from delaywheel.identity import WheelId
from delaywheel_replica.cleaner.delivery.dead_letters import condemn
from delaywheel_replica.cleaner.delivery.outcomes import DeadReason, dead_letter, forwarded
from delaywheel_replica.cleaner.due.rows import ABSENT, DueMessage
from delaywheel_replica.cleaner.kafka.producers import TransactionalProducer
from delaywheel_replica.cleaner.outside.ports import HEADER_CUT_OFF, RefusedRecord
from delaywheel_replica.kafka_settings import KafkaNames, KafkaSettings
from support.due.rows import due_rows

NAMES = KafkaNames("c")


def due(*headers: tuple[str, bytes | None]) -> DueMessage:
    wheel = WheelId("a", 1)
    return DueMessage("t", ABSENT, None, b"v", [*headers], ABSENT, 1, bytes(16), 1, wheel, 1, 0)


def test_it_is_not_produced_cut_off_but_becomes_a_dead_letter() -> None:
    settings = KafkaSettings(NAMES, {"bootstrap.servers": "127.0.0.1:1"})
    producer = TransactionalProducer(settings, "id", log_level=0)
    messages = [due(("a\0b", b"1")), due(("a", b"1"), ("\0", None))]
    refused = producer.write(forwarded(due_rows(messages), 1))
    assert refused == [RefusedRecord(0, HEADER_CUT_OFF), RefusedRecord(1, HEADER_CUT_OFF)]
    assert not producer.failed, "the transaction is none the worse"
    condemned = condemn(due(("a\0b", b"1")), refused[0].reason)
    assert condemned.reason is DeadReason.HEADER_INVALID
    letter, _ = dead_letter(NAMES, condemned.message, condemned.reason, condemned.detail)
    assert letter.headers[0] == ("a␀b", b"1")
    assert not any("\0" in name for name, _ in letter.headers)
