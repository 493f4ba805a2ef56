"""Questions to Kafka that its client answers only after it has looked at the topics again."""

from __future__ import annotations

import pytest

from delaywheel_audit.kafka.client import ClientSettings
from delaywheel_audit.kafka.questions import KafkaQuestions
from support.kafka.fenced_admin import FencedAdmin


def test_offsets_are_asked_again_with_the_epoch_of_the_present_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions = KafkaQuestions(ClientSettings({"bootstrap.servers": "127.0.0.1:1"}, timeout_s=5))
    monkeypatch.setattr(questions, "_admin", FencedAdmin())
    assert questions.first_since([("x", 0)], 1) == {("x", 0): 7}
