"""What the page is started with."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from delaywheel.client.exchange.channel import Tls


@dataclass(frozen=True, slots=True)
class PageSettings:
    """The settings: where to listen (port 0: any free one), and folders of the trace's index.

    Attributes:
        nodes: The nodes' addresses, in the order in which they are asked.
        nodes_tls: The files for TLS to them, without a token; None: plain text.
        hosts: Other names by which browsers reach the page, HOST or HOST:PORT.
        certificate: The files of certificate and key that browsers are shown; None: plain text.
        read_only: Nothing can be changed through the page.
        config: A node's settings, by which Kafka is reached; None: as a node says, in plain text.
        insecure: It may be reached from other machines without TLS, or without grants of nodes.
    """

    listen: str
    nodes: tuple[str, ...]
    nodes_tls: Tls | None = None
    hosts: tuple[str, ...] = ()
    certificate: tuple[Path, Path] | None = None
    read_only: bool = False
    config: Path | None = None
    indexes: tuple[str, ...] = ()
    insecure: bool = False

    @property
    def host(self) -> str:
        """The address listened at, without brackets."""
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def is_local(self) -> bool:
        """Whether this machine alone reaches the page."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False

    def hosts_at(self, port: int) -> frozenset[str]:
        """Returns what a browser may send as `Host`."""
        own = {"localhost", "127.0.0.1", "[::1]", self.listen.rpartition(":")[0], *self.hosts}
        usual = 80 if self.certificate is None else 443
        named = {h if h.rpartition(":")[2].isdecimal() else f"{h}:{port}" for h in own}
        return frozenset(named | ({host for host in own if port == usual}))
