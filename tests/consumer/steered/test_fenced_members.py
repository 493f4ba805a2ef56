"""What a fence of its client means for a consumer with an `instance`: the table of fencing.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message

from delaywheel.consumer import ConsumerError, ConsumerReason
from delaywheel.consumer.kafka import KafkaBroker, member
from delaywheel.consumer.settings import read_settings

RECORD = Message("orders", 0, 5, b"k", b"v")
FENCED = Message(
    error=KafkaError(
        KafkaError._FATAL,
        f"Fatal error: {KafkaError(KafkaError.FENCED_INSTANCE_ID).str()}",
        fatal=True,
    )
)


class MadeClients:
    """Kafka clients, each made for the last one, and what they tell.

    Attributes:
        did: What was asked of them.
        member: The id that the last one has now.
    """

    def __init__(self) -> None:
        self.did: list[str] = []
        self.member = ""
        self._assign: Callable[..., None] = lambda *_: None
        self._told: list[Message] = []

    def made(self, settings: dict[str, Any], **_: Any) -> MadeClients:
        self.did.append(f"made {settings['group.instance.id']}")
        self.member = ""
        return self

    def subscribe(self, topics: list[str], on_assign: Callable[..., None], **_: Any) -> None:
        self.did.append(f"subscribed {' '.join(topics)}")
        self._assign = on_assign

    def memberid(self) -> str:
        return self.member

    def assign_as(self, member: str) -> None:
        self.member = member
        self._assign(self, [])

    def tell(self, *messages: Message) -> None:
        self._told.extend(messages)

    def consume(self, *_: Any) -> list[Message]:
        told, self._told = self._told, []
        return told

    def close(self) -> None:
        self.did.append("closed")


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> MadeClients:
    clients = MadeClients()
    monkeypatch.setattr(member, "Consumer", clients.made)
    return clients


@pytest.fixture
def broker(clients: MadeClients) -> KafkaBroker:
    """Subscribed, and assigned nothing yet."""
    broker = KafkaBroker(read_settings("orders", "billing", "nowhere:1", {"instance": "pod-0"}))
    nothing = dict.fromkeys(("on_assign", "on_revoke", "on_lost"), lambda _: None)
    broker.subscribe(["orders", "orders-retry-billing"], **nothing)
    clients.did.clear()
    return broker


ANEW = ["closed", "made pod-0", "subscribed orders orders-retry-billing"]


def test_a_client_that_forgot_its_id_is_followed_by_another_each_time(
    broker: KafkaBroker, clients: MadeClients
) -> None:
    for member_id in ("pod-0-a", "pod-0-b"):
        clients.assign_as(member_id)
        clients.member = ""
        clients.tell(RECORD, FENCED, FENCED)
        (fetched,) = broker.fetch(10, 0.0)
        assert fetched.offsets == [5], "what was told before is not lost"
        assert clients.did == ANEW
        assert broker.fetch(10, 0.0) == []
        assert clients.did == ANEW
        clients.did.clear()
    clients.assign_as("pod-0-c")
    assert_taken(broker, clients)


def test_who_is_fenced_under_the_id_of_its_assignment_gives_way(
    broker: KafkaBroker, clients: MadeClients
) -> None:
    clients.assign_as("pod-0-a")
    assert_taken(broker, clients)


def test_who_is_fenced_again_before_it_is_assigned_anything_gives_way(
    broker: KafkaBroker, clients: MadeClients
) -> None:
    """As one of two that join in turn, or one that Kafka's newer protocol does not let in."""
    clients.member = "pod-0-a"
    clients.tell(FENCED)
    assert broker.fetch(10, 0.0) == []
    assert clients.did == ANEW
    clients.did.clear()
    clients.member = "pod-0-b"
    assert_taken(broker, clients)


def assert_taken(broker: KafkaBroker, clients: MadeClients) -> None:
    clients.tell(FENCED)
    with pytest.raises(ConsumerError, match="instance 'pod-0' of group 'billing'") as raised:
        broker.fetch(10, 0.0)
    assert raised.value.reason is ConsumerReason.INSTANCE_TAKEN
    assert clients.did == []
