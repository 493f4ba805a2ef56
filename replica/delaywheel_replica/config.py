"""All settings of an operator, as a node's processes use them.

The process that starts the node reads and checks them once (`config_sources.py`); the node's
processes inherit the result as one JSON document in their environment, so that they can never
differ, not even when one of them is restarted after the file was changed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeAlias

from annotated_types import Ge, Le

from delaywheel.identity import check_name
from delaywheel.ingress import IngressLimits
from delaywheel.levels import DEFAULT_LEVELS
from delaywheel.record_headers import TTL_HEADER
from delaywheel_replica.hiding import HIDDEN, is_secret, shown
from delaywheel_replica.kafka_settings import DEAD_ROOM_BYTES, KafkaNames, KafkaSettings
from delaywheel_replica.process.inheritance import RESOLVED_VARIABLE, reloaded

_MIB = 1024 * 1024
_WEEK_HOURS = 7 * 24

_PRINCIPAL_FROM: Final[tuple[Literal["uri", "dns", "cn"], ...]] = ("uri", "dns")

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})")
# File systems of pyarrow.
_LEDGER_SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")


class _Form(NamedTuple):
    """What a value must be beyond its type: returns it, or raises ValueError with the reason."""

    judge: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Has pydantic call it, where settings are read."""
        from pydantic_core.core_schema import (  # noqa: PLC0415 - a node's processes do without
            no_info_after_validator_function,
        )

        return no_info_after_validator_function(self.judge, handler(source))


def _host_and_port(address: str) -> str:
    if not _HOST_PORT.fullmatch(address):
        raise ValueError(f"{address!r} is not host:port")
    return address


def _of_known_file_system(uri: str) -> str:
    scheme, separator, _ = uri.partition("://")
    if separator and scheme not in _LEDGER_SCHEMES:
        raise ValueError(f"{scheme}:// is none of {', '.join(_LEDGER_SCHEMES)}, or a folder")
    return uri


PositiveInt: TypeAlias = Annotated[int, Ge(1)]
_Patience: TypeAlias = Annotated[int, Ge(0), Le(86_400)]
_Name: TypeAlias = Annotated[str, _Form(check_name)]
_Address: TypeAlias = Annotated[str, _Form(_host_and_port)]
_Folder: TypeAlias = Annotated[Path, _Form(lambda path: path.expanduser().absolute())]
_Place: TypeAlias = Annotated[str, _Form(_of_known_file_system)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One node's settings: names, types, bounds and defaults. Checked when read.

    docs/SETTINGS.md has these texts (`scripts/reference`).

    Attributes:
        cluster_id: 1 to 31 of a-z, 0-9, '-'. Names the topics and transactional ids in Kafka: the
            same for all nodes of a cluster, and never for two clusters on one Kafka, or they fence
            each other without end
        node_id: of the same form; part of every handle
        data_dir: the data folder; it belongs to this node and cluster for ever
        members: node id → address for peers, of all nodes, this one included; empty: this node
            alone. Advised are 1, 3 or 5: with 2, `min_insync = 2` stops acceptance when one dies,
            and `min_insync = 1` stops failover
        min_insync: how many members must hold a message before it is acknowledged; none: a
            majority, which is 1 for a node alone
        listen: host:port for gRPC; port 0: any free one, kept over restarts of the server under one
            supervisor
        advertised: host:port that callers are given instead: must be set where `listen` is
            `0.0.0.0` or `[::]`, see [callers](OPERATIONS.md#callers)
        peer_listen: host:port for peers; none: the node's own address in `members`. Never the same
            as `listen`
        metrics_listen: host:port for [metrics, health and readiness](METRICS.md) over HTTP; none:
            nowhere. Port 0: any free one, which the log names
        web_listen: host:port for the [operator's page](PAGE.md#at-a-node), by a process of the
            node's own; none: nowhere
        tls_cert: a PEM file with this node's certificate, and what it was signed with: the port for
            callers then [speaks TLS](SECURITY.md). Read again when it changes, like the other three
        tls_key: its private key, without a password
        tls_client_ca: certificates of those who may have signed a caller's: callers must then show
            one; none: they need none
        tls_ca: the same for the certificates of other nodes, where this node calls them; none:
            `tls_client_ca`, else a list of public ones
        peer_tls: whether nodes speak [TLS with one another](SECURITY.md#tls-between-nodes), with
            the same certificates: `"off"`; `"accept"`: if another node dials so; `"prefer"`: also
            where this node dials, if the other one can; `"required"`: nothing else
        grants: a TOML file with [who may do what](SECURITY.md#who-may-do-what), read again when it
            changes; none: whoever reaches the port may do everything
        tokens: a TOML file of callers' bearer tokens: the SHA-256 of each, and whose it is. Read
            again when it changes
        token_listen: host:port of a second port for callers, over TLS, that asks for no
            certificate: for those with tokens, where `tls_client_ca` is set. Callers reach it at
            the host of `advertised`. Never port 0
        principal_from: which name in a certificate is its holder's, the first of these kinds that
            it has: `"uri"`, `"dns"`, `"cn"`, the common name, which authorities check less
        insecure: other machines may reach `listen` without TLS and `grants`, and the port for
            peers without `peer_tls = "required"`: whoever reaches them may do everything, or
            pretend to be a node. Said in the log and in the status
        metrics_tls: `metrics_listen` speaks TLS, with `tls_cert`; it asks nobody for a certificate
        span_seconds: how far ahead dues may lie: the greatest delay, 7 days; up to 366 days. What
            each second costs: [disk](SIZING.md#disk). The same on all nodes
        late_window_seconds: how long after its due a message is still taken: the time for retries.
            Slot files stay at least so long
        max_message_bytes: key, value and encoded headers of one message; of a half message 4,096
            less
        max_request_messages: messages in one request
        max_request_bytes: bytes of one request
        levels: named delays in milliseconds; a table of your own replaces the default one
        max_in_flight_bytes: requests received and not yet answered, and answers not yet read,
            altogether; beyond: BACKPRESSURE. A message counts 320 bytes beside its own
        max_caller_in_flight_bytes: the same for one connection; a stream is not refused but read
            more slowly
        flush: `"async"`: acknowledged when the page cache has it; survives the death of processes,
            not that of the machine. `"group"`: acknowledged once the medium has it
        disk_reserve_bytes: with less free space, or fewer than 1,000 free inodes, messages are
            refused (DISK_FULL); below half of it, other nodes' frames as well
        open_files: slot files kept open, 16 at least; none: what the limit on descriptors allows,
            8,192 at most: see [what callers can hold](SIZING.md#what-callers-can-hold)
        kafka: [client settings](KAFKA.md#client-settings); `bootstrap.servers` must be
            there
        create_topics: make destination topics that are missing. Otherwise messages for them are
            refused (TOPIC_UNKNOWN), or dead-lettered
        topic_partitions: of topics made so
        topic_replication_factor: of topics made so; none: the broker's default
        control_replication_factor: of our own topics; none: one a broker, three at most.
            `min.insync.replicas` is one less, at least 1
        check_brokers: a node asks each broker for its settings before it leads; false: they are
            [checked by hand](KAFKA.md#brokers-checked-by-hand), where brokers refuse
            DescribeConfigs on the cluster. Said in the log and in the status
        ingress: take records from the topic `delaywheel-<cluster>-ingress`, which is made if it is
            missing: [delay through Kafka alone](INGRESS.md)
        ingress_topics: further topics that records are taken from, also without `ingress`; made if
            they are missing. As a flag or a variable a list with commas, or in JSON: `[]` for none.
            The same on all nodes
        ingress_destinations: of an ingress topic, the topics to which its records
            [may lead](INGRESS.md#where-a-topic-may-lead); `*` in a name stands for any characters.
            An ingress topic that is not among them leads anywhere. The same on all nodes
        ingress_partitions: of ingress topics made so. They have as many copies as our own topics
        halves: [half messages](PROTOCOL.md#half-messages) may be sent here; none: where `ingress`
            is on, and leads to all topics. Once all nodes have a release that knows them, no
            earlier release leads any more, and the leader makes the topic
            `delaywheel-<cluster>-halves`; with `false` an upgrade keeps the way back. The same on
            all nodes
        trace: the leader makes the topics `delaywheel-<cluster>-trace` (three partitions, a day)
            and `delaywheel-<cluster>-counts`, to which [clients and consumers tell](TRACE.md) what
            became of messages, and how many there were. The same on all nodes
        patience_seconds: how long a message waits for a topic [that takes
            nothing](OPERATIONS.md#topics-that-take-nothing), or for its partition, before it
            becomes a dead letter; 0: it is not deferred, as where `ingress` is off, or leads to
            some topics alone
        topic_patience_seconds: the same for some topics: name → seconds; `*` in a name stands for
            any characters, and the first that fits counts
        ttl_header: the header that states [how many seconds a message
            lives](OPERATIONS.md#time-to-live), for programs that use the name `ttl` otherwise;
            empty: none, and no message expires. The same on all nodes: that of the leader counts
        transaction_messages: messages in one transaction, and in one frame, at most
        transaction_bytes: the same in bytes. Peers take messages of the greater of this and 64 MiB,
            and 16 MiB more: lower it from above 64 MiB only when nothing is pending
        max_clock_skew_ms: a leader whose wall clock moves against the monotonic one by more steps
            down and stands again; also how much beyond the span a due may lie
        max_clock_dispute_ms: where fewer than three nodes' clocks are known, Kafka's is one more;
            if the only two clocks differ by more than this, either may be wrong, and no node leads;
            they are compared again every 10 s
        ledger_uri: where [the ledger](AUDIT.md#the-ledger) is published: a path, or a URI of a file
            system that pyarrow has, of this cluster alone. With several nodes the same place for
            all; none: `<data_dir>/ledger/published`, each node's own
        ledger_seal_seconds: how often
        ledger_retention_hours: how long published files stay, by the hour of acceptance; 0: for
            ever. None: in the data folder what is needed, 168 at least, which is 193 with the span
            of 7 days; for ever with a `ledger_uri`. In the data folder no more than what is needed
            stays once the disk is at its reserve. Refused below `span_seconds` +
            `late_window_seconds` + a day. The same on all nodes
        log_format: `"console"` or `"json"`
        log_level: `"debug"`, `"info"`, `"warning"`, `"error"`
    """

    cluster_id: _Name
    node_id: _Name
    data_dir: _Folder
    members: dict[_Name, _Address] = field(default_factory=dict)
    min_insync: PositiveInt | None = None
    listen: _Address = "127.0.0.1:7420"
    advertised: _Address | None = None
    peer_listen: _Address | None = None
    metrics_listen: _Address | None = None
    web_listen: _Address | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tls_ca: Path | None = None
    peer_tls: Literal["off", "accept", "prefer", "required"] = "off"
    grants: Path | None = None
    tokens: Path | None = None
    token_listen: _Address | None = None
    principal_from: list[Literal["uri", "dns", "cn"]] = field(
        default_factory=lambda: list(_PRINCIPAL_FROM)
    )
    insecure: bool = False
    metrics_tls: bool = False
    span_seconds: Annotated[int, Ge(1), Le(366 * 86_400)] = 7 * 86_400
    late_window_seconds: Annotated[int, Ge(1), Le(86_400)] = 120
    max_message_bytes: Annotated[int, Ge(1), Le(64 * _MIB)] = 1_000_000
    max_request_messages: Annotated[int, Ge(1), Le(1_000_000)] = 10_000
    max_request_bytes: Annotated[int, Ge(1024), Le(512 * _MIB)] = 16 * _MIB
    levels: dict[str, Annotated[int, Ge(0)]] = field(default_factory=lambda: dict(DEFAULT_LEVELS))
    max_in_flight_bytes: PositiveInt = 128 * _MIB
    max_caller_in_flight_bytes: PositiveInt = 32 * _MIB
    flush: Literal["async", "group"] = "async"
    disk_reserve_bytes: Annotated[int, Ge(0)] = 256 * _MIB
    open_files: Annotated[int, Ge(16)] | None = None
    kafka: dict[str, str]
    create_topics: bool = False
    topic_partitions: PositiveInt = 1
    topic_replication_factor: PositiveInt | None = None
    control_replication_factor: PositiveInt | None = None
    check_brokers: bool = True
    ingress: bool = True
    ingress_topics: list[str] = field(default_factory=list)
    ingress_destinations: dict[str, list[str]] = field(default_factory=dict)
    ingress_partitions: Annotated[int, Ge(1), Le(1_000)] = 6
    halves: bool | None = None
    trace: bool = False
    patience_seconds: _Patience = 120
    topic_patience_seconds: dict[str, _Patience] = field(default_factory=dict)
    ttl_header: str = TTL_HEADER
    transaction_messages: Annotated[int, Ge(1), Le(1_000_000)] = 10_000
    transaction_bytes: Annotated[int, Ge(1024), Le(512 * _MIB)] = 16 * _MIB
    max_clock_skew_ms: PositiveInt = 500
    max_clock_dispute_ms: PositiveInt = 10_000
    ledger_uri: _Place | None = None
    ledger_seal_seconds: Annotated[int, Ge(1), Le(3600)] = 60
    ledger_retention_hours: Annotated[int, Ge(0)] | None = None
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def inherited(cls) -> Self:
        """Returns the settings that the starting process read and checked."""
        document = json.loads(os.environ[RESOLVED_VARIABLE])
        paths = {name: Path(document[name]) for name in _PATHS if document[name] is not None}
        return cls(**{**document, **paths})

    def resolved(self) -> str:
        """The value of ``DELAYWHEEL_RESOLVED`` for the node's processes; holds secrets."""
        return json.dumps(self._plain())

    def take_reloaded(self, set_level: Callable[[Any], object]) -> None:
        """Adopts the settings that were reloaded last: `RELOADABLE`, in the running process.

        The levels change in the one table that all parts of the process share: none that is there
        before and after is ever missing to another thread.
        """
        settings = reloaded()
        if settings is None:
            return
        set_level(settings["log_level"])
        self.levels.update(settings["levels"])
        for name in self.levels.keys() - settings["levels"].keys():
            del self.levels[name]

    def shown(self) -> dict[str, Any]:
        """All settings as plain values, secrets masked."""
        document = self._plain()
        document["kafka"] = {
            key: HIDDEN if is_secret(key) else value for key, value in self.kafka.items()
        }
        if self.ledger_uri:
            document["ledger_uri"] = shown(self.ledger_uri)
        return document

    def shown_changes(self) -> dict[str, Any]:
        """Those of them that differ from their defaults, but for the names of node and folder."""
        told = {"cluster_id", "node_id", "data_dir"}
        return {
            name: value
            for name, value in self.shown().items()
            if name not in told and value != _DEFAULTS.get(name)
        }

    @property
    def kafka_settings(self) -> KafkaSettings:
        """Returns the settings of the cleaner's Kafka clients."""
        return KafkaSettings(
            names=KafkaNames(self.cluster_id),
            client=self.kafka,
            max_record_bytes=self.max_message_bytes + DEAD_ROOM_BYTES,
            ingress_limits=IngressLimits(
                self.span_seconds * 1000,
                self.max_message_bytes,
                self.ttl_header,
                # Elsewhere they would be dead letters: such a topic leads to some topics alone.
                takes_answers=KafkaNames(self.cluster_id).ingress not in self.ingress_destinations,
            ),
            halves=self.takes_halves,
            trace=self.trace,
            node=self.node_id,
        )

    @property
    def unchecked(self) -> str:
        """What is checked by hand, for people; empty: nothing."""
        if self.check_brokers:
            return ""
        return "the brokers' settings are checked by hand: check_brokers = false"

    @property
    def takes_halves(self) -> bool:
        """Whether half messages may be sent here."""
        return self.ingress_leads_anywhere if self.halves is None else self.halves

    @property
    def ingress_leads_anywhere(self) -> bool:
        """Whether the leader itself may send messages for any topic through the ingress topic."""
        topic = KafkaNames(self.cluster_id).ingress
        return self.ingress and topic not in self.ingress_destinations

    @property
    def taken_topics(self) -> frozenset[str]:
        """All topics whose records are delayed messages."""
        own = [self.kafka_settings.names.ingress] if self.ingress else []
        return frozenset([*own, *self.ingress_topics])

    @property
    def own_topics(self) -> frozenset[str]:
        """The service's own topics, which no message may go to."""
        names = self.kafka_settings.names
        own = {names.control, names.outcomes, names.dead, names.halves, names.ingress}
        return self.taken_topics | own | {names.trace, names.counts}

    @property
    def min_insync_members(self) -> int:
        """W: how many members hold a message before it is acknowledged."""
        return self.min_insync or len(self.members) // 2 + 1

    @property
    def listens_for_peers(self) -> str:
        """Where peers reach this node; unused on a node alone."""
        return self.peer_listen or self.members[self.node_id]

    @property
    def token_address(self) -> str:
        """Where callers with tokens reach this node; empty: nowhere else than others."""
        if self.token_listen is None:
            return ""
        host = (self.advertised or self.listen).rpartition(":")[0]
        return f"{host}:{self.token_listen.rpartition(':')[2]}"

    @property
    def agreed(self) -> dict[str, str]:
        """Settings that nodes compare when connecting, as text; some may differ (handshake.py).

        Of `members` only the ids: addresses may look different from elsewhere.
        """
        return {
            "members": ",".join(sorted(self.members)),
            "min_insync": str(self.min_insync_members),
            "span_seconds": str(self.span_seconds),
            "late_window_seconds": str(self.late_window_seconds),
            "max_clock_skew_ms": str(self.max_clock_skew_ms),
            # A frame of any node must fit one transaction of whichever leads.
            "transaction_messages": str(self.transaction_messages),
            "transaction_bytes": str(self.transaction_bytes),
        }

    @property
    def ledger_place(self) -> str:
        """Where the ledger is published."""
        return self.ledger_uri or str(self.data_dir / "ledger" / "published")

    @property
    def ledger_kept_hours(self) -> int:
        """How long published files are kept, in hours; 0: forever."""
        if self.ledger_retention_hours is not None:
            return self.ledger_retention_hours
        return 0 if self.ledger_uri else max(_WEEK_HOURS, self.ledger_needed_hours)

    @property
    def ledger_needed_hours(self) -> int:
        """The time from acceptance until a day after the end of the late window, in hours."""
        return -(-(self.span_seconds + self.late_window_seconds) // 3600) + 24

    def _plain(self) -> dict[str, Any]:
        document = asdict(self)
        return document | {name: str(document[name]) for name in _PATHS if document[name]}


RELOADABLE: Final = ("levels", "log_level")
"""Settings that a running node adopts; all others need a restart."""

_PATHS: Final = (
    *("data_dir", "tls_cert", "tls_key", "tls_client_ca", "tls_ca"),
    *("grants", "tokens"),
)
_DEFAULTS: Final[Mapping[str, Any]] = {
    each.name: each.default if each.default_factory is MISSING else each.default_factory()
    for each in fields(Config)
}
"""By setting; those that must be set have none that a value could equal."""
