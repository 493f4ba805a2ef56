"""Questions about topics are put to a broker that answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined] # its stubs re-export without saying so

from delaywheel.kafka_admin import KafkaAdmin

TOPIC = ConfigResource(ResourceType.TOPIC, "t")


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> KafkaAdmin:
    """One whose look shows brokers 1, 2, 3, 1, ... in turn; `looks` has them."""
    looks: list[int] = []

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
