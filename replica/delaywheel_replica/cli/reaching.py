"""The options by which a command is told which nodes to ask, and by which TLS files.

What they leave open, a profile or the environment says (delaywheel/client/profiles.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from delaywheel.client.profiles import (
    DEFAULT_ADDRESS,
    PROFILE_VARIABLE,
    VARIABLES,
    ProfileInvalidError,
    ServiceAddress,
    service_address,
)
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.parsing import ArgumentGroup, Parser

if TYPE_CHECKING:
    from delaywheel.client.exchange.channel import Tls
    from delaywheel.trace.reports import EventReports

_FILES: Final = {
    "ca": "speak TLS with nodes whose certificates these have signed",
    "cert": "this user's certificate, for nodes that want one",
    "key": "its private key, which only the user and the group may read",
}


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes that a command asks: HOST:PORT, separated by commas.

    Attributes:
        tls: The files for TLS; None: plain text.
        trace: Makes the trace of the profile; a command that changes nothing needs none.
        key_secret: With which programs of the profile hash keys in their trace; None: they do not.
    """

    addresses: str
    tls: Tls | None = None
    trace: Callable[[], EventReports | None] = field(default=lambda: None, compare=False)
    key_secret: bytes | None = field(default=None, repr=False)


def add_options(parser: Parser, group: ArgumentGroup) -> None:
    """Adds the options; the command gets one argument, `server`: `Nodes`."""
    parser.argument(
        "--server",
        group=group,
        metavar="ADDRESS",
        help="nodes, HOST:PORT separated by commas; the first that answers counts "
        f"(else {VARIABLES['server']}, else {DEFAULT_ADDRESS})",
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
    for name, what in _FILES.items():
        parser.argument(
            f"--tls-{name}",
            group=group,
            metavar="FILE",
            help=f"{what} (else {VARIABLES[f'tls_{name}']})",
        )
    parser.argument(
        "--token-file",
        group=group,
        metavar="FILE",
        help="this user's bearer token, which only the user and the group may read "
        f"(else {VARIABLES['token_file']})",
    )
    uses = ("profile", "tls", "token_file", *(f"tls_{name}" for name in _FILES))
    parser.after(_combine, uses=uses)


def _combine(named: dict[str, Any]) -> None:
    profile = named.pop("profile")
    found = _address({name: named.pop(name) for name in VARIABLES}, profile)
    try:
        tls = None if found.tls_files is None else found.tls()
    except ValueError as error:
        raise CommandFailure("TLS_INVALID", str(error), ExitCode.USAGE) from error
    secret = (found.trace or {}).get("secret")
    named["server"] = Nodes(found.addresses, tls, partial(_trace, found), secret)


def _trace(found: ServiceAddress) -> EventReports | None:
    try:
        return found.traced()
    except ProfileInvalidError as error:
        raise CommandFailure("PROFILE_INVALID", str(error), ExitCode.USAGE) from error


def _address(given: dict[str, Any], profile: str | None) -> ServiceAddress:
    try:
        return service_address(given, profile)
    except ProfileInvalidError as error:
        raise CommandFailure("PROFILE_INVALID", str(error), ExitCode.USAGE) from error
