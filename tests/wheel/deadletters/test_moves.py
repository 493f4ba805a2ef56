"""A partition's leader moves while a topic of letters is asked where it begins and ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from delaywheel.deadletters.errors import DeadLettersError, DeadLettersReason
from delaywheel.deadletters.reading import TopicReader, refused
from delaywheel.transactional import is_moving


class Moving:
    """A client whose broker leads the partition no more, until the client has looked."""

    def __init__(self, code: int) -> None:
        self._error: KafkaError | None = KafkaError(code)

    def get_watermark_offsets(self, _: TopicPartition, timeout: float) -> tuple[int, int]:
        del timeout
        if self._error is not None:
            raise KafkaException(self._error)
        return 3, 7

    def offsets_for_times(self, _: list[TopicPartition], timeout: float) -> list[Any]:
        """Says it of each partition, and raises nothing."""
        del timeout
        offset = 5 if self._error is None else -1001
        return [SimpleNamespace(partition=0, offset=offset, error=self._error)]

    def list_topics(self, _: str, timeout: float) -> None:
        del timeout
        self._error = None


def reader_of(client: Any) -> TopicReader:
    reader = TopicReader({"bootstrap.servers": "127.0.0.1:1"}, "letters", timeout_s=30)
    reader.close()
    reader._consumer = client
    return reader


def test_it_asks_again_where_the_leader_is_now() -> None:
    reader = reader_of(Moving(KafkaError.NOT_LEADER_FOR_PARTITION))
    assert reader.bounds(1) == {0: (3, 7)}


def test_a_partition_whose_leader_moves_is_not_taken_for_one_that_ends_before_a_time() -> None:
    """Its letters would not be listed, and not replayed."""
    reader = reader_of(Moving(KafkaError.NOT_LEADER_FOR_PARTITION))
    assert reader.offsets_at(17, {0: (3, 7)}) == {0: 5}


def test_what_kafka_refuses_is_not_asked_again() -> None:
    with pytest.raises(DeadLettersError) as raised:
        reader_of(Moving(KafkaError.TOPIC_AUTHORIZATION_FAILED)).bounds(1)
    assert raised.value.reason is DeadLettersReason.KAFKA_REFUSED


def test_a_partition_that_kafka_has_named_is_there() -> None:
    """A broker that has just started may not name it yet; of any other it is an answer."""
    reader = reader_of(Moving(KafkaError._UNKNOWN_PARTITION))
    with pytest.raises(DeadLettersError) as raised:
        reader.bounds(1)
    assert raised.value.retry_helps
    with pytest.raises(DeadLettersError) as raised:
        reader.bounds_of(0)
    assert raised.value.reason is DeadLettersReason.KAFKA_REFUSED


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError._DESTROY_BROKER,
    ],
)
def test_moves_are_known_by_the_names_that_the_client_has_for_them(code: int) -> None:
    assert is_moving(KafkaError(code))
    assert refused(KafkaError(code)).retry_helps
