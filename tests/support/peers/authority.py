"""A certificate authority of a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme


class Authority:
    """Signs certificates, and writes them to files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._authority = trustme.CA()
        self.file = folder / f"{name}.ca.pem"
        self._authority.cert_pem.write_to_path(self.file)

    def sign(self, name: str, *names: str, days: float = 30) -> tuple[Path, Path]:
        """Returns the files of a certificate for these names, and of its key."""
        until = datetime.now(UTC) + timedelta(days=days)
        since = until - timedelta(days=60)
        signed = self._authority.issue_cert(*names, not_before=since, not_after=until)
        cert, key = (self._folder / f"{self._name}.{name}.{kind}.pem" for kind in ("cert", "key"))
        cert.write_bytes(b"".join(each.bytes() for each in signed.cert_chain_pems))
        key.touch(0o600)
        key.write_bytes(signed.private_key_pem.bytes())
        return cert, key
