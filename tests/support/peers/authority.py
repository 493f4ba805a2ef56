"""A certificate authority of a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID, NameOID

_PARTY = bytes.fromhex("3007a505a1030c0161")
"""A name of a kind that `cryptography` does not read."""


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
        chain = b"".join(each.bytes() for each in signed.cert_chain_pems)
        return self._write(name, chain, signed.private_key_pem.bytes())

    def sign_names(
        self,
        name: str,
        *,
        uri: str = "",
        dns: str = "",
        common_name: str = "",
        party: bool = False,
        use: x509.ObjectIdentifier | None = None,
    ) -> tuple[Path, Path]:
        """Returns the same of a certificate with these names, of which some may be empty.

        Args:
            name: What the files are called.
            uri: A name in it.
            dns: Another.
            common_name: Another.
            party: Whether it has an `ediPartyName` in place of the others.
            use: All that it serves for; None: anything.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes())
        issuers_key = serialization.load_pem_private_key(
            self._authority.private_key_pem.bytes(), None
        )
        assert isinstance(issuers_key, ec.EllipticCurvePrivateKey)
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)] if uri else []
        names += [x509.DNSName(dns)] if dns else []
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name(subject))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=30))
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if party:
            named = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, _PARTY)
            builder = builder.add_extension(named, critical=False)
        if use is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        signed = builder.sign(issuers_key, hashes.SHA256())
        pem = serialization.Encoding.PEM
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return self._write(name, signed.public_bytes(pem), key.private_bytes(pem, *form))

    def _write(self, name: str, chain: bytes, private_key: bytes) -> tuple[Path, Path]:
        cert, key = (self._folder / f"{self._name}.{name}.{kind}.pem" for kind in ("cert", "key"))
        cert.write_bytes(chain)
        key.touch(0o600)
        key.write_bytes(private_key)
        return cert, key
