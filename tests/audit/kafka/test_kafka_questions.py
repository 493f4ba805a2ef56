"""Questions to Kafka that its client answers only after it has looked at the topics again."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from delaywheel_audit.kafka.options import SourceOptions
from delaywheel_audit.kafka.questions import KafkaQuestions


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


def test_offsets_are_asked_again_with_the_epoch_of_the_present_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = SourceOptions.of({"kafka.bootstrap.servers": "127.0.0.1:1", "topics": "x"})
    questions = KafkaQuestions(options.client, timeout_s=5)
    monkeypatch.setattr(questions, "_admin", FencedAdmin())
    assert questions.first_since([("x", 0)], 1) == {("x", 0): 7}
