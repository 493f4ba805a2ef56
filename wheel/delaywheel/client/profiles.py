"""Which nodes are asked, by which TLS files, and who is told: by a profile, or the environment.

What the program, or the command line, gives wins over the profile that it names, or that
`DELAYWHEEL_PROFILE` names; the profile over the variables; these over `DEFAULT_ADDRESS` and plain
text.

A profile is a table of `~/.config/delaywheel/profiles.toml`; paths in it are relative to the folder
of that file. Clients and the command line read both alike.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:  # the command line reads profiles without gRPC
    from delaywheel.client.exchange.channel import Tls
    from delaywheel.trace.reports import EventReports

PROFILE_VARIABLE: Final = "DELAYWHEEL_PROFILE"
DEFAULT_ADDRESS: Final = "127.0.0.1:7420"
VARIABLES: Final = {
    "server": "DELAYWHEEL_SERVER",
    "tls": "DELAYWHEEL_CLIENT_TLS",
    "tls_ca": "DELAYWHEEL_CLIENT_CA",
    "tls_cert": "DELAYWHEEL_CLIENT_CERT",
    "tls_key": "DELAYWHEEL_CLIENT_KEY",
    "token_file": "DELAYWHEEL_CLIENT_TOKEN_FILE",
}
"""What a profile may have, with the variable that counts where it does not."""

TRACE_TABLE: Final = "trace"
"""What a profile may have besides: the arguments of `delaywheel.trace.Trace`."""

_ON: Final = frozenset({"1", "true", "yes", "on"})
_OFF: Final = frozenset({"", "0", "false", "no", "off"})
_FILES: Final = {"tls_ca": "ca", "tls_cert": "cert", "tls_key": "key", "token_file": "token"}


class ProfileInvalidError(ValueError):
    """A profile is not there, or not in order; or a variable is not that stands in for it."""


class ServiceAddress(NamedTuple):
    """Which nodes to ask, as HOST:PORT with commas between, and arguments of `Tls` and `Trace`.

    None: plain text, and no trace.
    """

    addresses: str
    tls_files: Mapping[str, str | None] | None
    trace: Mapping[str, Any] | None = None

    def tls(self) -> Tls | None:
        """Returns the files; raises ValueError if one is missing, invalid, or fits no other."""
        from delaywheel.client.exchange.channel import Tls  # noqa: PLC0415 - it imports gRPC

        return None if self.tls_files is None else Tls(**self.tls_files)

    def traced(self) -> EventReports | None:
        """Makes the trace; raises ProfileInvalidError if its table is not in order."""
        if self.trace is None:
            return None
        from delaywheel.trace import Trace  # noqa: PLC0415 - only if a profile has one

        try:
            return Trace(**self.trace)
        except (TypeError, ValueError) as error:
            raise ProfileInvalidError(f"the trace of the profile: {error}") from error


def service_address(
    given: Mapping[str, Any] | None = None, profile: str | None = None
) -> ServiceAddress:
    """Returns which nodes to ask; raises ProfileInvalidError if something there is not in order.

    `given` is by the names in `VARIABLES`. Without a `profile`, `DELAYWHEEL_PROFILE` may name one.
    """
    given = given or {}
    profile = profile or os.environ.get(PROFILE_VARIABLE)
    read = _profile(profile) if profile else {}

    def wanted(name: str) -> Any:
        value = given.get(name)
        if value is None:
            value = read.get(name)
        return os.environ.get(VARIABLES[name]) if value is None else value

    files = {argument: wanted(name) or None for name, argument in _FILES.items()}
    speaks_tls = _is_on(wanted("tls")) or any(files.values())
    tls_files = files if speaks_tls else None
    return ServiceAddress(wanted("server") or DEFAULT_ADDRESS, tls_files, read.get(TRACE_TABLE))


def reached(
    addresses: str | Sequence[str] | None,
    tls: Tls | None,
    profile: str | None,
    trace: EventReports | None = None,
) -> tuple[str | Sequence[str], Tls | None, EventReports | None]:
    """Returns addresses, files and trace of a client, whose program need not give all of them.

    A program that gives addresses and names no profile means just these: no variable changes
    whether its client speaks TLS. Raises ValueError if the profile, or a file, is not in order.
    """
    if addresses is not None and profile is None:
        return addresses, tls, trace
    found = service_address(profile=profile)
    addresses = found.addresses if addresses is None else addresses
    return addresses, tls or found.tls(), trace or found.traced()


def _is_on(value: bool | str | None) -> bool:
    """Returns whether TLS is wanted; a variable's word that is neither might mean it."""
    word = "" if value is None else str(value).lower()
    if word not in _ON | _OFF:
        raise ProfileInvalidError(f"{VARIABLES['tls']}={value}: write 1 or 0")
    return word in _ON


def _profile(name: str) -> Mapping[str, Any]:
    path = _file()
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & stat.S_IRWXO:
                raise ProfileInvalidError(f"{path}: everybody may read it: chmod o= {path}")
            profiles = tomllib.load(file)
    except OSError as error:
        raise ProfileInvalidError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileInvalidError(f"{path}: {error}") from error
    profile = profiles.get(name)
    if not isinstance(profile, dict):
        names = ", ".join(profiles) or "none"
        raise ProfileInvalidError(f"{path} has no table [{name}]; it has {names}")
    if unknown := profile.keys() - {*VARIABLES, TRACE_TABLE}:
        wrong = ", ".join(sorted(unknown))
        raise ProfileInvalidError(f"{path}: [{name}] has {wrong}, which is no option")
    return {name: _checked(name, value, path) for name, value in profile.items()}


def _checked(name: str, value: object, path: Path) -> Any:
    if name == TRACE_TABLE:
        return _trace_of(value, path)
    if name == "tls" and isinstance(value, bool):
        return value
    if name == "server" and isinstance(value, list):
        value = ",".join(map(str, value))
    if name == "server" and not value:
        raise ProfileInvalidError(f"{path}: server names no address: leave it out, or give one")
    if name == "tls" or not isinstance(value, str):
        wanted = "true or false" if name == "tls" else "a text in quotation marks"
        raise ProfileInvalidError(f"{path}: {name} = {value!r}: write {wanted}")
    if name not in _FILES or not value:
        return value
    try:
        return str(path.parent / Path(value).expanduser())
    except RuntimeError as error:  # the home of somebody who is not there
        raise ProfileInvalidError(f"{path}: {name} = {value!r}: {error}") from error


def _trace_of(table: object, path: Path) -> dict[str, Any]:
    """Returns the arguments of a trace; a secret is bytes, and TOML has text."""
    if not isinstance(table, dict):
        raise ProfileInvalidError(f"{path}: trace is a table: [NAME.trace], [NAME.trace.kafka]")
    secret = table.get("secret")
    return table | {"secret": secret.encode()} if isinstance(secret, str) else table


def _file() -> Path:
    home = Path(os.environ.get("HOME", "/"))
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return folder / "delaywheel" / "profiles.toml"
