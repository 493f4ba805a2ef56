"""The commands against a real node, and on its folder once it has stopped."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from local.loopback.kafka import KafkaBroker
from support.clients.command import Command
from support.services.service import Service
from support.services.waiting import wait_until

pytestmark = pytest.mark.kafka


@pytest.fixture
def service(kafka: KafkaBroker, cluster_id: str, tmp_path: Path) -> Iterator[Service]:
    with Service(kafka.address, tmp_path / "cluster", cluster_id) as running:
        yield running


@pytest.fixture
def topic(kafka: KafkaBroker, command: Command) -> str:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    ended = command("topic", "create", name, "--kafka", kafka.address)
    assert (ended.code, ended.out) == (0, f"made: {name}\n")
    ended = command("topic", "create", name, "--kafka", kafka.address)
    assert (ended.code, ended.out) == (0, f"there already: {name}\n")
    return name


def assert_refusals_have_names(service: Service, topic: str) -> None:
    refused = service.run_cli("produce", topic, "v", "--delay", "300d", check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: DUE_BEYOND_SPAN: ")

    def is_unknown() -> bool:
        """In doubt, while Kafka does not say in time that the topic is missing, it is accepted."""
        said = service.run_cli("produce", "no-such-topic", "v", "--delay", "1h", check=False).stderr
        return said.startswith("error: TOPIC_UNKNOWN: ")

    wait_until("Kafka says so", is_unknown)


def test_from_produce_to_verify(service: Service, topic: str, command: Command) -> None:
    def ask(*arguments: str) -> Any:
        return json.loads(service.answer_of(*arguments, "--json").stdout)

    sent = ask("produce", topic, "hello", "--key", "k", "--header", "a=1", "--delay", "10m")
    handle, slot = sent["handle"], sent["due_ms"] // 1000
    [row] = ask("slots")["slots"]
    assert (row["slot"], row["messages"]) == (slot, 1)
    [message] = ask("slot", str(slot))["messages"]
    assert message["handle"] == handle
    stored = ask("get", handle)
    assert (stored["state"], stored["value"]) == ("pending", "aGVsbG8=")
    assert ask("get", "--topic", topic, "--id", sent["id"], "--due", str(sent["due_ms"])) == stored
    assert ask("cancel", handle) == {"outcome": "CANCELLED", "rescheduled_to_ms": None}
    assert ask("get", handle)["state"] == "cancelled"
    assert_refusals_have_names(service, topic)

    asked = (ask("slots")["slots"], ask("slot", str(slot), "--content")["messages"])
    data = service.node()["data"]
    service.stop()
    read = command("slots", "--data", data, "--json").document["slots"]
    messages = command("slot", str(slot), "--data", data, "--content", "--json").document
    assert (read, messages["messages"]) == asked
    assert command("verify", data).code == 0
