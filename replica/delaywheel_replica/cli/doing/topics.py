"""`delaywheel topic create`: uses Kafka's admin interface with the operator's settings.

A node is not asked: it makes topics only where `create_topics` lets every caller have them made.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from delaywheel_replica.cli import seen_names
from delaywheel_replica.cli.asking.kafka import kafka_access
from delaywheel_replica.cli.failures import ExitCode, Failure
from delaywheel_replica.cli.options import asked_server

_BROKERS_CHOOSE = -1
"""Kafka's own way to say: as the brokers have it by default."""


def create(
    topics: Sequence[str],
    *,
    partitions: int | None,
    replication_factor: int | None,
    file: Path | None,
    kafka: str | None,
    kafka_settings: Sequence[tuple[str, str]],
    timeout_s: float,
) -> None:
    """Creates missing topics; existing ones stay as they are."""
    client = _client(file, kafka, kafka_settings)
    wanted = [
        NewTopic(topic, partitions or _BROKERS_CHOOSE, replication_factor or _BROKERS_CHOOSE)
        for topic in topics
    ]
    made = client.create_topics(wanted, request_timeout=timeout_s, operation_timeout=timeout_s)
    for topic, future in made.items():
        try:
            future.result()
        except KafkaException as exception:
            _print_answer(topic, exception.args[0])
        else:
            print(f"made: {topic}")
    print("Nodes that refused messages for them accept them within 2 s.", file=sys.stderr)
    seen_names.note(asked_server(), topics=topics)


def _client(file: Path | None, kafka: str | None, own: Sequence[tuple[str, str]]) -> AdminClient:
    access = kafka_access(file, kafka, own)
    try:
        return AdminClient({**access.client, "log_level": 0})
    except KafkaException as exception:
        raise Failure("CONFIG_INVALID", f"kafka: {exception.args[0].str()}") from exception


def _print_answer(topic: str, error: KafkaError) -> None:
    """Prints Kafka's answer for one topic; an existing one counts as created.

    Raises:
        Failure: It was not made.
    """
    code = error.code()
    if code == KafkaError.TOPIC_ALREADY_EXISTS:
        print(f"there already: {topic}")
        return
    is_away = code in {KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError.REQUEST_TIMED_OUT}  # noqa: SLF001 - the library's names
    raise Failure(
        "KAFKA_UNREACHABLE" if is_away else "TOPIC_REFUSED",
        f"{topic}: {error.str()}",
        ExitCode.UNAVAILABLE if is_away else ExitCode.REFUSED,
    )
