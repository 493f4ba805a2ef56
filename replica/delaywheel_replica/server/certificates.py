"""The certificate that this node shows to callers, and whose it accepts of them.

The files are looked at again at each new connection of a caller, at most once a second. New ones
are taken if they are in order; otherwise the earlier ones stay, as somebody may be writing them:

| the files on the disk | at the start | later |
|---|---|---|
| in order | taken | taken; one INFO line |
| not in order (see `Certificates.read`) | refused, exit code 78 | the earlier stay; one WARNING |

Refused ones are tried again each second, as one that is not valid yet will be, by this clock.

Connections that are open keep what they began with, up to an hour (`MAX_CONNECTION_AGE_MS`): what
was revoked since then ends with them. gRPC has no other hook: its fetcher runs at each handshake.
"""

from __future__ import annotations

import os
import ssl
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final, Self

import grpc

from delaywheel.client.exchange.channel import WatchedFiles
from delaywheel_replica.config import Config
from delaywheel_replica.peers.encryption import is_named
from delaywheel_replica.peers.sockets import host_of
from delaywheel_replica.process.logs import get_logger
from delaywheel_replica.process.open_files import is_open, open_to_all

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

MAX_CONNECTION_AGE_MS: Final = 3_600_000
_LEAST_RSA_BITS: Final = 2_048
_log: Final = get_logger(__name__)


class CertificateError(Exception):
    """A file is not in order. The text begins with the setting's name."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The content of the files, checked; as PEM.

    Attributes:
        chain: The node's certificate, and what it was signed with.
        client_ca: Certificates of those who may have signed a caller's; None: callers need none.
        node_ca: The same for other nodes' certificates; None: gRPC's list of public ones.
        not_after_s: When the first of the node's own chain expires, Unix seconds.
    """

    chain: bytes
    key: bytes
    client_ca: bytes | None
    node_ca: bytes | None
    not_after_s: float

    @classmethod
    def read(cls, config: Config, now_s: float) -> Self:
        """Reads the files that the settings name; a CertificateError says what is wrong."""
        # Only here: a node without TLS starts sooner without it.
        from cryptography import x509  # noqa: PLC0415
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415

        try:
            return cls._read(config, now_s)
        except (UnsupportedAlgorithm, x509.DuplicateExtension, ValueError) as error:
            raise CertificateError(f"tls_cert {config.tls_cert}: {error}") from error

    @classmethod
    def _read(cls, config: Config, now_s: float) -> Self:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - as above

        assert config.tls_cert is not None
        assert config.tls_key is not None
        chain, certificates = _certificates("tls_cert", config.tls_cert)
        key = _content("tls_key", config.tls_key, is_secret=True)
        try:
            private = serialization.load_pem_private_key(key, None)
        except (ValueError, TypeError) as error:  # TypeError: it is encrypted
            text = f"tls_key {config.tls_key}: no private key in PEM form without a password"
            raise CertificateError(text) from error
        form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        if private.public_key().public_bytes(*form) != certificates[0].public_key().public_bytes(
            *form
        ):
            raise CertificateError(
                f"tls_key {config.tls_key}: not the key of the certificate in {config.tls_cert}"
            )
        _check_kind(config.tls_cert, certificates[0])
        _check_peers(config, certificates[0])
        until_s = min(each.not_valid_after_utc.timestamp() for each in certificates)
        if now_s >= until_s:
            raise CertificateError(f"tls_cert {config.tls_cert}: expired {_day(until_s)}")
        from_s = certificates[0].not_valid_before_utc.timestamp()
        if now_s < from_s:
            raise CertificateError(f"tls_cert {config.tls_cert}: not valid before {_day(from_s)}")
        client_ca = node_ca = None
        if config.tls_client_ca is not None:
            client_ca = node_ca = _certificates("tls_client_ca", config.tls_client_ca)[0]
        if config.tls_ca is not None:
            node_ca = _certificates("tls_ca", config.tls_ca)[0]
        read = cls(chain, key, client_ca, node_ca, until_s)
        try:
            _made_context(read, _Role.HTTP if node_ca is None else _Role.DIALLED)
        except ssl.SSLError as error:
            text = f"tls_cert {config.tls_cert}: OpenSSL does not take it: {error.reason or error}"
            raise CertificateError(text) from error
        return read

    @property
    def shown(self) -> grpc.ServerCertificateConfiguration:
        """What gRPC's server shows and asks for."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.client_ca)


class _Role(Enum):
    """On which side of a connection the node's certificate is shown by Python's own TLS."""

    DIALLED = auto()
    DIALS = auto()
    HTTP = auto()


class NodeCertificates:
    """This node's certificates as its files have them now. Thread-safe."""

    def __init__(self, config: Config) -> None:
        """Reads the files; a CertificateError says what is wrong."""
        self._config: Final = config
        self._lock: Final = Lock()
        files = (config.tls_cert, config.tls_key, config.tls_client_ca, config.tls_ca)
        self._files: Final = WatchedFiles(files)
        self._current = Certificates.read(config, time.time())
        self._contexts: dict[_Role, tuple[Certificates, ssl.SSLContext]] = {}
        self.refused: str | None = None
        """Why the files on the disk are not taken; None: they are."""

    @property
    def current(self) -> Certificates:
        """The last ones in order; looks at the files first."""
        with self._lock:
            if self._files.have_changed():
                self._take()
            return self._current

    def server_credentials(self, *, asks: bool = True) -> grpc.ServerCredentials:
        """Returns what a port listens with.

        Callers must show a certificate there if it asks, and if `tls_client_ca` is set.
        """
        served = self.current

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC's thread before each handshake; None: they are as before."""
            nonlocal served
            current = self.current
            if current is served:
                return None
            served = current
            return current.shown

        return grpc.dynamic_ssl_server_credentials(
            served.shown,
            renewed,  # type: ignore[arg-type]  # its stubs forget that None means "as before"
            require_client_authentication=asks and served.client_ca is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns what this node calls another with: it shows the same certificate."""
        current = self.current
        return grpc.ssl_channel_credentials(current.node_ca, current.key, current.chain)

    def peer_context(self, is_dialled: bool) -> ssl.SSLContext:
        """Returns what this node needs for a TLS connection with another one, either way."""
        return self._context(_Role.DIALLED if is_dialled else _Role.DIALS)

    def http_context(self) -> ssl.SSLContext:
        """Returns what the HTTP port needs for a handshake now."""
        return self._context(_Role.HTTP)

    def _context(self, role: _Role) -> ssl.SSLContext:
        current = self.current
        known, context = self._contexts.get(role, (None, None))
        if context is None or known is not current:
            context = _made_context(current, role)
            self._contexts[role] = current, context
        return context

    def _take(self) -> None:
        try:
            self._current = Certificates.read(self._config, time.time())
        except CertificateError as error:
            self._files.read_again()
            if self.refused != str(error):
                self.refused = str(error)
                _log.warning("certificates refused", cause=self.refused, stay="the earlier ones")
        else:
            self.refused = None
            _log.info("certificates renewed", expire=_day(self._current.not_after_s))


def _made_context(certificates: Certificates, role: _Role) -> ssl.SSLContext:
    dials = role is _Role.DIALS
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if dials else ssl.PROTOCOL_TLS_SERVER)
    # It takes files alone, and those on the disk may be others by now, which were refused.
    with os.fdopen(os.memfd_create("certificate"), "wb") as file:
        file.write(certificates.key + b"\n" + certificates.chain)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    if not dials:
        # Each connection begins with a handshake, in which certificates are looked at. (And of
        # peers, the side that dialled takes anything that comes for the end.)
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    if role is _Role.HTTP:
        return context
    assert certificates.node_ca is not None
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever is named is trusted, as in gRPC
    # It takes ASCII alone, and comments between certificates may be anything.
    context.load_verify_locations(cadata=certificates.node_ca.decode("ascii", "ignore"))
    return context


def _check_kind(path: Path, certificate: Certificate) -> None:
    """Refuses keys with which no gRPC client connects, or that OpenSSL thinks too small."""
    from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: PLC0415 - as above

    match certificate.public_key():
        case ec.EllipticCurvePublicKey() as key:
            is_taken, kind = isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1), key.curve.name
        case rsa.RSAPublicKey() as key:
            is_taken, kind = key.key_size >= _LEAST_RSA_BITS, f"RSA with {key.key_size} bits"
        case other:
            is_taken, kind = False, type(other).__name__.removesuffix("PublicKey")
    if not is_taken:
        raise CertificateError(
            f"tls_cert {path}: its key is {kind}, which gRPC does not take: make one of P-256,"
            f" P-384, or RSA with {_LEAST_RSA_BITS:,} bits"
        )


def _check_peers(config: Config, certificate: Certificate) -> None:
    """Refuses what no other node would accept: not for this host, or not for both ends."""
    from cryptography import x509  # noqa: PLC0415 - as above
    from cryptography.x509.oid import ExtendedKeyUsageOID as Usage  # noqa: PLC0415

    address = config.members.get(config.node_id)
    if config.peer_tls == "off" or len(config.members) == 1 or address is None:
        return
    extensions, host = certificate.extensions, host_of(address)
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    found = [
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    ]
    if not any(is_named(host, name) for name in found):
        said = ", ".join(found) or "no host"
        raise CertificateError(
            f"tls_cert {config.tls_cert}: it names {said}, and members has {host} for this node:"
            " no other node would accept it"
        )
    try:
        usages = set(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return
    needed = {Usage.SERVER_AUTH: "serverAuth", Usage.CLIENT_AUTH: "clientAuth"}
    lacks = [name for usage, name in needed.items() if usage not in usages]
    if lacks and Usage.ANY_EXTENDED_KEY_USAGE not in usages:
        raise CertificateError(
            f"tls_cert {config.tls_cert}: it lacks the use {' and '.join(lacks)}, and nodes show it"
            " at both ends of their connections"
        )


def _certificates(name: str, path: Path) -> tuple[bytes, list[Certificate]]:
    from cryptography import x509  # noqa: PLC0415 - as above

    content = _content(name, path)
    try:
        return content, x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise CertificateError(f"{name} {path}: no certificate in PEM form") from error


def _content(name: str, path: Path, *, is_secret: bool = False) -> bytes:
    try:
        with path.open("rb") as file:
            if is_secret and is_open(file.fileno()):
                raise CertificateError(f"{name} {path}: {open_to_all(path)}")
            return file.read()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CertificateError(f"{name} {path}: {reason}") from error


def _day(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_s))
