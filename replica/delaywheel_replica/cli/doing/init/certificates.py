"""Certificates for development. Their authority's key is kept nowhere: it signs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID as Usage
from cryptography.x509.oid import NameOID

_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "delaywheel, development only")])
_PEM = serialization.Encoding.PEM
_NO_USE = dict.fromkeys(
    (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    ),
    False,
)
_CLOCKS = timedelta(hours=1)
"""So far behind may be the clock of whoever checks a new certificate."""


def certificates(holders: Mapping[str, str], ends: datetime) -> dict[str, str]:
    """Returns the files of certificates that one new authority has signed, by path.

    `holders` has the host that each certificate names, by its folder.
    """
    authority = _new_key()
    files = {}
    is_authority = x509.BasicConstraints(ca=True, path_length=0)
    signs = x509.KeyUsage(**_NO_USE | {"key_cert_sign": True})
    ca = _certificate(_AUTHORITY, authority, is_authority, signs, signer=authority, ends=ends)
    for folder, host in holders.items():
        key = _new_key()
        shows = x509.KeyUsage(**_NO_USE | {"digital_signature": True})
        uses = x509.ExtendedKeyUsage([Usage.SERVER_AUTH, Usage.CLIENT_AUTH])
        names = x509.SubjectAlternativeName([_name(host)])
        files[f"{folder}/ca.crt"] = ca
        files[f"{folder}/tls.crt"] = _certificate(
            x509.Name([]), key, names, shows, uses, signer=authority, ends=ends
        )
        files[f"{folder}/tls.key"] = key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
    return files


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
    signer: ec.EllipticCurvePrivateKey,
    ends: datetime,
) -> str:
    by, whose = signer.public_key(), key.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_AUTHORITY)
        .public_key(whose)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - _CLOCKS)
        .not_valid_after(ends)
        # Without these Python 3.13 by default takes none, and one of another authority of this name
        # is said to be forged.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(whose), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by), critical=False)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(signer, hashes.SHA256()).public_bytes(_PEM).decode()
