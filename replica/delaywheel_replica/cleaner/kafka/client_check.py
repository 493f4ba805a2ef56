"""Checks whether the Kafka client library accepts the operator's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from delaywheel_replica.config import Config
from delaywheel_replica.config_faults import Fault
from delaywheel_replica.kafka_settings import PROMISES, KafkaSettings, refused
from delaywheel_replica.patterns import did_you_mean

_QUIET: Final = {"log_level": 0}
_KNOWN: Final = (
    *("bootstrap.servers", "client.id", "client.rack", "security.protocol", "debug", "log_level"),
    *("sasl.mechanism", "sasl.username", "sasl.password", "sasl.oauthbearer.config"),
    *("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.key.password"),
    *("linger.ms", "batch.size", "compression.type", "compression.level", "message.max.bytes"),
    *("queue.buffering.max.kbytes", "queue.buffering.max.messages", "fetch.max.bytes"),
    *("metadata.max.age.ms", "reconnect.backoff.ms", "statistics.interval.ms"),
    *("broker.address.family", "broker.address.ttl", "socket.keepalive.enable"),
)
"""Names suggested for unknown ones; only the library knows which exist."""

_FILES: Final = (
    *("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.crl.location"),
    *("ssl.keystore.location", "sasl.kerberos.keytab"),
)
_PROBED: Final = "probe"
"""What the library takes for "look where systems have them"."""


def client_faults(config: Config) -> Iterator[Fault]:
    """Returns the client library's objections to the operator's settings.

    Only the library knows all names, values and combinations, and they differ between kinds of
    clients: so one client of each kind is made, as it will run. It reports only the first fault;
    then each setting is tried alone, for its name and value: what a setting lacks alone (a
    password, say) others may give. Files are tried here, since the library does not say what is
    wrong with one. Kafka is not contacted.
    """
    unreadable = list(_unreadable_files(config.kafka))
    yield from unreadable
    # Settings of ours, and missing ones, are reported elsewhere.
    ours = refused(config.kafka)
    kafka = {name: value for name, value in config.kafka.items() if name not in ours}
    servers = kafka.setdefault("bootstrap.servers", "k:1") or "k:1"
    whole = _refused(replace(config, kafka=kafka | {"bootstrap.servers": servers}).kafka_settings)
    if whole is None:
        return
    alone = {name: _refused_alone(servers, name, value) for name, value in kafka.items()}
    single = {name: objection for name, objection in alone.items() if objection}
    for name, objection in single.items():
        yield Fault(f"kafka: {objection}", (f"kafka.{name}",))
    if not (single or unreadable):  # otherwise it objects to that file, in words of its own
        yield Fault(f"kafka: {whole}", ("kafka", "max_message_bytes"))


def _unreadable_files(kafka: Mapping[str, str]) -> Iterator[Fault]:
    for name in _FILES:
        path = kafka.get(name)
        if path and path != _PROBED:
            try:
                with Path(path).open("rb"):
                    pass
            except IsADirectoryError:
                if name != "ssl.ca.location":  # there a folder of certificates will do
                    yield Fault(f"kafka: {name} {path}: is a folder", (f"kafka.{name}",))
            except OSError as error:
                text = (error.strerror or type(error).__name__).lower()
                yield Fault(f"kafka: {name} {path}: {text}", (f"kafka.{name}",))


def _refused(settings: KafkaSettings) -> str | None:
    try:
        AdminClient({**settings.admin(), **_QUIET})
        Consumer({**settings.consumer(), **_QUIET}).close()
        Producer({**settings.producer(settings.names.leader_id(0)), **_QUIET})
    except KafkaException as exception:
        return str(exception.args[0].str())
    except (TypeError, ValueError) as error:
        return str(error)  # for instance a setting that takes a function
    return settings.unusable()


def _refused_alone(servers: str, name: str, value: str) -> str | None:
    """Returns the objection to one setting's name or value."""
    try:
        AdminClient({"bootstrap.servers": servers, name: value, **_QUIET})
    except KafkaException as exception:
        objection = str(exception.args[0].str())
        if objection.startswith("No such configuration property"):
            return f"{objection}{did_you_mean(name, {*_KNOWN, *PROMISES})}"
        return objection if "onfiguration property" in objection else None
    except (TypeError, ValueError) as error:
        return str(error)
    return None
