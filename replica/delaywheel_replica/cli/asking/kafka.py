"""How commands reach Kafka itself: by its address, by settings, or as a node reaches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypedDict

from confluent_kafka import KafkaError, KafkaException

from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.cli.asking.connection import ask
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.config_sources import ConfigError, load_config

AWAY: Final = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError.REQUEST_TIMED_OUT,
    }
)
"""What the client says while no broker can be reached."""


class KafkaOptions(TypedDict):
    """The options for reaching Kafka, as a command takes them."""

    file: Path | None
    kafka: str | None
    kafka_settings: Sequence[tuple[str, str]]
    server: Nodes
    timeout_s: float


class KafkaAccess(NamedTuple):
    """How to reach Kafka, by settings of its client, with `bootstrap.servers` among them.

    `cluster_id` is from the settings file or the node; None: neither was asked.
    """

    client: Mapping[str, str]
    cluster_id: str | None


def kafka_access(options: KafkaOptions) -> KafkaAccess:
    """Combines the options: the command line wins over the file, and a node is asked last.

    Raises:
        CommandFailure: CONFIG_INVALID; or no Kafka is named, and no node can be asked.
    """
    client: dict[str, str] = {}
    cluster_id = None
    file = options["file"]
    if file is not None:
        try:
            config = load_config(file=file)
        except ConfigError as error:
            raise CommandFailure("CONFIG_INVALID", str(error)) from error
        client, cluster_id = dict(config.kafka), config.cluster_id
    client |= dict(options["kafka_settings"])
    if options["kafka"] is not None:
        client["bootstrap.servers"] = options["kafka"]
    if "bootstrap.servers" not in client:
        answer = _described(options["server"], options["timeout_s"])
        client["bootstrap.servers"], cluster_id = answer.kafka, answer.cluster_id
    return KafkaAccess(client, cluster_id)


def kafka_failure(error: KafkaError, what: str, reason: str = "KAFKA_REFUSED") -> CommandFailure:
    """Returns how a command about something ends to which Kafka, or its client, objected."""
    if error.code() in AWAY:
        return CommandFailure("KAFKA_UNREACHABLE", f"{what}: {error.str()}", ExitCode.UNAVAILABLE)
    return CommandFailure(reason, f"{what}: {error.str()}")


def settings_failure(exception: KafkaException) -> CommandFailure:
    """Returns how a command ends whose client of Kafka objects to its settings."""
    return CommandFailure("CONFIG_INVALID", f"kafka: {exception.args[0].str()}")


def _described(server: Nodes, timeout_s: float) -> pb.DescribeClusterResponse:
    request = pb.DescribeClusterRequest()
    try:
        answer = ask(server, lambda stub: stub.DescribeCluster(request, timeout=timeout_s))
    except CommandFailure as failure:
        text = str(failure).removeprefix(f"{failure.reason}: ")
        text += "; without a node, say which Kafka: --kafka ADDRESS, or --config FILE"
        raise CommandFailure(failure.reason, text, failure.exit_code) from failure
    if not answer.kafka:
        raise CommandFailure(
            "KAFKA_UNKNOWN", f"{answer.node} does not say which Kafka: --kafka ADDRESS"
        )
    return answer
