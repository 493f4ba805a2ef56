"""Tries the files of grants and tokens, for checks of settings."""

from collections.abc import Callable, Iterator
from pathlib import Path

from delaywheel_replica.config import Config
from delaywheel_replica.config_faults import Fault
from delaywheel_replica.server.access.files import AccessFileError, read_file
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
    missing = exposed_without(config)
    if missing and not config.insecure:
        yield Fault(
            f"listen {config.listen}: without {missing} whoever reaches this address may do"
            " everything: see docs/SECURITY.md, or set insecure = true, or listen on 127.0.0.1",
            ("listen", "tls_cert", "grants", "insecure"),
        )


def exposed_without(config: Config) -> str:
    """Returns what a port that other machines may reach lacks; empty: nothing, or none does."""
    host = config.listen.rpartition(":")[0].strip("[]")
    if host in {"localhost", "::1"} or host.startswith("127."):
        return ""
    lacks = [name for name in ("tls_cert", "grants") if getattr(config, name) is None]
    return " and ".join(lacks)
