"""Which nodes a command asks, and by which TLS files: options, a profile, the environment.

| first | then | then |
|---|---|---|
| the option | the profile that `--profile` or `DELAYWHEEL_PROFILE` names | the variable |

A profile is a table of `~/.config/delaywheel/profiles.toml` with `server`, `tls`, `tls_ca`,
`tls_cert`, `tls_key`.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.parsing import ArgumentGroup, Parser

if TYPE_CHECKING:
    from delaywheel.client.exchange.channel import Tls

SERVER_VARIABLE: Final = "DELAYWHEEL_SERVER"
PROFILE_VARIABLE: Final = "DELAYWHEEL_PROFILE"
DEFAULT_SERVER: Final = "127.0.0.1:7420"
_FILES: Final = ("ca", "cert", "key")


class Nodes(NamedTuple):
    """The nodes that a command asks.

    Attributes:
        addresses: HOST:PORT, separated by commas.
        tls: The files for TLS; None: plain text.
    """

    addresses: str
    tls: Tls | None = None


def asked_server() -> str:
    """Returns the nodes to ask where the command line names none."""
    name = os.environ.get(PROFILE_VARIABLE)
    server: str = (_profile(name) if name else {}).get("server", "")
    return server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER


def add_options(parser: Parser, group: ArgumentGroup) -> None:
    """Adds the options; the command gets one argument, `server`: `Nodes`."""
    parser.argument(
        "--server",
        group=group,
        metavar="ADDRESS",
        help="nodes, HOST:PORT separated by commas; the first that answers counts "
        f"(else {SERVER_VARIABLE}, else {DEFAULT_SERVER})",
    )
    parser.argument(
        "--profile",
        group=group,
        metavar="NAME",
        help="a table of ~/.config/delaywheel/profiles.toml with these options "
        f"(else {PROFILE_VARIABLE})",
    )
    parser.argument(
        "--tls",
        group=group,
        action="store_true",
        default=None,
        help="speak TLS with nodes whose certificates a public authority has signed",
    )
    for name, what in (
        ("ca", "speak TLS with nodes whose certificates these have signed"),
        ("cert", "this user's certificate, for nodes that want one"),
        ("key", "its private key, which only the user and the group may read"),
    ):
        parser.argument(
            f"--tls-{name}",
            group=group,
            metavar="FILE",
            help=f"{what} (else {_variable(name)})",
        )
    parser.argument(
        "--token-file",
        group=group,
        metavar="FILE",
        help="this user's bearer token, which only the user and the group may read "
        f"(else {_variable('token_file')})",
    )
    uses = ("profile", "tls", "token_file", *(f"tls_{name}" for name in _FILES))
    parser.after(_combine, uses=uses)


def _combine(named: dict[str, Any]) -> None:
    name = named.pop("profile") or os.environ.get(PROFILE_VARIABLE)
    profile = _profile(name) if name else {}

    def wanted(option: str, variable: str) -> Any:
        value = named.pop(option)
        if value is None:
            value = profile.get(option)
        return os.environ.get(variable) if value is None else value

    addresses = wanted("server", SERVER_VARIABLE) or DEFAULT_SERVER
    speaks_tls = wanted("tls", _variable("tls")) in {True, "1", "true"}
    files = {name: wanted(f"tls_{name}", _variable(name)) or None for name in _FILES}
    files["token"] = wanted("token_file", _variable("token_file")) or None
    named["server"] = Nodes(addresses, _tls(files) if speaks_tls or any(files.values()) else None)


def _tls(files: Mapping[str, str | None]) -> Tls:
    # Only here: it imports gRPC.
    from delaywheel.client.exchange.channel import Tls  # noqa: PLC0415

    try:
        return Tls(**files)
    except ValueError as error:
        raise CommandFailure("TLS_INVALID", str(error), ExitCode.USAGE) from error


def _profile(name: str) -> Mapping[str, Any]:
    path = _file()
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & stat.S_IRWXO:
                raise _invalid(f"{path}: everybody may read it: chmod o= {path}")
            profiles = tomllib.load(file)
    except OSError as error:
        raise _invalid(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise _invalid(f"{path}: {error}") from error
    profile = profiles.get(name)
    if not isinstance(profile, dict):
        raise _invalid(f"{path} has no table [{name}]; it has {', '.join(profiles) or 'none'}")
    known = {"server", "tls", "token_file", *(f"tls_{each}" for each in _FILES)}
    if unknown := profile.keys() - known:
        raise _invalid(f"{path}: [{name}] has {', '.join(sorted(unknown))}, which is no option")
    return profile


def _invalid(text: str) -> CommandFailure:
    return CommandFailure("PROFILE_INVALID", text, ExitCode.USAGE)


def _file() -> Path:
    home = Path(os.environ.get("HOME", "/"))
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return folder / "delaywheel" / "profiles.toml"


def _variable(name: str) -> str:
    return f"DELAYWHEEL_CLIENT_{name.upper()}"
