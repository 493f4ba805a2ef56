"""Questions about topics are put to a broker that answers."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined] # its stubs re-export without saying so

from delaywheel.kafka_admin import KafkaAdmin

TOPIC = ConfigResource(ResourceType.TOPIC, "t")


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> KafkaAdmin:
    """One whose look shows brokers 1, 2, 3, 1, ... in turn; `looks` has them. All is answered."""
    looks: list[int] = []
    told = Future[str]()
    told.set_result("told")
    monkeypatch.setattr(AdminClient, "describe_configs", lambda *_, **__: {TOPIC: told})

    def look(*_: object, **__: object) -> Any:
        looks.append(len(looks) % 3 + 1)
        return SimpleNamespace(controller_id=looks[-1])

    admin = KafkaAdmin({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    monkeypatch.setattr(admin, "list_topics", look, raising=False)
    admin.looks = looks  # type: ignore[attr-defined]
    return admin


def looks_of(admin: KafkaAdmin) -> list[int]:
    admin.describe_configs([TOPIC], request_timeout=0.1)
    return cast("list[int]", admin.looks)  # type: ignore[attr-defined]


def test_who_does_not_answer_is_passed_over(admin: KafkaAdmin) -> None:
    assert looks_of(admin) == [1]
    admin.avoid(frozenset({2}))
    assert looks_of(admin) == [1, 2, 3]
    assert looks_of(admin) == [1, 2, 3], "what was just seen is believed"


def test_where_nobody_else_is_named_that_one_is_asked(admin: KafkaAdmin) -> None:
    admin.avoid(frozenset({1, 2, 3}))
    assert len(looks_of(admin)) > 3


def test_a_question_that_has_waited_for_who_is_away_is_put_to_another(
    admin: KafkaAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library may hear again that it is the controller, between the look and the question."""
    answers, times_s = [Future[str](), Future[str]()], list[float]()
    answers[0].set_exception(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
    answers[1].set_result("told")

    def describe(_: AdminClient, *__: object, request_timeout: float) -> Any:
        times_s.append(request_timeout)
        return {TOPIC: answers[len(times_s) - 1]}

    monkeypatch.setattr(AdminClient, "describe_configs", describe)
    admin.avoid(frozenset({2}))
    assert admin.describe_configs([TOPIC], request_timeout=5.0)[TOPIC].result() == "told"
    assert cast("list[int]", admin.looks) == [1, 2, 3]  # type: ignore[attr-defined]
    assert times_s[0] < times_s[1] <= 5.0
