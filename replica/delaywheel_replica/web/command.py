"""`delaywheel web`: runs the operator's page until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from delaywheel.identity import parse_addresses
from delaywheel_replica.cli.failures import CommandFailure, ExitCode
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.cli.reaching import Nodes
from delaywheel_replica.web.refusals import PageRefusal
from delaywheel_replica.web.settings import PageSettings
from delaywheel_replica.web.site import PageSite

_LISTEN: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):\d{1,5}")


def web(  # noqa: PLR0913 - the arguments of the command
    *,
    listen: str,
    hosts: Sequence[str],
    page_cert: Path | None,
    page_key: Path | None,
    read_only: bool,
    insecure: bool,
    file: Path | None,
    indexes: Sequence[str],
    server: Nodes,
) -> None:
    """Prints the page's address, and serves it."""
    if (page_cert is None) != (page_key is None):
        raise usage("--page-cert and --page-key belong together: give both, or neither")
    try:
        nodes = tuple(parse_addresses(server.addresses))
    except ValueError as error:
        raise CommandFailure("ADDRESS_INVALID", str(error), ExitCode.USAGE) from error
    if _LISTEN.fullmatch(listen) is None:
        raise CommandFailure("ADDRESS_INVALID", f"--listen {listen}: HOST:PORT", ExitCode.USAGE)
    settings = PageSettings(
        listen=listen,
        nodes=nodes,
        # What a call carries is its viewer's token, and no other.
        nodes_tls=None if server.tls is None else replace(server.tls, token=None),
        hosts=tuple(host.lower() for host in hosts),
        certificate=None if page_cert is None or page_key is None else (page_cert, page_key),
        read_only=read_only,
        insecure=insecure,
        config=file,
        indexes=tuple(indexes),
    )
    if not (settings.is_local or settings.insecure) and settings.certificate is None:
        raise CommandFailure(
            "PAGE_INSECURE",
            f"other machines reach {listen}: give --page-cert and --page-key, or --insecure",
            ExitCode.WRONG_SETTINGS,
        )
    asyncio.run(_serve(settings))


async def _serve(settings: PageSettings) -> None:
    site = PageSite(settings)
    ended = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, ended.set)
    try:
        have_grants = None
        with suppress(PageRefusal):  # no node answers: each call will say so
            have_grants = await site.nodes.have_grants()
        if have_grants is False and not (settings.is_local or settings.insecure):
            raise CommandFailure(
                "PAGE_INSECURE",
                f"other machines reach {settings.listen}, and the nodes have no grants: see"
                " docs/SECURITY.md, or give --insecure",
                ExitCode.WRONG_SETTINGS,
            )
        try:
            address = await site.start()
        except (OSError, OverflowError) as error:  # ssl.SSLError is one; 70000 is no port
            raise CommandFailure(
                "PAGE_NOT_STARTED", f"{settings.listen}: {error}", ExitCode.WRONG_SETTINGS
            ) from error
        say(address if have_grants else f"{address}#secret={site.sessions.secret}")
        if have_grants:
            note("sign in with a bearer token of the nodes' tokens")
        await ended.wait()
    finally:
        await site.stop()
