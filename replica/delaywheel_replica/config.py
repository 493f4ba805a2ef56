"""Everything an operator may set.

Flags win over the environment (``DELAYWHEEL_*``, nested ``__``), the environment over the TOML
file. It is read and checked once, by whoever starts the node; the node's processes inherit the
result as one JSON document in their environment, so that they can never differ, not even when
one of them is restarted after the file was changed.

The ``kafka`` table goes to the Kafka clients verbatim. Its keys may be written as Kafka writes
them (``"bootstrap.servers"``), as nested TOML keys (``kafka.bootstrap.servers = …``) or with
underscores, as environment variables must be (``DELAYWHEEL_KAFKA__BOOTSTRAP_SERVERS``).
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from delaywheel.identity import check_name
from delaywheel.levels import DEFAULT_LEVELS
from delaywheel_replica.cleaner.settings import (
    DEAD_ROOM_BYTES,
    KafkaNames,
    KafkaSettings,
    refused,
)
from delaywheel_replica.inheritance import RESOLVED_VARIABLE

_MIB = 1024 * 1024
_WEEK_HOURS = 7 * 24
_SECRET = re.compile(r"password|secret|token|jaas|ssl\.key\.pem|sasl\.oauthbearer\.config")
# The few names of the Kafka client that really have underscores.
_UNDERSCORED = re.compile(r"log_level|on_delivery|\w+_cb")
# File systems of pyarrow.
_LEDGER_SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})")

Name: TypeAlias = Annotated[str, AfterValidator(check_name)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]


class ConfigError(Exception):
    """The configuration is refused; the text names every setting at fault, one a line."""


class Config(BaseSettings):
    """One node's settings."""

    model_config = SettingsConfigDict(
        env_prefix="DELAYWHEEL_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    _file: ClassVar[Path | None] = None

    # Who this is.
    cluster_id: Name
    node_id: Name
    data_dir: Path
    # Node id -> address for peers. Default: this node alone.
    members: dict[Name, str] = Field(default_factory=dict)
    # None: a majority of the members.
    min_insync: Positive | None = None

    # Where it is reached. Port 0: any free one.
    listen: str = "127.0.0.1:7420"
    # What others are told instead of `listen`.
    advertised: str | None = None
    # Where peers reach it. None: its own address in `members`.
    peer_listen: str | None = None
    # Where metrics, health and readiness are told over HTTP. None: nowhere.
    metrics_listen: str | None = None

    # What it accepts.
    span_seconds: Annotated[int, Field(ge=1, le=366 * 86_400)] = 7200
    late_window_seconds: Annotated[int, Field(ge=1, le=86_400)] = 120
    max_message_bytes: Annotated[int, Field(ge=1, le=64 * _MIB)] = 1_000_000
    max_request_messages: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    max_request_bytes: Annotated[int, Field(ge=1024, le=512 * _MIB)] = 16 * _MIB
    levels: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=lambda: dict(DEFAULT_LEVELS)
    )

    # Bytes that were received and are not yet answered.
    max_in_flight_bytes: Positive = 128 * _MIB
    max_caller_in_flight_bytes: Positive = 32 * _MIB

    # Files. "async" acknowledges what the page cache holds, "group" what the disk holds.
    flush: Literal["async", "group"] = "async"
    disk_reserve_bytes: Annotated[int, Field(ge=0)] = 256 * _MIB
    # Open slot files; None: what the limit on descriptors allows.
    open_files: Annotated[int, Field(ge=16)] | None = None

    # Kafka: client settings, verbatim.
    kafka: dict[str, str]
    # Make a destination topic that is not there.
    create_topics: bool = False
    topic_partitions: Positive = 1
    # None: the broker's default.
    topic_replication_factor: Positive | None = None
    # Of the control, outcomes and dead-letter topics. None: one a broker, three at most.
    control_replication_factor: Positive | None = None
    transaction_messages: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    transaction_bytes: Annotated[int, Field(ge=1024, le=512 * _MIB)] = 16 * _MIB
    max_clock_skew_ms: Positive = 500
    # Where fewer than three clocks of nodes are known: the brokers' counts as well.
    max_clock_dispute_ms: Positive = 10_000

    # The books. None: a folder inside data_dir.
    ledger_uri: str | None = None
    ledger_seal_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    # How long published files are kept. 0: for ever. None: in a place of the operator's for ever,
    # in the data folder for a week, or as long as they are needed where that is longer.
    ledger_retention_hours: Annotated[int, Field(ge=0)] | None = None

    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - signature of pydantic's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the TOML file."""
        file = TomlConfigSettingsSource(settings_cls, cls._file)
        sources = init_settings, env_settings, file
        return tuple(_KafkaNamed(settings_cls, source) for source in sources)

    @classmethod
    def load(cls, *, file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Self:
        """Reads and checks all sources.

        Args:
            file: A TOML file; must be there when named.
            flags: Settings by name; ``table.key`` reaches into a table. Values may be text.

        Raises:
            ConfigError: a setting is missing, unknown or refused.
        """
        if file is not None and not file.is_file():
            raise ConfigError(f"{file}: no such file")

        class Sources(cls):  # type: ignore[misc, valid-type]  # the file is known only here
            _file = file

        try:
            loaded = Sources(**_nested(flags or {}))
            return cls.model_validate(loaded.model_dump())
        except ValidationError as error:
            raise ConfigError(_told(error)) from error
        except ValueError as error:  # TOML syntax, JSON in an environment variable
            raise ConfigError(str(error)) from error

    @classmethod
    def inherited(cls) -> Self:
        """What the process that started this one has read and checked."""
        return cls.model_validate_json(os.environ[RESOLVED_VARIABLE])

    def resolved(self) -> str:
        """The value of ``DELAYWHEEL_RESOLVED`` for the node's processes; holds secrets."""
        return self.model_dump_json()

    def shown(self) -> dict[str, Any]:
        """All settings as plain values, secrets masked."""
        document = self.model_dump(mode="json")
        document["kafka"] = {
            key: "********" if _SECRET.search(key) else value for key, value in self.kafka.items()
        }
        return document

    @property
    def kafka_settings(self) -> KafkaSettings:
        """What the cleaner's Kafka clients are made with."""
        return KafkaSettings(
            names=KafkaNames(self.cluster_id),
            client=self.kafka,
            max_record_bytes=self.max_message_bytes + DEAD_ROOM_BYTES,
        )

    @property
    def min_insync_members(self) -> int:
        """W: how many members hold a message before it is acknowledged."""
        return self.min_insync or len(self.members) // 2 + 1

    @property
    def listens_for_peers(self) -> str:
        """Where peers reach this node; of no use to a node alone."""
        return self.peer_listen or self.members[self.node_id]

    @property
    def agreed(self) -> dict[str, str]:
        """What nodes compare before they talk, as text; peers/handshake.py says what may differ.

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

    @field_validator("data_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @field_validator("listen", "advertised", "peer_listen", "metrics_listen")
    @classmethod
    def _host_and_port(cls, address: str | None) -> str | None:
        if address is not None and not _HOST_PORT.fullmatch(address):
            raise ValueError(f"{address!r} is not host:port")
        return address

    @field_validator("members")
    @classmethod
    def _hosts_and_ports(cls, members: dict[str, str]) -> dict[str, str]:
        for address in members.values():
            cls._host_and_port(address)
        return members

    @field_validator("ledger_uri")
    @classmethod
    def _known_file_system(cls, uri: str | None) -> str | None:
        scheme, separator, _ = (uri or "").partition("://")
        if separator and scheme not in _LEDGER_SCHEMES:
            raise ValueError(f"{scheme}:// is none of {', '.join(_LEDGER_SCHEMES)}, or a folder")
        return uri

    @field_validator("kafka", mode="before")
    @classmethod
    def _as_kafka_writes(cls, settings: Any) -> Any:
        return dict(_flat(settings)) if isinstance(settings, Mapping) else settings

    @field_validator("kafka")
    @classmethod
    def _ours_are_not_touched(cls, settings: dict[str, str]) -> dict[str, str]:
        if not settings.get("bootstrap.servers"):
            raise ValueError("bootstrap.servers is missing")
        if ours := refused(settings):
            raise ValueError(
                f"{', '.join(ours)}: set by delaywheel itself, which keeps its promises with them"
            )
        return settings

    @model_validator(mode="after")
    def _no_text_ends_early(self) -> Self:
        """Libraries in C take U+0000 for the end of a text, and drop the rest without a word."""
        for name, value in self.model_dump(mode="json").items():
            entries = value.items() if isinstance(value, dict) else [("", value)]
            for key, entry in entries:
                if "\0" in key or (isinstance(entry, str) and "\0" in entry):
                    raise ValueError(f"{name}{key and f'.{key!r}'}: has the character U+0000")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.members:
            address = self.advertised or self.listen
            # The model is frozen for its users; this is still its making.
            object.__setattr__(self, "members", {self.node_id: address})
        if self.node_id not in self.members:
            raise ValueError(f"members: node_id {self.node_id!r} is not among them")
        if len(self.members) > 1 and self.listens_for_peers == self.listen:
            raise ValueError(
                f"members: {self.listen} is where callers are taken (listen); peers need another"
            )
        if self.min_insync is not None and self.min_insync > len(self.members):
            raise ValueError(f"min_insync {self.min_insync}: only {len(self.members)} members")
        if self.max_message_bytes > min(self.max_request_bytes, self.transaction_bytes):
            raise ValueError("max_message_bytes is above max_request_bytes or transaction_bytes")
        if self.max_request_bytes > self.max_caller_in_flight_bytes:
            raise ValueError("max_request_bytes is above max_caller_in_flight_bytes")
        if self.max_caller_in_flight_bytes > self.max_in_flight_bytes:
            raise ValueError("max_caller_in_flight_bytes is above max_in_flight_bytes")
        if 0 < self.ledger_kept_hours < self.ledger_needed_hours:
            raise ValueError(
                f"ledger_retention_hours {self.ledger_kept_hours}: at least"
                f" {self.ledger_needed_hours} (span_seconds + late_window_seconds + a day), or"
                " 0: what is still pending, or was just forwarded, could not be reconciled"
            )
        return self

    @property
    def ledger_kept_hours(self) -> int:
        """How long published files are kept; 0: for ever."""
        if self.ledger_retention_hours is not None:
            return self.ledger_retention_hours
        return 0 if self.ledger_uri else max(_WEEK_HOURS, self.ledger_needed_hours)

    @property
    def ledger_needed_hours(self) -> int:
        """From being accepted until a day after the end of the late window."""
        return -(-(self.span_seconds + self.late_window_seconds) // 3600) + 24


class _KafkaNamed(PydanticBaseSettingsSource):
    """A source whose Kafka settings have Kafka's names.

    Sources are merged by name: two spellings of one setting would both be there, and which of
    them counts would hang on chance.
    """

    def __init__(
        self, settings_cls: type[BaseSettings], source: PydanticBaseSettingsSource
    ) -> None:
        super().__init__(settings_cls)
        self._source = source

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Asks the source."""
        return self._source.get_field_value(field, field_name)

    def __call__(self) -> dict[str, Any]:
        """All that the source says."""
        found = dict(self._source())
        if isinstance(found.get("kafka"), Mapping):
            found["kafka"] = dict(_flat(found["kafka"]))
        return found


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    """``{"kafka.bootstrap.servers": x}`` as ``{"kafka": {"bootstrap.servers": x}}``."""
    nested: dict[str, Any] = {}
    for name, value in flags.items():
        table, dot, key = name.partition(".")
        if dot:
            nested.setdefault(table, {})[key] = value
        else:
            nested[name] = value
    return nested


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Kafka's names have dots where TOML nests and where environment variables cannot."""
    flat: list[tuple[str, str]] = []
    for key, value in settings.items():
        name = prefix + (key if _UNDERSCORED.fullmatch(key) else key.replace("_", "."))
        if isinstance(value, Mapping):
            flat += _flat(value, f"{name}.")
        else:
            flat.append((name, str(value).lower() if isinstance(value, bool) else str(value)))
    return flat


def _told(error: ValidationError) -> str:
    lines = []
    for detail in error.errors(include_url=False, include_input=False, include_context=False):
        place = ".".join(str(part) for part in detail["loc"])
        text = detail["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {text}" if place else text)
    return "\n".join(lines)
