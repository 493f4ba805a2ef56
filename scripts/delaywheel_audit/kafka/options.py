"""Options of reading Kafka, checked before Kafka is contacted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delaywheel_audit.kafka.errors import KafkaSourceError, Reason

DEFAULT_BYTES_PER_PARTITION = 64 * 1024 * 1024
DEFAULT_TIMEOUT_MS = 60_000
_GREATEST_MS = (1 << 63) - 1

_NAMES = (
    *("topics", "topicsPattern", "missingTopics", "startingTimestampMs", "endingTimestampMs"),
    *("ranges", "bytesPerPartition", "recordsPerPartition", "columns", "timeoutMs", "settings"),
)
_CLIENT_PREFIX = "kafka."
# As `delaywheel_replica.hiding` has it, which executors do not have: only this package is sent to
# them.
_HARMLESS = re.compile(
    r"(socket|broker|metadata|topic|queued?|message|batch|compression|fetch|linger|reconnect|retry"
    r"|api|connections|statistics|log|enable|check|allow|auto|session|heartbeat|max|receive"
    r"|isolation|group|transaction|transactional|request|delivery|sticky)(\.[a-z]+)+"
    r"|acks|retries|partitioner|debug|log_level|bootstrap\.servers|security\.protocol"
    r"|client\.(id|rack|dns\.lookup)|sasl\.(mechanisms?|username)"
    r"|sasl\.oauthbearer\.(method|client\.id|scope)"
    r"|sasl\.kerberos\.(service\.name|principal|keytab|min\.time\.before\.relogin)"
    r"|(ssl|https)\.(ca|certificate|crl|key|keystore|truststore)\.location"
    r"|ssl\.(cipher\.suites|curves\.list|sigalgs\.list|endpoint\.identification\.algorithm)"
)
HIDDEN = "********"
_NOT_TEXT = re.compile(r"\w+_cb|logger|on_\w+")


def is_secret(name: str) -> bool:
    """Whether the value of a Kafka client setting must not be shown: all but what is harmless."""
    return _HARMLESS.fullmatch(name.lower()) is None


OURS = frozenset(
    {
        "auto.offset.reset",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.partition.eof",
        "isolation.level",
    }
)
"""Client settings that exactness depends on."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How to reach Kafka; no text made by this package contains its secrets."""

    values: Mapping[str, str] = field(repr=False)

    def admin(self) -> dict[str, Any]:
        """Returns the settings of a client that asks about topics."""
        return {"client.id": "delaywheel-audit", "log_level": 0, **self.values}

    def consumer(self) -> dict[str, Any]:
        """Returns the settings of a client that reads committed records from given offsets."""
        return {
            "client.id": "delaywheel-audit",
            "log_level": 0,
            "check.crcs": True,
            # An end of a partition is reported this late.
            "fetch.wait.max.ms": 50,
            "fetch.error.backoff.ms": 100,
            # Memory of a task beside its batch: several run in one executor. One fetch (1 MiB as
            # it comes, more when decompressed) may be on top.
            "queued.max.messages.kbytes": 8 * 1024,
            # With the default of 1000, a full queue would stop the fetching for a second.
            "fetch.queue.backoff.ms": 5,
            # For manually edited ranges: a missing partition is reported soon.
            "topic.metadata.propagation.max.ms": 2_000,
            # The client requires a group id; the group is never joined, and nothing is committed.
            "group.id": "delaywheel-audit",
            **self.values,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
        }

    def masked(self, text: str) -> str:
        """Returns the text without any secret value."""
        secrets = {value for name, value in self.values.items() if is_secret(name) and value}
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of one read.

    Attributes:
        client: How to reach Kafka.
        topics: Names, as given.
        topics_pattern: Instead of names: a pattern for whole names.
        skips_missing: Missing topics count as empty.
        starting_ms: First record timestamp; None: from the earliest record.
        ending_ms: End of record timestamps, exclusive; None: the end as of planning.
        ranges: Instead of all of these: a result of `Plan.to_json`.
        records_per_partition: How many offsets one Spark task reads; None: by size.
        bytes_per_partition: Approximate size of what one Spark task reads.
        columns: The columns to build; None: all.
        timeout_s: How long Kafka may show no progress.
    """

    client: ClientSettings
    topics: tuple[str, ...] = ()
    topics_pattern: str | None = None
    skips_missing: bool = False
    starting_ms: int | None = None
    ending_ms: int | None = None
    ranges: str | None = None
    records_per_partition: int | None = None
    bytes_per_partition: int = DEFAULT_BYTES_PER_PARTITION
    columns: tuple[str, ...] | None = None
    timeout_s: float = DEFAULT_TIMEOUT_MS / 1000

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parses and checks options given by Spark.

        Raises:
            KafkaSourceError: OPTION_INVALID or SETTINGS_UNREADABLE.
        """
        given = _Given(options)
        pattern = given.text("topicsPattern")
        if pattern is not None:
            _compiles(pattern)
        missing = given.text("missingTopics") or "error"
        if missing not in ("error", "skip"):
            raise invalid(f"missingTopics {missing!r}: it is error or skip")
        read = cls(
            client=given.client(),
            topics=given.names("topics") or (),
            topics_pattern=pattern,
            skips_missing=missing == "skip",
            starting_ms=given.number("startingTimestampMs", least=0),
            ending_ms=given.number("endingTimestampMs", least=0),
            ranges=given.text("ranges"),
            records_per_partition=given.number("recordsPerPartition", least=1),
            bytes_per_partition=given.number("bytesPerPartition", least=1)
            or DEFAULT_BYTES_PER_PARTITION,
            columns=given.names("columns"),
            timeout_s=(given.number("timeoutMs", least=1) or DEFAULT_TIMEOUT_MS) / 1000,
        )
        read._check(both_sizes="bytesPerPartition" in given and "recordsPerPartition" in given)
        return read

    def _check(self, *, both_sizes: bool) -> None:
        ways = [bool(self.topics), self.topics_pattern is not None, self.ranges is not None]
        if sum(ways) != 1:
            raise invalid("exactly one of topics, topicsPattern and ranges says what is read")
        times = (self.starting_ms, self.ending_ms)
        if self.ranges is not None and times != (None, None):
            raise invalid("ranges says where to start and to end: give no timestamps beside it")
        if self.starting_ms is not None and self.ending_ms is not None:  # noqa: SIM102 - reads better
            if self.ending_ms < self.starting_ms:
                raise invalid("endingTimestampMs is before startingTimestampMs")
        if both_sizes:
            raise invalid("give bytesPerPartition or recordsPerPartition, not both")


class _Given:
    """Options by name; Spark lowers their case."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in dict(options).items()}
        known = {name.lower() for name in _NAMES}
        unknown = sorted(
            name
            for name in self._values
            if name not in known and not name.startswith(_CLIENT_PREFIX)
        )
        if unknown:
            raise invalid(
                f"unknown: {', '.join(unknown)}; there are {', '.join(_NAMES)} and kafka.*"
            )

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def text(self, name: str) -> str | None:
        return self._values.get(name.lower())

    def number(self, name: str, *, least: int) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9]{1,19}", text) or not least <= int(text) <= _GREATEST_MS:
            raise invalid(f"{name} {text!r}: a whole number, at least {least}")
        return int(text)

    def names(self, name: str) -> tuple[str, ...] | None:
        """Parses a comma-separated or JSON list."""
        text = self.text(name)
        if text is None:
            return None
        if text.lstrip().startswith("["):
            try:
                found = json.loads(text)
            except ValueError as error:
                raise invalid(f"{name}: not the JSON that it begins as: {error}") from error
        else:
            found = [part.strip() for part in text.split(",")]
        if not found or not all(isinstance(part, str) and part for part in found):
            raise invalid(f"{name} {text!r}: names, separated by commas, or a JSON list of them")
        return tuple(dict.fromkeys(found))

    def client(self) -> ClientSettings:
        values = {}
        if (file := self.text("settings")) is not None:
            values = _of_the_service(Path(file))
        for name, value in self._values.items():
            if name.startswith(_CLIENT_PREFIX):
                values[name.removeprefix(_CLIENT_PREFIX)] = value
        if not values.get("bootstrap.servers"):
            raise invalid("kafka.bootstrap.servers is missing: an option, or a settings file")
        if taken := sorted(name for name in values if name in OURS or _NOT_TEXT.fullmatch(name)):
            raise invalid(f"kafka.{', kafka.'.join(taken)}: set by the source itself")
        return ClientSettings(values)


def invalid(message: str) -> KafkaSourceError:
    """Returns the error for an invalid option."""
    return KafkaSourceError(Reason.OPTION_INVALID, message)


def _compiles(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise invalid(f"topicsPattern {pattern!r}: {error}") from error


def _of_the_service(file: Path) -> dict[str, str]:
    """Returns the Kafka settings of a node's settings file and environment."""
    try:
        # Imported here: a reader without such a file needs no module of the service.
        from delaywheel_replica.config_sources import (  # noqa: PLC0415
            ConfigError,
            load_config,
        )
    except ImportError as error:
        raise KafkaSourceError(
            Reason.SETTINGS_UNREADABLE,
            f"{file}: reading it needs delaywheel[cli] where the job is started ({error})",
        ) from error
    try:
        return dict(load_config(file=file).kafka)
    except ConfigError as error:
        faults = "; ".join(str(error).splitlines())
        raise KafkaSourceError(Reason.SETTINGS_UNREADABLE, f"{file}: {faults}") from error
    except OSError as error:
        raise KafkaSourceError(Reason.SETTINGS_UNREADABLE, f"{file}: {error.strerror}") from error
