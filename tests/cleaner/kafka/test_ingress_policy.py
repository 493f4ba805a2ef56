"""A topic whose configuration is incomplete keeps no node from leading."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka.admin import AdminClient

from delaywheel_replica.cleaner.kafka.ingress_finding import IngressTopics, find_ingress


class Admin:
    """A client of a Kafka with one topic of that configuration."""

    def __init__(self, config: dict[str, object]) -> None:
        self._config = config

    def list_topics(self, *_: object, **__: object) -> None:
        """Brokers answer."""

    def describe_topics(self, topics: object, **_: object) -> dict[str, Future[Any]]:
        del topics
        return {"in": answered(SimpleNamespace(topic_id="id", partitions=[0]))}

    def describe_configs(self, wanted: list[Any], **_: object) -> dict[Any, Future[Any]]:
        return {resource: answered(self._config) for resource in wanted}


def answered(value: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def entry(value: str | None) -> object:
    return SimpleNamespace(value=value)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({}, "does not report the cleanup.policy of the ingress topic in"),
        ({"cleanup.policy": entry(None)}, "does not report the cleanup.policy"),
        ({"cleanup.policy": entry("compact")}, "cleanup.policy=compact"),
        ({"cleanup.policy": entry("delete")}, None),
    ],
)
def test_a_policy_is_checked_or_missed(config: dict[str, object], fault: str | None) -> None:
    found = find_ingress(cast("AdminClient", Admin(config)), IngressTopics(frozenset(["in"])))
    assert (found.topics == {}) is (fault is not None)
    assert len(found.faults) == (fault is not None)
    assert (fault or "") in "".join(found.faults.values())
