"""Tries the files of grants, tokens and TLS, for checks of settings.

Each node begins with these checks. Without such files nothing of what reads them is loaded: gRPC
alone would be a quarter of what it takes to read the settings.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from delaywheel_replica.config import Config
from delaywheel_replica.config_faults import Fault, is_loopback
from delaywheel_replica.server.access.grants import Grants
from delaywheel_replica.server.access.tokens import parse_tokens


def access_faults(config: Config) -> Iterator[Fault]:
    """Returns what is wrong with the files, and with the settings that name them."""
    parsers: tuple[tuple[str, Path | None, Callable[[bytes], object]], ...] = (
        ("grants", config.grants, Grants.parse),
        ("tokens", config.tokens, parse_tokens),
    )
    for name, path, parse in parsers:
        if path is None:
            continue
        from delaywheel_replica.server.access.files import (  # noqa: PLC0415
            AccessFileError,
            read_file,
        )

        try:
            read_file(name, path, parse)
        except AccessFileError as error:
            yield Fault(str(error), (name,))
    if config.tokens is not None and config.grants is None:
        yield Fault("tokens: has no meaning without grants", ("tokens", "grants"))
    if config.token_listen is not None:
        for name in ("tls_cert", "tokens"):
            if getattr(config, name) is None:
                yield Fault(f"token_listen: needs {name}", ("token_listen", name))
        if config.token_listen.endswith(":0"):
            yield Fault("token_listen: name a port, not 0", ("token_listen",))
    if not config.insecure:
        yield from map(_exposed, exposed_ports(config))


def certificate_faults(config: Config) -> Iterator[Fault]:
    """Returns what is wrong with the files and with the settings that name them."""
    names = ("tls_cert", "tls_key", "tls_client_ca", "tls_ca")
    if (config.tls_cert is None) != (config.tls_key is None):
        yield Fault("tls_cert, tls_key: give both, or neither", names)
    elif config.tls_cert is None:
        for name in names[2:]:
            if getattr(config, name) is not None:
                yield Fault(f"{name}: has no meaning without tls_cert and tls_key", names)
    else:
        from delaywheel_replica.server.certificates import (  # noqa: PLC0415
            CertificateError,
            Certificates,
        )

        try:
            Certificates.read(config, time.time())
        except CertificateError as error:
            yield Fault(str(error), names)
    if config.metrics_tls and config.tls_cert is None:
        yield Fault("metrics_tls: needs tls_cert", ("metrics_tls", *names))
    if config.peer_tls != "off":
        for name, given in (
            ("tls_cert", config.tls_cert),
            ("tls_ca or tls_client_ca", config.tls_ca or config.tls_client_ca),
        ):
            if given is None:
                yield Fault(f"peer_tls {config.peer_tls}: needs {name}", ("peer_tls", *names))


class ExposedPort(NamedTuple):
    """A port that other machines may reach, and that lacks something."""

    setting: str
    address: str
    lacks: tuple[str, ...]
    allows: str


def _exposed(port: ExposedPort) -> Fault:
    return Fault(
        f"{port.setting} {port.address}: without {' and '.join(port.lacks)} whoever reaches this"
        f" address may {port.allows}: see docs/SECURITY.md, or set insecure = true, or listen on"
        " 127.0.0.1",
        (port.setting, *port.lacks, "insecure"),
    )


def exposed_ports(config: Config) -> Iterator[ExposedPort]:
    """Returns the ports for callers and for peers, if they are exposed."""
    lacks = tuple(name for name in ("tls_cert", "grants") if getattr(config, name) is None)
    if lacks and not is_loopback(config.listen):
        yield ExposedPort("listen", config.listen, lacks, "do everything")
    if len(config.members) > 1 and config.peer_tls != "required":
        setting = "members" if config.peer_listen is None else "peer_listen"
        address = config.listens_for_peers
        if not is_loopback(address):
            needed = ('peer_tls = "required"',)
            yield ExposedPort(setting, address, needed, "pretend to be a node")
