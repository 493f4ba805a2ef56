"""Where settings come from: flags, the environment, a TOML file; read, merged and checked.

Flags win over the environment (``DELAYWHEEL_*``, nested ``__``), the environment over the TOML
file. What is read is checked against `Config`'s own types and bounds, and then as a whole.

The ``kafka`` table goes to the Kafka clients verbatim. Its keys may be written as Kafka writes
them (``"bootstrap.servers"``), as nested TOML keys (``kafka.bootstrap.servers = …``) or with
underscores, as environment variables must be (``DELAYWHEEL_KAFKA__BOOTSTRAP_SERVERS``).

A node's processes do not import this: they inherit what was read (`Config.inherited`), and
pydantic would be a quarter of what they compute to start.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from pydantic import Field, ValidationError, create_model, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from delaywheel.identity import check_name
from delaywheel_replica.cleaner.settings import refused
from delaywheel_replica.config import Config

# The few names of the Kafka client that really have underscores.
_UNDERSCORED = re.compile(r"log_level|on_delivery|\w+_cb")
# File systems of pyarrow.
_LEDGER_SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})")


class ConfigError(Exception):
    """The configuration is refused; the text names every setting at fault, one a line."""


def load_config(*, file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Config:
    """Reads and checks all sources.

    Args:
        file: A TOML file; must be there when named.
        flags: Settings by name; ``table.key`` reaches into a table. Values may be text.

    Raises:
        ConfigError: a setting is missing, unknown or refused.
    """
    if file is not None and not file.is_file():
        raise ConfigError(f"{file}: no such file")

    try:
        read = _sources(file)(**_nested(flags or {})).model_dump()
    except ValidationError as error:
        raise ConfigError(_told(error)) from error
    except ValueError as error:  # TOML syntax, JSON in an environment variable
        raise ConfigError(str(error)) from error
    config = Config(**read)
    if not config.members:
        config = replace(config, members={config.node_id: config.advertised or config.listen})
    _check_texts(config)
    _check_fit(config)
    return config


class _Checked(BaseSettings):
    """How single settings are read and checked; `_sources` adds which there are."""

    model_config = SettingsConfigDict(
        env_prefix="DELAYWHEEL_", env_nested_delimiter="__", extra="forbid"
    )

    _file: ClassVar[Path | None] = None

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

    @field_validator("cluster_id", "node_id", check_fields=False)
    @classmethod
    def _name(cls, name: str) -> str:
        return check_name(name)

    @field_validator("data_dir", check_fields=False)
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @field_validator("listen", "advertised", "peer_listen", "metrics_listen", check_fields=False)
    @classmethod
    def _host_and_port(cls, address: str | None) -> str | None:
        if address is not None and not _HOST_PORT.fullmatch(address):
            raise ValueError(f"{address!r} is not host:port")
        return address

    @field_validator("members", check_fields=False)
    @classmethod
    def _names_hosts_and_ports(cls, members: dict[str, str]) -> dict[str, str]:
        for node, address in members.items():
            check_name(node)
            cls._host_and_port(address)
        return members

    @field_validator("ledger_uri", check_fields=False)
    @classmethod
    def _known_file_system(cls, uri: str | None) -> str | None:
        scheme, separator, _ = (uri or "").partition("://")
        if separator and scheme not in _LEDGER_SCHEMES:
            raise ValueError(f"{scheme}:// is none of {', '.join(_LEDGER_SCHEMES)}, or a folder")
        return uri

    @field_validator("kafka", mode="before", check_fields=False)
    @classmethod
    def _as_kafka_writes(cls, settings: Any) -> Any:
        return dict(_flat(settings)) if isinstance(settings, Mapping) else settings

    @field_validator("kafka", check_fields=False)
    @classmethod
    def _ours_are_not_touched(cls, settings: dict[str, str]) -> dict[str, str]:
        if not settings.get("bootstrap.servers"):
            raise ValueError("bootstrap.servers is missing")
        if ours := refused(settings):
            raise ValueError(
                f"{', '.join(ours)}: set by delaywheel itself, which keeps its promises with them"
            )
        return settings


def _sources(file: Path | None) -> type[_Checked]:
    """`Config`'s fields as pydantic's, with the same types, bounds and defaults."""

    class OfFile(_Checked):
        _file = file

    hints = get_type_hints(Config, include_extras=True)
    made: dict[str, Any] = {}
    for field in fields(Config):
        default = ... if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = Field(default_factory=field.default_factory)
        made[field.name] = (hints[field.name], default)
    return create_model("Settings", __base__=OfFile, **made)


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


def _check_texts(config: Config) -> None:
    """Libraries in C take U+0000 for the end of a text, and drop the rest without a word."""
    for name, value in asdict(config).items():
        entries = value.items() if isinstance(value, dict) else [("", value)]
        for key, entry in entries:
            if "\0" in key or (isinstance(entry, str | Path) and "\0" in str(entry)):
                raise ConfigError(f"{name}{key and f'.{key!r}'}: has the character U+0000")


def _check_fit(config: Config) -> None:
    if config.node_id not in config.members:
        raise ConfigError(f"members: node_id {config.node_id!r} is not among them")
    if len(config.members) > 1 and config.listens_for_peers == config.listen:
        raise ConfigError(
            f"members: {config.listen} is where callers are taken (listen); peers need another"
        )
    if config.min_insync is not None and config.min_insync > len(config.members):
        raise ConfigError(f"min_insync {config.min_insync}: only {len(config.members)} members")
    if config.max_message_bytes > min(config.max_request_bytes, config.transaction_bytes):
        raise ConfigError("max_message_bytes is above max_request_bytes or transaction_bytes")
    if config.max_request_bytes > config.max_caller_in_flight_bytes:
        raise ConfigError("max_request_bytes is above max_caller_in_flight_bytes")
    if config.max_caller_in_flight_bytes > config.max_in_flight_bytes:
        raise ConfigError("max_caller_in_flight_bytes is above max_in_flight_bytes")
    if 0 < config.ledger_kept_hours < config.ledger_needed_hours:
        raise ConfigError(
            f"ledger_retention_hours {config.ledger_kept_hours}: at least"
            f" {config.ledger_needed_hours} (span_seconds + late_window_seconds + a day), or"
            " 0: what is still pending, or was just forwarded, could not be reconciled"
        )


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
