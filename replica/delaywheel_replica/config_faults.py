"""Checks settings against each other, and names those that do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import combinations

from delaywheel.identity import is_topic_name, leads_elsewhere
from delaywheel.record_headers import RESERVED_PREFIX
from delaywheel_replica.config import Config
from delaywheel_replica.kafka_settings import refused
from delaywheel_replica.patterns import did_you_mean


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in the settings: what, and what to do, beginning with a setting's name.

    Attributes:
        names: The settings that it depends on; `<table>.<key>`: one entry of a table.
    """

    text: str
    names: tuple[str, ...]


def faults(config: Config) -> Iterator[Fault]:
    """Returns all faults."""
    yield from _kafka(config)
    yield from _members(config)
    yield from _addresses(config)
    yield from _ports(config)
    yield from _page(config)
    yield from _bounds(config)
    yield from _ingress(config)


def _kafka(config: Config) -> Iterator[Fault]:
    """Checks Kafka settings that only the service sets, or that the operator must set."""
    if not config.kafka.get("bootstrap.servers"):
        yield Fault("kafka: bootstrap.servers is missing", ("kafka",))
    if ours := refused(config.kafka):
        text = f"{', '.join(ours)}: set by delaywheel itself, which keeps its promises with them"
        yield Fault(f"kafka: {text}", tuple(f"kafka.{name}" for name in ours))


def _members(config: Config) -> Iterator[Fault]:
    members, node = config.members, config.node_id
    if node not in members:
        meant = did_you_mean(node, members)
        yield Fault(f"members: node_id {node!r} is not among them{meant}", ("members", "node_id"))
        return
    if config.min_insync is not None and config.min_insync > len(members):
        yield Fault(
            f"min_insync {config.min_insync}: only {len(members)} members",
            ("min_insync", "members"),
        )


def _addresses(config: Config) -> Iterator[Fault]:
    """Checks addresses; one of all interfaces cannot be advertised."""
    if not _leads(config.listen) and config.advertised is None:
        yield Fault(
            f"listen {config.listen}: callers would be given this address, which leads nowhere; set"
            " advertised to the host:port at which they reach this node",
            ("listen", "advertised"),
        )
    if config.advertised is not None and not _leads(config.advertised):
        yield Fault(
            f"advertised {config.advertised}: leads nowhere; set the host:port at which callers"
            " reach this node",
            ("advertised",),
        )
    for node, address in config.members.items() if len(config.members) > 1 else ():
        if not _leads(address):
            yield Fault(
                f"members.{node} {address}: leads nowhere; set the host:port at which peers reach"
                " it, and peer_listen to this",
                ("members",),
            )


def _ports(config: Config) -> Iterator[Fault]:
    """Checks that no two of the node's own addresses are the same."""
    own = {"listen": config.listen}
    if len(config.members) > 1 and config.node_id in config.members:
        own["peer_listen"] = config.listens_for_peers
    own |= {
        name: getattr(config, name) for name in ("token_listen", "metrics_listen", "web_listen")
    }
    listened = {name: address for name, address in own.items() if address is not None}
    for (name, address), (other, taken) in combinations(listened.items(), 2):
        if _collide(address, taken):
            yield Fault(
                f"{other} {taken}: {name} already listens there; give it another port",
                (name, other, *(("members", "node_id") if "peer_listen" in {name, other} else ())),
            )


def _page(config: Config) -> Iterator[Fault]:
    """Checks who could reach the operator's page, and how it reaches the node."""
    if config.web_listen is None:
        return
    is_secure = config.tls_cert is not None and config.grants is not None
    if not (is_secure or config.insecure or is_loopback(config.web_listen)):
        yield Fault(
            f"web_listen {config.web_listen}: other machines reach it; set tls_cert and grants, or"
            " insecure = true",
            ("web_listen", "tls_cert", "grants", "insecure"),
        )
    if config.tls_client_ca is not None and config.token_listen is None:
        yield Fault(
            "web_listen: its viewers show tokens, and listen wants certificates; set token_listen",
            ("web_listen", "tls_client_ca", "token_listen"),
        )


def _collide(one: str, other: str) -> bool:
    """Whether two addresses cannot be listened on at once."""
    (host, _, port), (another, _, taken) = one.rpartition(":"), other.rpartition(":")
    return port == taken != "0" and (host == another or not (_leads(one) and _leads(other)))


def _leads(address: str) -> bool:
    """Whether an address is usable from elsewhere; port 0 becomes a free one."""
    host = address.rpartition(":")[0]
    return leads_elsewhere(f"{host}:1")


def is_loopback(address: str) -> bool:
    """Whether no other machine reaches an address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name: one that begins with 127 leads where its owner likes
        return host.lower() == "localhost"


def _bounds(config: Config) -> Iterator[Fault]:
    """Checks bounds against each other."""
    for name, *others in (
        ("max_message_bytes", "max_request_bytes", "transaction_bytes"),
        ("max_request_bytes", "max_caller_in_flight_bytes"),
        ("max_caller_in_flight_bytes", "max_in_flight_bytes"),
    ):
        if getattr(config, name) > min(getattr(config, other) for other in others):
            yield Fault(f"{name} is above {' or '.join(others)}", (name, *others))
    if 0 < config.ledger_kept_hours < config.ledger_needed_hours:
        yield Fault(
            f"ledger_retention_hours {config.ledger_kept_hours}: at least"
            f" {config.ledger_needed_hours} (span_seconds + late_window_seconds + a day), or"
            " 0: what is still pending, or was just forwarded, could not be reconciled",
            ("ledger_retention_hours", "span_seconds", "late_window_seconds", "ledger_uri"),
        )


def _ingress(config: Config) -> Iterator[Fault]:
    """Checks the names of the ingress topics, and of the header that a message's life is in."""
    if config.ttl_header.startswith(RESERVED_PREFIX) or "\0" in config.ttl_header:
        yield Fault(
            f"ttl_header {config.ttl_header!r}: no message can have a header of this name",
            ("ttl_header",),
        )
    if config.halves and not config.ingress:
        yield Fault(
            "halves: answers about half messages come through the topic of ingress, which is off",
            ("halves", "ingress"),
        )
    names = config.kafka_settings.names
    written = {names.control, names.outcomes, names.dead, names.halves, names.trace, names.counts}
    if config.halves and names.ingress in config.ingress_destinations:
        yield Fault(
            f"ingress_destinations.{names.ingress}: half messages that are committed come through"
            " it, for all topics; limit other ingress topics, or set halves = false",
            ("ingress_destinations", "halves"),
        )
    for topic in config.ingress_destinations:
        if topic not in config.taken_topics:
            yield Fault(
                f"ingress_destinations.{topic}: no ingress topic"
                f"{did_you_mean(topic, config.taken_topics)}",
                ("ingress_destinations", "ingress_topics", "ingress", "cluster_id"),
            )
    for topic in config.ingress_topics:
        if not is_topic_name(topic):
            yield Fault(f"ingress_topics {topic!r}: no name of a topic", ("ingress_topics",))
        if topic in written:
            yield Fault(
                f"ingress_topics {topic}: the service's own, with other records",
                ("ingress_topics", "cluster_id"),
            )
