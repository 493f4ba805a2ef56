"""An admin client whose questions are refused after an election, until it looks at the topics."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

from confluent_kafka import KafkaError, KafkaException, TopicPartition


class FencedAdmin:
    """It has the epoch of the leader before the election until it looks at the topics."""

    def __init__(self) -> None:
        self.has_looked = False

    def poll(self, timeout_s: float) -> None:
        """Has nothing to tell."""

    def list_topics(self, timeout: float) -> None:
        del timeout
        self.has_looked = True

    def list_offsets(
        self, asked: dict[TopicPartition, object], **_: object
    ) -> dict[TopicPartition, Future[object]]:
        answers = {at: Future[object]() for at in asked}
        for future in answers.values():
            if self.has_looked:
                future.set_result(SimpleNamespace(offset=7))
            else:
                future.set_exception(KafkaException(KafkaError(KafkaError.FENCED_LEADER_EPOCH)))
        return answers
