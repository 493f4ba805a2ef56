"""TLS and grants for a cluster on this machine: one authority, one certificate for all programs."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from delaywheel import Tls

_REQUEST: Final = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
    *("-days", "2", "-subj", "/CN=local", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
)
_GRANTS: Final = """
[[grant]]
who = ["dns:localhost"]
may = ["produce", "half", "change", "inspect", "read", "operate"]
groups = ["*"]

[[quota]]
who = ["*"]
messages_per_second = 1_000_000_000
"""
"""A quota that nobody reaches: it costs what quotas cost."""


@dataclass(frozen=True, slots=True)
class SecureFiles:
    """The files.

    Attributes:
        cert: The certificate, which has signed itself.
        key: Its private key.
        grants: Who may do what.
    """

    cert: Path
    key: Path
    grants: Path

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Makes them; the certificate names 127.0.0.1."""
        made = cls(folder / "local.crt", folder / "local.key", folder / "grants.toml")
        files = ("-keyout", str(made.key), "-out", str(made.cert))
        subprocess.run((*_REQUEST, *files), check=True, capture_output=True)
        made.grants.touch(0o600)
        made.grants.write_text(_GRANTS)
        return made

    def tls(self) -> Tls:
        """What a client needs."""
        from delaywheel import Tls  # noqa: PLC0415 - `--help` must not need it

        return Tls(self.cert, self.cert, self.key)

    def settings(self, nodes: int) -> dict[str, Any]:
        """Settings of a node: mutual TLS on the ports of callers and peers, and grants."""
        return {
            "tls_cert": str(self.cert),
            "tls_key": str(self.key),
            "tls_client_ca": str(self.cert),
            "grants": str(self.grants),
            **({"peer_tls": "required"} if nodes > 1 else {}),
        }
