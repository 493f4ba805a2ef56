"""Brokers on which no transaction may last as long as ours may: each says which setting it is."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from delaywheel import Client, Reason
from delaywheel.consumer import AskedHalf, ConsumerError, ConsumerReason, HalfChecker, RetryConsumer
from delaywheel.deadletters.errors import DeadLettersError
from delaywheel.deadletters.writing import LetterWriter
from delaywheel.transactional import MOST_TIMEOUT_ADVICE, MOST_TIMEOUT_SETTING
from delaywheel.transactions import HalfVerdict
from delaywheel_replica.kafka_settings import KafkaNames
from local.loopback.cluster import LocalCluster, described
from local.loopback.kafka import KafkaBroker
from support.clients.command import Command
from support.kafka.read_committed import create_topic
from support.services.trio import NO_METRICS
from support.services.waiting import wait_to_be_told, wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

NAMES = KafkaNames("short")
GROUP = "g"


class Checker(HalfChecker):
    def check(self, half: AskedHalf) -> HalfVerdict:
        raise AssertionError(half)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    folder = tmp_path_factory.mktemp("kafka")
    with KafkaBroker(folder, heap="512m", settings={MOST_TIMEOUT_SETTING: "5000"}) as broker:
        yield broker


def test_no_node_leads_and_callers_hear_which_setting_it_is(
    short: KafkaBroker, tmp_path: Path
) -> None:
    create_topic(short.address, "orders")
    settings = {"cluster_id": NAMES.cluster_id, **NO_METRICS}
    with LocalCluster(kafka=short.address, folder=tmp_path, settings=settings) as cluster:
        address = cluster.nodes[0].address

        def told() -> bool:
            answer = described(address)
            return answer is not None and MOST_TIMEOUT_ADVICE in answer.refusing.message

        wait_until("it says why", told)
        with Client(address) as client:
            wait_to_be_told(
                Reason.NO_WHEEL,
                lambda: client.produce("orders", b"1", delay=timedelta(seconds=1), timeout=1.0),
            )


def test_a_check_names_it(
    short: KafkaBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "cluster_id": NAMES.cluster_id,
        "node_id": "n1",
        "data_dir": tmp_path,
        "kafka.bootstrap.servers": short.address,
    }
    flags = [f"--set={name}={value}" for name, value in settings.items()]
    ended = Command(capsys)("config", "check", "--connect", "--json", *flags)
    items = {item["what"]: item for item in ended.document["items"]}
    assert ended.code == 1
    for what in ("broker 1", "transactional ids"):
        assert (items[what]["level"], items[what]["advice"]) == ("fault", MOST_TIMEOUT_ADVICE)


def test_consumers_checkers_and_replays_stop_and_name_it(short: KafkaBroker) -> None:
    for topic in ("lines", NAMES.ingress, NAMES.halves, NAMES.dead):
        create_topic(short.address, topic)
    kafka, cluster = short.address, NAMES.cluster_id
    consumer = RetryConsumer("lines", group=GROUP, bootstrap=kafka, cluster=cluster)
    with pytest.raises(ConsumerError) as stopped, consumer:
        consumer.receive()
    assert stopped.value.reason is ConsumerReason.TRANSACTION_TIMEOUT_REFUSED
    assert MOST_TIMEOUT_SETTING in str(stopped.value)
    checker = Checker(group=GROUP, bootstrap=kafka, cluster=cluster)
    with pytest.raises(ConsumerError) as stopped, checker:
        checker.run()
    assert stopped.value.reason is ConsumerReason.TRANSACTION_TIMEOUT_REFUSED
    writer = LetterWriter({"bootstrap.servers": kafka}, NAMES.dead, f"{NAMES.dead}-marks")
    with pytest.raises(DeadLettersError, match=MOST_TIMEOUT_SETTING):
        writer.claim()
