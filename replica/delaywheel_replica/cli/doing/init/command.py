"""`delaywheel init`: writes what the nodes of a cluster start with.

All of it is written into a folder without a name of its own, read there as a node would read it,
and then given the name that was asked for: whatever goes wrong, nothing is there.
"""

from __future__ import annotations

import errno
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

from delaywheel.identity import NameInvalidError, check_name
from delaywheel.storage.folder.disk import PosixDisk
from delaywheel_replica.cli.doing.checking.items import CheckLevel
from delaywheel_replica.cli.doing.checking.kafka import kafka_items
from delaywheel_replica.cli.doing.init.files import (
    CALLER,
    PRIVATE,
    SIGN_IN,
    closing,
    development_files,
    settings_files,
)
from delaywheel_replica.cli.doing.loading import load
from delaywheel_replica.cli.failures import CommandFailure
from delaywheel_replica.cli.parsing import usage
from delaywheel_replica.cli.printing.text import note, say
from delaywheel_replica.config import Config

_COUNTS: Final = (1, 3, 5)
_DEVELOPMENT: Final = timedelta(days=30)
# Not of digits alone at its end: that is an address, or none.
_HOST: Final = re.compile(
    r"(?=.{1,253}\Z)(?!(.*\.)?\d+\Z)\w([\w-]{0,61}\w)?(\.\w([\w-]{0,61}\w)?)*", re.ASCII
)
_OCCUPIED: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


def init(
    *, kafka: str, cluster: str, nodes: str, systemd: bool, dev_certs: bool, out: Path
) -> None:
    """Writes a folder for each node, and looks whether Kafka is there.

    If what was given is no cluster, or something is there already, nothing is written.
    """
    if dev_certs and systemd:
        raise usage(
            "--dev-certs with --systemd: certificates for development are read where they are"
            " written, and by who wrote them; a unit's node is another user"
        )
    hosts = _hosts(cluster, nodes)
    if dev_certs and CALLER in hosts.values():
        raise usage(
            f"--nodes {nodes}: {CALLER} is the name of the caller whom --dev-certs lets in, and"
            " would be a node's as well: give that node another host"
        )
    at, ends = out.absolute(), datetime.now(UTC) + _DEVELOPMENT
    files = settings_files(kafka, cluster, hosts, systemd=systemd, closed=at if dev_certs else None)
    if dev_certs:
        files |= development_files(cluster, hosts, at, ends)
    config = _write(files, hosts, out, closed=dev_certs)
    for name in sorted(files):
        say(str(out / name))
    if dev_certs:
        say(
            f"for development only, until {ends:%Y-%m-%d %H:%M} UTC: nodes let in whoever has one"
            " of these keys, and nobody else, for that of the authority is kept nowhere"
        )
        say("next: how nodes start with it, and who calls them, is in docs/SECURITY.md")
        say(f"page: delaywheel web --profile {cluster}, and the token in {out / SIGN_IN}")
    else:
        say("next: what of it goes where on each machine is in docs/INSTALL.md")
    for item in kafka_items(config, ()):
        if item.level is not CheckLevel.OK:
            note(f"warning: {item.what}: {item.text}: {item.advice}")


def _write(files: Mapping[str, str], hosts: Iterable[str], out: Path, *, closed: bool) -> Config:
    """Writes all files, or none; returns the settings of one of the nodes."""
    disk = PosixDisk()
    if disk.exists(out) and out.samefile("."):  # whose shell is in it would be nowhere
        raise _in_use(out)
    try:
        beside = next(folder for folder in out.absolute().parents if disk.exists(folder))
        with (
            _ended_by_sigterm(),
            tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=beside) as scratch,
        ):
            made = Path(scratch) / "made"
            made.mkdir(0o700 if closed else 0o777)
            for name, text in files.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).touch(0o600 if name.endswith(PRIVATE) else 0o666)
                (made / name).write_text(text, encoding="utf-8")
            for node in hosts:
                there = closing(made / node) if closed else ()
                config = load(made / node / "node.toml", there)
            out.parent.mkdir(parents=True, exist_ok=True)
            made.rename(out)
    except CommandFailure as failure:
        failure.args = (str(failure).replace(str(made), str(out)),)
        raise
    except OSError as error:
        if error.errno in _OCCUPIED:  # nothing takes the place of a file, or of a full folder
            text = f"{out} is no empty folder: name one, or a new one"
            raise CommandFailure("FILES_EXIST", text) from error
        if error.errno == errno.EBUSY:  # where something is mounted, say
            raise _in_use(out) from error
        raise CommandFailure("NOT_WRITTEN", f"{out}: {error.strerror or error}") from error
    return config


def _in_use(out: Path) -> CommandFailure:
    text = f"{out} is in use, and is not replaced: name a new folder, such as {out / 'new'}"
    return CommandFailure("NOT_WRITTEN", text)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Meanwhile SIGTERM is raised as an exception: the folder that is half-written is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _hosts(cluster: str, nodes: str) -> dict[str, str]:
    """Returns each node's host, which is its name unless another one is given."""
    pairs = [one.partition("=") for one in nodes.split(",")]
    hosts = {name: host or name for name, _, host in pairs}
    try:
        check_name(cluster, what="cluster")
        for name, host in hosts.items():
            check_name(name, what="node")
            if not _is_host(host):
                raise usage(
                    f"--nodes {nodes}: {host!r} is no name or address of a host"
                    " (of IPv6: in brackets)"
                )
    except NameInvalidError as error:
        raise usage(str(error)) from None
    if len(hosts) < len(pairs) or len({*hosts.values()}) < len(pairs):
        raise usage(
            f"--nodes {nodes}: each node needs a name and a host of its own,"
            " which on one machine may be 127.0.0.1, 127.0.0.2, …"
        )
    if len(hosts) not in _COUNTS:
        raise usage(
            f"--nodes {nodes}: a cluster has 1, 3 or 5 of them: one more bears no more failures"
        )
    return hosts


def _is_host(text: str) -> bool:
    try:
        if text[:1] + text[-1:] == "[]":
            IPv6Address(text[1:-1])
        else:
            IPv4Address(text)
    except ValueError:
        return _HOST.fullmatch(text) is not None
    return True
