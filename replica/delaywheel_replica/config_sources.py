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
from delaywheel_replica.config_faults import Fault, faults
from delaywheel_replica.patterns import did_you_mean

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

_NO_SETTINGS: Final = frozenset(
    {
        *("client_ca", "client_cert", "client_key", "client_tls", "client_token_file"),
        *("cache", "traceback"),
    }
)
"""Variables that resemble settings and are none: what `delaywheel` reaches nodes with, and whether
it shows where a defect lies; the folder in which a checkout keeps what it has fetched.
"""


class ConfigError(Exception):
    """The configuration is refused; the text names every faulty setting, one a line."""


class _GivenSetting(NamedTuple):
    """What one place gives of a setting: its value, or that of the entry which `keys` lead to."""

    name: str
    keys: Sequence[str]
    value: Any
    place: str


class _MergedSetting(NamedTuple):
    """What all places together give of it; of a table all entries.

    Attributes:
        places: By entry the place that won; under None the last one that gave any of it.
    """

    value: Any
    places: dict[str | None, str]


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

    Raises:
        ConfigError: Settings are missing, unknown or refused; names all of them.
    """
    given, texts, wrong = _merged([*_of_file(file), *_of_environment(), *_of_flags(flags or {})])
    read: dict[str, Any] = {}
    for field in fields(Config):
        if field.name in given:
            try:
                read[field.name] = _checked(field.name, given[field.name])
            except ConfigError as error:
                texts.append(str(error))
                wrong.add(field.name)
        elif field.name not in wrong and field.default is field.default_factory is MISSING:
            texts.append(f"{field.name}: must be set")
            wrong.add(field.name)
    # Other mistakes are reported as well: refused settings count as unset.
    config = Config(**{**_STAND_INS, **read})
    if not config.members:
        config = replace(config, members={config.node_id: config.advertised or config.listen})
    for fault in (fault for check in (faults, *checks) for fault in check(config)):
        if not wrong & {name.partition(".")[0] for name in fault.names}:
            places = dict.fromkeys(place for name in fault.names for place in _places(given, name))
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
        yield _GivenSetting(name, (), value, str(file))


def _of_environment() -> Iterator[_GivenSetting]:
    """Returns what variables give, a table's own before those of its entries.

    Those that look like settings, and are none, are returned, too; others with our prefix may be of
    another program, or of the command line.
    """
    for variable in sorted(os.environ, key=str.upper):
        if not variable.upper().startswith(_PREFIX):
            continue
        name, *keys = variable[len(_PREFIX) :].lower().split("__")
        if name in _TYPES or (name not in _NO_SETTINGS and did_you_mean(name, _TYPES)):
            yield _GivenSetting(name, keys, os.environ[variable], variable)


def _of_flags(flags: Mapping[str, Any]) -> Iterator[_GivenSetting]:
    for name, value in flags.items():
        table, dot, key = name.partition(".")
        yield _GivenSetting(table, [key] if dot else [], value, "--set")


def _merged(
    all_given: Iterable[_GivenSetting],
) -> tuple[dict[str, _MergedSetting], list[str], set[str]]:
    """Joins what is given, by setting: what comes later wins.

    Returns the settings; the faults of what cannot be joined, and the settings that have them. What
    comes later never hides such a fault: all of a table would be gone, and one entry be left.
    """
    merged: dict[str, _MergedSetting] = {}
    faulty: dict[str, str] = {}
    for name, keys, value, place in all_given:
        kind = _TYPES.get(name)
        if kind is None:
            faulty[f"{name}: there is no such setting{did_you_mean(name, _TYPES)} ({place})"] = name
            continue
        is_table = get_origin(kind) is dict
        for key in reversed(keys):
            value = {key: value}  # noqa: PLW2901 - from the inside out
        value = _read(value, kind)  # noqa: PLW2901
        if keys and not is_table:
            faulty[f"{name}: is no table ({place})"] = name
        elif is_table and not isinstance(value, Mapping):
            faulty[f"{name}: must be a table; as text, in JSON ({place})"] = name
        elif is_table:
            # By one spelling of each name: otherwise chance would decide which of two counts.
            entries = dict(_flat(value)) if name == "kafka" else value
            before = merged.get(name, _MergedSetting({}, {}))
            places = dict.fromkeys([*entries, None], place)
            merged[name] = _MergedSetting({**before.value, **entries}, {**before.places, **places})
        else:
            merged[name] = _MergedSetting(value, {None: place})
    return merged, list(faulty), set(faulty.values())


def _places(given: Mapping[str, _MergedSetting], name: str) -> Iterable[str]:
    """Returns the places that gave any of a setting, or of one entry of it."""
    setting, _, entry = name.partition(".")
    if setting not in given:
        return ()
    places = given[setting].places
    return [places.get(entry, places[None])] if entry else places.values()


def _read(value: Any, kind: Any) -> Any:
    """Returns the table or list that a text stands for; what stands for none stays as it is.

    Flags and variables have them in JSON; lists also with commas. An empty text is no list: rather
    a variable that somebody forgot to set.
    """
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {key: _read(each, get_args(kind)[1]) for key, each in value.items()}
    if get_origin(kind) not in {dict, list} or not isinstance(value, str):
        return value
    if value.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return _read(json.loads(value), kind)
    elif get_origin(kind) is list:
        return [name.strip() for name in value.split(",") if name.strip()] or value
    return value


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flattens Kafka's names, whose dots TOML nests and the environment cannot have."""
    for key, value in settings.items():
        name = prefix + (key if _UNDERSCORED.fullmatch(key) else key.replace("_", "."))
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, bool):
            yield name, str(value).lower()
        else:  # a list, or null, is refused as what it is
            yield name, str(value) if isinstance(value, int | float) else value


def _checked(setting: str, given: _MergedSetting) -> Any:
    """Returns a value as its type has it, or names each fault, one a line."""
    last = given.places[None]
    try:
        value = TypeAdapter(_TYPES[setting]).validate_python(given.value)
    except ValidationError as error:
        lines = []
        for detail in error.errors(include_url=False, include_input=False, include_context=False):
            name = ".".join((setting, *map(str, detail["loc"]))).removesuffix(".[key]")
            place = given.places.get(str(detail["loc"][0]), last) if detail["loc"] else last
            text = detail["msg"].removeprefix("Value error, ")
            lines.append(f"{name}: {text} ({place})")
        raise ConfigError("\n".join(lines)) from error
    for key, entry in value.items() if isinstance(value, dict) else [("", value)]:
        # Libraries in C would silently cut it.
        if "\0" in key or (isinstance(entry, str | Path) and "\0" in str(entry)):
            name = f"{setting}{key and f'.{key!r}'}"
            raise ConfigError(f"{name}: has the character U+0000 ({given.places.get(key, last)})")
    return value
