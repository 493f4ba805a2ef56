"""A record whose handler ends its process, on the real Kafka: counted over restarts, given up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from confluent_kafka import Producer

from local.loopback.kafka import KafkaBroker
from support.kafka.read_committed import headers_of, read_all

pytestmark = pytest.mark.kafka

PATIENCE_S = 60.0
VALUES = (b"first", b"poison", b"last")


def test_a_record_that_kills_its_process_is_a_dead_letter(
    kafka: KafkaBroker, cluster: str, orders: str
) -> None:
    producer = Producer({"bootstrap.servers": kafka.address})
    for value in VALUES:
        producer.produce(orders, value, partition=0)
    assert producer.flush(PATIENCE_S) == 0
    command = [sys.executable, "-m", "support.consumer.dying"]
    handled: Counter[str] = Counter()
    codes: list[int] = []
    while 0 not in codes and len(codes) < 9:
        ended = subprocess.run(
            [*command, kafka.address, cluster, orders, "g"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=PATIENCE_S,
            check=False,
        )
        codes.append(ended.returncode)
        handled.update(ended.stdout.split())
    # Once among others, and twice alone.
    assert codes == [9, 9, 9, 0]
    assert (handled["last"], handled["poison"]) == (1, 0)
    assert handled["first"] <= 2, "what is committed is not handled again"
    [letter] = read_all(kafka.address, f"{orders}-dead-g", at_least=1, partitions=2)
    assert letter.value() == b"poison"
    assert dict(headers_of(letter))["dw-dead-reason"] == b"POISON"
