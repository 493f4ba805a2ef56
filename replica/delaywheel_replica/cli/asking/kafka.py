"""How commands reach Kafka itself: by its address, or by a node's settings file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from delaywheel_replica.cli.failures import Failure
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.config_sources import ConfigError, load_config


@dataclass(frozen=True, slots=True)
class KafkaAccess:
    """The operator's options for reaching Kafka.

    Attributes:
        client: Settings of the Kafka client, with `bootstrap.servers` among them.
        cluster_id: From the settings file; None: there is none.
    """

    client: Mapping[str, str]
    cluster_id: str | None


def kafka_access(
    file: Path | None, kafka: str | None, kafka_settings: Sequence[tuple[str, str]]
) -> KafkaAccess:
    """Combines the options; an address on the command line wins.

    Raises:
        Failure: CONFIG_INVALID, or USAGE where no Kafka is named.
    """
    client: dict[str, str] = {}
    cluster_id = None
    if file is not None:
        try:
            config = load_config(file=file)
        except ConfigError as error:
            raise Failure("CONFIG_INVALID", str(error)) from error
        client, cluster_id = dict(config.kafka), config.cluster_id
    client |= dict(kafka_settings)
    if kafka is not None:
        client["bootstrap.servers"] = kafka
    if "bootstrap.servers" not in client:
        raise usage("say which Kafka: --kafka ADDRESS, or --config FILE")
    return KafkaAccess(client, cluster_id)
