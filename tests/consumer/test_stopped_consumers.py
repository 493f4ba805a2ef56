"""A consumer that sleeps through the end of its membership: each record still ends once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer

from local.loopback.kafka import KafkaBroker
from support.consumer import sleeper
from support.kafka.proxy import KafkaProxy
from support.kafka.read_committed import CommittedReader, create_topic
from support.process.night import at_night
from support.services.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

PATIENCE_S = 120.0
RECORDS = 20


@contextmanager
def running(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("wb") as reported:
        process = subprocess.Popen(
            [sys.executable, "-m", sleeper.__name__, *arguments],
            stdout=reported,
            stderr=reported,
            env=environment,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def wait_for(path: Path, text: str) -> None:
    wait_until(f"{path} has {text}", lambda: path.exists() and text in path.read_text())


@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("outsleeps_transaction", [False, pytest.param(True, marks=at_night)])
def test_one_that_slept_with_an_open_transaction_commits_nothing_of_it(
    kafka: KafkaBroker, cluster_id: str, tmp_path: Path, *, outsleeps_transaction: bool
) -> None:
    """It is stopped between a transaction's records and offsets, and put out of its group.

    It wakes when another has ended the same records. If that was within `transaction.timeout.ms`,
    its membership is all that is in the way of a commit; later, its epoch is old as well.
    """
    topic, group = f"orders-{cluster_id}", f"group-{cluster_id}"
    dead = f"{topic}-dead-{group}"
    create_topic(kafka.address, topic)
    create_topic(kafka.address, f"delaywheel-{cluster_id}-ingress")
    values = [b"%d" % number for number in range(RECORDS)]
    producer = Producer({"bootstrap.servers": kafka.address})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(PATIENCE_S) == 0
    first_log, second_log = tmp_path / "first.log", tmp_path / "second.log"
    reported = (cluster_id, topic, group)
    with KafkaProxy(kafka) as proxy:
        is_open, goes_on = proxy.stall_next_offsets()
        with running(kafka.proxy_address, *reported, log=first_log) as first:
            assert is_open.wait(PATIENCE_S)
            first.send_signal(signal.SIGSTOP)
            with running(kafka.address, *reported, log=second_log) as second:
                wait_for(second_log, f"dead {RECORDS}\n")
                if outsleeps_transaction:
                    # They lie behind those of the first, and show when its transaction has ended.
                    with CommittedReader(kafka.address, dead) as reader:
                        reader.wait_for(RECORDS, timeout_s=PATIENCE_S)
                first.send_signal(signal.SIGCONT)
                goes_on.set()
                wait_for(first_log, "failed 1\n")
                producer.produce(topic, b"last")
                assert producer.flush(PATIENCE_S) == 0
                with CommittedReader(kafka.address, dead) as reader:
                    letters = reader.wait_for(RECORDS + 1, timeout_s=PATIENCE_S)
                assert first.poll() is None
                assert second.poll() is None
    assert sorted(letter.value() or b"" for letter in letters) == sorted([*values, b"last"])
    # Of what the first had written nothing is committed: its transaction has ended by now.
    with CommittedReader(kafka.address, dead) as reader:
        assert len(reader.read_to_end()) == RECORDS + 1
