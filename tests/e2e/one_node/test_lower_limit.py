"""What was accepted under a greater limit is forwarded under a lower one."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import (
    CommittedReader,
)
from support.services.service import Service

pytestmark = pytest.mark.kafka


def test_a_message_larger_than_the_limit_is_now(
    kafka: KafkaBroker, topic: str, tmp_path: Path, cluster_id: str
) -> None:
    """Accepted messages are forwarded, whatever the operator has changed since.

    Beside that, the log of a node that starts, accepts and stops: each line is a document, none of
    the client library's own way, and none says that something broke.
    """
    folder, as_json = tmp_path / "cluster", {"log_format": "json"}
    with (
        Service(kafka.address, folder, cluster_id, config=as_json) as before,
        before.client() as client,
    ):
        client.produce(topic, b"x" * 200_000, delay=timedelta(seconds=5))
    (path,) = folder.rglob("*.log")
    log = [json.loads(line) for line in path.read_text().splitlines()]
    assert {"serving", "leading", "wheel opened", "stopped"} <= {line["event"] for line in log}
    assert {line["process"] for line in log} == {"server", "cleaner"}
    # Of a busy machine it may warn.
    assert {line["level"] for line in log} <= {"info", "warning"}
    assert sum(line["event"] == "kafka client says" for line in log) < len(log) / 2
    lower = {"max_message_bytes": "10000"}
    with (
        Service(kafka.address, folder, cluster_id, config=lower),
        CommittedReader(kafka.address, topic) as reader,
    ):
        assert [m.value() for m in reader.wait_for(1, timeout_s=40)] == [b"x" * 200_000]
