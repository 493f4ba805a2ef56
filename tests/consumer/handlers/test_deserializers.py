"""Keys and values as objects: read once, when asked for; what cannot be read is a dead letter."""

from __future__ import annotations

import pytest
from confluent_kafka.serialization import MessageField, SerializationError, StringDeserializer

from delaywheel.consumer import Batch, UnreadableError, read_json
from support.consumer.driven import DrivenConsumer, start
from support.consumer.fake_kafka import INGRESS, FakeKafka


def having(kafka: FakeKafka, *values: bytes, **options: object) -> tuple[DrivenConsumer, Batch]:
    consumer = start(kafka, **options)
    for value in values:
        kafka.send(value, headers=[("h", b"1")])
    while len(consumer.hand) < len(values):
        consumer.run_once()
        consumer.take(9)
    return consumer, Batch(consumer.hand)


def written(kafka: FakeKafka) -> dict[bytes | None, str]:
    """What each record was sent as: the reason of a letter, or that it comes back."""
    return {
        one.value: "retried"
        if one.topic == INGRESS
        else (dict(one.headers)["dw-dead-reason"] or b"").decode()
        for one in kafka.committed_records
    }


def test_a_value_is_read_when_it_is_asked_for_and_once() -> None:
    asked: list[object] = []

    def read(content: bytes, context: object) -> object:
        asked.append(context)
        return content.decode()

    _, [message] = having(FakeKafka(partitions=1), b"v", value_deserializer=read)
    assert not asked
    assert [message.data, message.data, message.value] == ["v", "v", b"v"]
    assert asked == [("orders", MessageField.VALUE, [("h", b"1")])]


def test_deserializers_of_confluent_kafka_fit() -> None:
    _, batch = having(
        FakeKafka(partitions=1), b"v", b"\xff", value_deserializer=StringDeserializer("utf_8")
    )
    assert batch[0].data == "v"
    with pytest.raises(UnreadableError, match="the value: SerializationError"):
        _ = batch[1].data


def test_only_what_has_no_object_is_lost_to_a_batch() -> None:
    kafka = FakeKafka(partitions=1)
    consumer, batch = having(kafka, b"1", b"{", b"3", value_deserializer=read_json)
    with batch:
        _ = [message.data for message in batch]
    again = Batch(consumer.take(9))
    assert [(one.value, one.attempt) for one in again] == [(b"1", 1), (b"3", 1)]
    with again:
        assert [message.data for message in again] == [1, 3]
    consumer.run_once()
    assert written(kafka) == {b"{": "UNREADABLE"}
    assert (consumer.engine.counts.done, consumer.engine.counts.dead) == (2, 1)


def test_a_batch_leaves_out_what_cannot_be_read() -> None:
    kafka = FakeKafka(partitions=1)
    consumer, batch = having(kafka, b"1", b"{", b"3", value_deserializer=read_json)
    batch.drop_unreadable()
    with batch:
        assert [message.data for message in batch] == [1, 3]
    consumer.run_once()
    assert written(kafka) == {b"{": "UNREADABLE"}


class _RegistryError(Exception):
    http_status_code = 503


def test_a_registry_that_does_not_answer_makes_no_dead_letter() -> None:
    def read(content: bytes, _: object) -> object:
        if content == b"down":
            raise SerializationError("no schema") from ConnectionError("refused")
        raise _RegistryError(content)

    kafka = FakeKafka(partitions=1)
    consumer, batch = having(kafka, b"down", b"busy", value_deserializer=read)
    batch.drop_unreadable()
    for message in batch:
        with message:
            _ = message.data
    consumer.run_once()
    assert written(kafka) == {b"down": "retried", b"busy": "retried"}


async def _awaited(content: bytes, _: object) -> object:
    return content


@pytest.mark.parametrize("given", [_awaited, "json"])
def test_what_is_no_plain_function_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match="value_deserializer"):
        start(FakeKafka(), value_deserializer=given)
