"""Reads settings from flags, the environment and a TOML file; merges and checks them.

Flags win over the environment (``DELAYWHEEL_*``, nested ``__``), the environment over the TOML
file; a table is joined name by name. Each value is checked against the types, bounds and forms that
`Config` declares, by pydantic, and then all of them as a whole.

The ``kafka`` table goes to the Kafka clients verbatim. Its keys may be written as Kafka writes
them (``"bootstrap.servers"``), as nested TOML keys (``kafka.bootstrap.servers = …``) or with
underscores, as environment variables must be (``DELAYWHEEL_KAFKA__BOOTSTRAP_SERVERS``).

A node's processes do not import this: they inherit what was read (`Config.inherited`), and
pydantic would be a quarter of what they compute to start.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from delaywheel_replica.config import Config
from delaywheel_replica.config_faults import Fault, did_you_mean, faults

# The only names of the Kafka client that contain underscores.
_UNDERSCORED = re.compile(r"log_level|on_delivery|\w+_cb")
_PREFIX: Final = "DELAYWHEEL_"
_TYPES: Final = get_type_hints(Config, include_extras=True)
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


class ConfigError(Exception):
    """The configuration is refused; the text names every faulty setting, one a line."""


class _GivenSetting(NamedTuple):
    """The value of a setting, or some entries of a table, and where the operator gave it."""

    name: str
    value: Any
    place: str


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
    given = _merged([*_of_file(file), *_of_environment(), *_of_flags(flags or {})])
    texts = [
        f"{each.name}: there is no such setting{did_you_mean(each.name, _TYPES)} ({each.place})"
        for each in given.values()
        if each.name not in _TYPES
    ]
    read: dict[str, Any] = {}
    for field in fields(Config):
        if field.name in given:
            try:
                read[field.name] = _checked(given[field.name])
            except ConfigError as error:
                texts.append(str(error))
        elif field.default is MISSING and field.default_factory is MISSING:
            texts.append(f"{field.name}: must be set")
    # Other mistakes are reported as well: refused settings count as unset.
    wrong = (given.keys() | _STAND_INS.keys()) - read.keys()
    config = Config(**{**_STAND_INS, **read})
    if not config.members:
        config = replace(config, members={config.node_id: config.advertised or config.listen})
    for fault in (fault for check in (faults, *checks) for fault in check(config)):
        if not wrong & set(fault.names):
            places = dict.fromkeys(given[name].place for name in fault.names if name in given)
            texts.append(fault.text + (f" ({', '.join(places)})" if places else ""))
    if texts:
        raise ConfigError("\n".join(texts))
    return config


def _of_file(file: Path | None) -> Iterator[_GivenSetting]:
    if file is None:
        return
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except ValueError as error:  # its syntax, or its encoding
        raise ConfigError(f"{file}: {error}") from error
    for name, value in document.items():
        yield _GivenSetting(name, value, str(file))


def _of_environment() -> Iterator[_GivenSetting]:
    """Returns what variables give, a table's own before those of its entries.

    Those that look like settings, and are none, are returned, too; others with our prefix may be of
    another program, or of the command line.
    """
    for variable in sorted(os.environ, key=str.upper):
        if not variable.upper().startswith(_PREFIX):
            continue
        name, *keys = variable[len(_PREFIX) :].lower().split("__")
        kind, value = _TYPES.get(name), os.environ[variable]
        if kind is None:
            if name not in _OF_THE_COMMAND_LINE and did_you_mean(name, _TYPES):
                yield _GivenSetting(name, value, variable)
        elif not keys:
            yield _GivenSetting(name, _from_json(value, kind), variable)
        elif get_origin(kind) is dict:
            entry: Any = _from_json(value, get_args(kind)[1])
            for key in reversed(keys):
                entry = {key: entry}
            yield _GivenSetting(name, entry, variable)


def _from_json(text: str, kind: Any) -> Any:
    """Returns a table or list, which variables have as JSON; any other text as it is."""
    if get_origin(kind) in {dict, list}:
        with suppress(ValueError):  # then it is judged as the text that it is
            return json.loads(text)
    return text


def _of_flags(flags: Mapping[str, Any]) -> Iterator[_GivenSetting]:
    for name, value in flags.items():
        table, dot, key = name.partition(".")
        yield _GivenSetting(table, {key: value} if dot else value, "--set")


def _merged(all_given: Iterable[_GivenSetting]) -> dict[str, _GivenSetting]:
    """Joins what is given, by setting: what comes later wins."""
    merged: dict[str, _GivenSetting] = {}
    for name, value, place in all_given:
        if isinstance(value, Mapping):
            # By one spelling of each name: otherwise chance would decide which of two counts.
            entries = dict(_flat(value)) if name == "kafka" else value
            before = merged[name].value if name in merged else None
            joined = {**before, **entries} if isinstance(before, Mapping) else entries
            merged[name] = _GivenSetting(name, joined, place)
        else:
            merged[name] = _GivenSetting(name, value, place)
    return merged


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flattens Kafka's names, whose dots TOML nests and the environment cannot have."""
    for key, value in settings.items():
        name = prefix + (key if _UNDERSCORED.fullmatch(key) else key.replace("_", "."))
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, str(value).lower() if isinstance(value, bool) else str(value)


def _checked(given: _GivenSetting) -> Any:
    """Returns a value as its type has it.

    Raises:
        ConfigError: It is not one; names each fault, one a line.
    """
    kind = _TYPES[given.name]
    try:
        value = TypeAdapter(kind).validate_python(_listed(given.value, kind))
    except ValidationError as error:
        lines = []
        for detail in error.errors(include_url=False, include_input=False, include_context=False):
            name = ".".join((given.name, *map(str, detail["loc"]))).removesuffix(".[key]")
            text = detail["msg"].removeprefix("Value error, ")
            lines.append(f"{name}: {text} ({given.place})")
        raise ConfigError("\n".join(lines)) from error
    for key, entry in value.items() if isinstance(value, dict) else [("", value)]:
        # Libraries in C would silently cut it.
        if "\0" in key or (isinstance(entry, str | Path) and "\0" in str(entry)):
            name = f"{given.name}{key and f'.{key!r}'}"
            raise ConfigError(f"{name}: has the character U+0000 ({given.place})")
    return value


def _listed(value: Any, kind: Any) -> Any:
    """Splits what is to be a list and is one text with commas, as flags have it."""
    if get_origin(kind) is list and isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {key: _listed(each, get_args(kind)[1]) for key, each in value.items()}
    return value
