"""Reads settings from flags, the environment and a TOML file; merges and checks them.

Flags win over the environment (``DELAYWHEEL_*``, nested ``__``), the environment over the TOML
file. What is read is checked against `Config`'s own types and bounds, and then as a whole.

The ``kafka`` table goes to the Kafka clients verbatim. Its keys may be written as Kafka writes
them (``"bootstrap.servers"``), as nested TOML keys (``kafka.bootstrap.servers = …``) or with
underscores, as environment variables must be (``DELAYWHEEL_KAFKA__BOOTSTRAP_SERVERS``).

A node's processes do not import this: they inherit what was read (`Config.inherited`), and
pydantic would be a quarter of what they compute to start.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Final, get_type_hints

from pydantic import Field, ValidationError, create_model, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from delaywheel.identity import check_name
from delaywheel_replica.config import Config
from delaywheel_replica.config_faults import Fault, did_you_mean, faults

# The only names of the Kafka client that contain underscores.
_UNDERSCORED = re.compile(r"log_level|on_delivery|\w+_cb")
# File systems of pyarrow.
_LEDGER_SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_PREFIX: Final = "DELAYWHEEL_"
_STAND_INS: Final[Mapping[str, Any]] = {
    "cluster_id": "c",
    "node_id": "n",
    "data_dir": Path("/"),
    "kafka": {"bootstrap.servers": "k:1"},
}
"""Placeholders for required settings, while the others are checked."""

_OF_THE_COMMAND_LINE: Final = frozenset(
    {"client_ca", "client_cert", "client_key", "client_tls", "client_token_file"}
)
"""Variables that resemble settings and are none: `delaywheel` reaches nodes with them."""

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})")


class ConfigError(Exception):
    """The configuration is refused; the text names every faulty setting, one a line."""


def load_config(
    *,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    checks: Sequence[Callable[[Config], Iterable[Fault]]] = (),
) -> Config:
    """Reads and checks all sources.

    Args:
        file: A TOML file; must be there when named.
        flags: Settings by name; ``table.key`` reaches into a table. Values may be text.
        checks: Further checks.

    Raises:
        ConfigError: Settings are missing, unknown or refused; names all of them.
    """
    if file is not None:
        _check_readable(file)
    try:
        return _load(file, _nested(flags or {}), [faults, *checks])
    except ValueError as error:  # TOML syntax, JSON in an environment variable
        raise ConfigError(str(error) if file is None else f"{file}: {error}") from error


def _check_readable(file: Path) -> None:
    try:
        file.open("rb").close()
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


def _load(
    file: Path | None,
    flags: Mapping[str, Any],
    checks: Iterable[Callable[[Config], Iterable[Fault]]],
) -> Config:
    """Returns the settings if each is valid and all fit together."""
    texts = _misspelt_variables()
    wrong: frozenset[str] = frozenset()
    try:
        read = _sources(file)(**flags).model_dump()
    except ValidationError as error:
        texts = _worded(error, lambda name: _place(name, file, flags))
        # Other mistakes are reported as well: refused settings count as unset.
        wrong = frozenset(str(detail["loc"][0]) for detail in error.errors() if detail["loc"])
        read = _sources(file, wrong)(**flags).model_dump()
    config = Config(**read)
    if not config.members:
        config = replace(config, members={config.node_id: config.advertised or config.listen})
    found = [fault for check in checks for fault in check(config)]
    texts += [
        f"{fault.text}{_places(fault.names, file, flags)}"
        for fault in found
        if not wrong & set(fault.names)
    ]
    if texts:
        raise ConfigError("\n".join(texts))
    return config


def _misspelt_variables() -> list[str]:
    """Returns the faults of environment variables that look like settings, and are none.

    Others with our prefix may be of another program's, or of the command line.
    """
    known = {field.name for field in fields(Config)}
    texts = []
    for variable in sorted(os.environ):
        name = variable.upper().removeprefix(_PREFIX).partition("__")[0].lower()
        if variable.upper().startswith(_PREFIX) and name not in known | _OF_THE_COMMAND_LINE:
            meant = did_you_mean(name, sorted(known))
            if meant:
                texts.append(f"{name}: there is no such setting{meant} ({variable})")
    return texts


def _place(name: str, file: Path | None, flags: Mapping[str, Any]) -> str:
    """Returns where a setting comes from, as the operator named it."""
    if name in flags:
        return "--set"
    variable = f"{_PREFIX}{name.upper()}"
    for known in os.environ:
        if known.upper() == variable or known.upper().startswith(f"{variable}__"):
            return known
    if file is not None and name in tomllib.loads(file.read_text(encoding="utf-8")):
        return str(file)
    return ""


def _places(names: Iterable[str], file: Path | None, flags: Mapping[str, Any]) -> str:
    """Returns where settings come from, to append to errors about them."""
    places = dict.fromkeys(filter(None, (_place(name, file, flags) for name in names)))
    return f" ({', '.join(places)})" if places else ""


class _Checked(BaseSettings):
    """Parses and checks single settings; `_sources` adds the fields."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid")

    _file: ClassVar[Path | None] = None
    _without: ClassVar[frozenset[str]] = frozenset()

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
        return tuple(_KafkaNamed(settings_cls, source, cls._without) for source in sources)

    @field_validator("cluster_id", "node_id", check_fields=False)
    @classmethod
    def _name(cls, name: str) -> str:
        return check_name(name)

    @field_validator("data_dir", check_fields=False)
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @field_validator(
        "listen", "advertised", "peer_listen", "metrics_listen", "token_listen", check_fields=False
    )
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

    @field_validator("ingress_topics", "principal_from", mode="before", check_fields=False)
    @classmethod
    def _listed(cls, topics: Any) -> Any:
        """Splits what a flag gives: one text with commas."""
        if not isinstance(topics, str):
            return topics
        return [name.strip() for name in topics.split(",") if name.strip()]

    @field_validator("ingress_destinations", mode="before", check_fields=False)
    @classmethod
    def _listed_each(cls, destinations: Any) -> Any:
        """Splits what flags give."""
        if not isinstance(destinations, Mapping):
            return destinations
        return {topic: cls._listed(each) for topic, each in destinations.items()}

    @field_validator("kafka", mode="before", check_fields=False)
    @classmethod
    def _as_kafka_writes(cls, settings: Any) -> Any:
        return dict(_flat(settings)) if isinstance(settings, Mapping) else settings


def _sources(file: Path | None, without: frozenset[str] = frozenset()) -> type[_Checked]:
    """Returns `Config`'s fields as pydantic's, with the same types, bounds and defaults.

    Args:
        file: The TOML file.
        without: These settings count as not given; those without a default get one, so
            that the others can be checked.
    """

    class OfFile(_Checked):
        _file = file
        _without = without

    hints = get_type_hints(Config, include_extras=True)
    made: dict[str, Any] = {}
    for field in fields(Config):
        default = ... if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = Field(default_factory=field.default_factory)
        elif default is ... and field.name in without:
            default = _STAND_INS[field.name]
        made[field.name] = (hints[field.name], default)
    return create_model("Settings", __base__=OfFile, **made)


class _KafkaNamed(PydanticBaseSettingsSource):
    """A source whose Kafka settings have Kafka's names.

    Sources are merged by name: otherwise two spellings of one setting would both be there, and
    chance would decide which of them counts.
    """

    def __init__(
        self,
        settings_cls: type[BaseSettings],
        source: PydanticBaseSettingsSource,
        without: frozenset[str],
    ) -> None:
        super().__init__(settings_cls)
        self._source = source
        self._without = without

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Asks the source for a value."""
        return self._source.get_field_value(field, field_name)

    def __call__(self) -> dict[str, Any]:
        """Returns everything that the source has."""
        found = {name: said for name, said in self._source().items() if name not in self._without}
        if isinstance(found.get("kafka"), Mapping):
            found["kafka"] = dict(_flat(found["kafka"]))
        return found


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Turns ``{"kafka.bootstrap.servers": x}`` into ``{"kafka": {"bootstrap.servers": x}}``."""
    nested: dict[str, Any] = {}
    for name, value in flags.items():
        table, dot, key = name.partition(".")
        if dot:
            nested.setdefault(table, {})[key] = value
        else:
            nested[name] = value
    return nested


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flattens Kafka's names, whose dots TOML nests and the environment cannot have."""
    flat: list[tuple[str, str]] = []
    for key, value in settings.items():
        name = prefix + (key if _UNDERSCORED.fullmatch(key) else key.replace("_", "."))
        if isinstance(value, Mapping):
            flat += _flat(value, f"{name}.")
        else:
            flat.append((name, str(value).lower() if isinstance(value, bool) else str(value)))
    return flat


def _worded(error: ValidationError, place_of: Callable[[str], str]) -> list[str]:
    """Words pydantic's errors, one a line: the setting, the fault, and its source."""
    lines = []
    for detail in error.errors(include_url=False, include_input=False, include_context=False):
        names = [str(part) for part in detail["loc"]]
        text = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            known = [field.name for field in fields(Config)]
            text = f"there is no such setting{did_you_mean(names[0], known)}"
        elif detail["type"] == "missing":
            text = "must be set"
        place = place_of(names[0]) if names else ""
        lines.append(f"{'.'.join(names)}: {text}{place and f' ({place})'}")
    return lines
