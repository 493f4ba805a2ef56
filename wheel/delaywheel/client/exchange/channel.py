"""Opens the SDK's channels: their addresses, gRPC options and TLS.

gRPC's defaults do not suit this service: a reconnect backoff that grows to two minutes, an HTTP
proxy taken from the environment, subchannels (and their backoff) shared between clients, a limit of
4 MiB per message, and internal retries that would hide an unknown outcome.

Nor does gRPC say why a TLS connection failed: "Socket closed" stands for most causes. So a plain
handshake is tried then, and its error is told (`tls_fault`).
"""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from time import monotonic, time
from typing import Final, NamedTuple, TypeAlias

import grpc

from delaywheel.client.exchange.retry import AttemptFailure

RECONNECT_BACKOFF_MS: Final = 200
CONNECT_TIMEOUT_MS: Final = 2_000
KEEPALIVE_TIME_MS: Final = 10_000
"""Keepalive interval while calls are open; servers must permit pings this often."""
KEEPALIVE_TIMEOUT_MS: Final = 5_000

CHANNEL_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    ("grpc.max_send_message_length", -1),  # the service's own limits refuse with a reason
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MS // 4),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS),
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # how long one connect may take
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),  # the SDK retries, and knows what each attempt may have done
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)

LOOK_EVERY_S: Final = 1.0
_SETTLES_S: Final = 0.1
_EXPLAIN_EVERY_S: Final = 10.0
_EXPLAINING_S: Final = 1.0
_log: Final = logging.getLogger(__name__)

TlsFile: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Tls:
    """The files, in PEM form, for TLS to the nodes. They are read again when they change.

    Attributes:
        ca: The certificates of those who may have signed a node's; None: gRPC's list of public
            ones.
        cert: This program's own certificate and what it was signed with, for nodes that ask for
            one.
        key: Its private key, which only its owner and group may read.
        token: A file with a bearer token, which only its owner and group may read, for nodes that
            know this program by one.

    Raises:
        ValueError: A file is missing, is not what it should be, or does not fit the others.
    """

    ca: TlsFile | None = None
    cert: TlsFile | None = None
    key: TlsFile | None = None
    token: TlsFile | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls: cert and key belong together: give both, or neither")
        self.credentials()

    def context(self) -> ssl.SSLContext:
        """Returns what Python's own TLS needs to connect; checks the files with it."""
        if self.ca is None:
            context = ssl.create_default_context()
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            _loading(f"tls.ca {self.ca}", lambda: context.load_verify_locations(self.ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: see `tls_fault`
        context.set_alpn_protocols(["h2"])
        if self.cert is not None and self.key is not None:
            cert, key = self.cert, self.key
            what = f"tls.cert {cert}, tls.key {key}"
            _loading(what, lambda: context.load_cert_chain(cert, key, _no_password))
            if stat.S_IMODE(Path(key).stat().st_mode) & stat.S_IRWXO:
                raise ValueError(f"tls.key {key}: everybody may read it: chmod o= {key}")
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns what gRPC needs to connect."""
        self.context()
        files = map(_content, (self.ca, self.key, self.cert))
        credentials = grpc.ssl_channel_credentials(*files)
        if self.token is None:
            return credentials
        shown = grpc.access_token_call_credentials(_token(self.token))
        return grpc.composite_channel_credentials(credentials, shown)

    @property
    def files(self) -> tuple[TlsFile | None, ...]:
        """All of them; None where none is given."""
        return self.ca, self.cert, self.key, self.token


class WatchedFiles:
    """Some files, which are looked at when somebody asks, at most once a second. Thread-safe.

    A file that was just written may be empty, as its content comes in the next moment, or one that
    belongs to it is still the old one. So a change is told once the files have stayed as they are
    for a tenth of a second; if they do not, after a second.
    """

    def __init__(self, files: Iterable[str | os.PathLike[str] | None]) -> None:
        """Takes the files as they are now: read them after this, so that no change is missed.

        Args:
            files: Their paths; None stands for none.
        """
        self._files: Final = [Path(file) for file in files if file is not None]
        self._lock: Final = Lock()
        self._stamps: list[_Stamp] | None = self._look()
        self._look_at_s = monotonic() + LOOK_EVERY_S
        self._told_by_s: float | None = None

    def have_changed(self) -> bool:
        """Whether one was replaced, written or given other rights since the last time.

        Of several threads that ask, one is told.
        """
        if monotonic() < self._look_at_s:
            return False
        with self._lock:
            now_s = monotonic()
            if now_s < self._look_at_s:
                return False
            stamps = self._look()
            have_changed = stamps != self._stamps
            if have_changed and any(stamp.is_fresh(time()) for stamp in stamps):
                self._told_by_s = self._told_by_s or now_s + LOOK_EVERY_S
                if now_s < self._told_by_s:
                    self._look_at_s = now_s + _SETTLES_S
                    return False
            self._look_at_s, self._told_by_s = now_s + LOOK_EVERY_S, None
            self._stamps = stamps
            return have_changed

    def read_again(self) -> None:
        """Says at the next look that they have changed: what was read may be in order by then."""
        self._stamps = None

    def _look(self) -> list[_Stamp]:
        return [_Stamp.of(file) for file in self._files]


class Credentials(NamedTuple):
    """What a channel is opened with.

    Attributes:
        edition: Counts how often the files have changed.
        grpc: None: no TLS.
    """

    edition: int
    grpc: grpc.ChannelCredentials | None


def open_channel(address: str, credentials: Credentials) -> grpc.Channel:
    """Opens a channel; nothing is sent yet."""
    if credentials.grpc is None:
        return grpc.insecure_channel(address, CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials.grpc, CHANNEL_OPTIONS)


class Security:
    """The credentials of one client, of its files as they are now, and why they fail. Thread-safe.

    Files that are not in order when they are read again change nothing: somebody may be writing
    them.
    """

    def __init__(self, tls: Tls | None) -> None:
        self._tls: Final = tls
        self._files: Final = WatchedFiles(() if tls is None else tls.files)
        self._credentials = Credentials(0, None if tls is None else tls.credentials())
        self._refused = ""
        self._explained: Final[dict[str, tuple[float, str | None]]] = {}
        self._lock: Final = Lock()

    def credentials(self) -> Credentials:
        """Returns the credentials for new channels."""
        tls = self._tls
        if tls is not None and self._files.have_changed():
            with self._lock:
                try:
                    self._credentials = Credentials(
                        self._credentials.edition + 1, tls.credentials()
                    )
                    self._refused = ""
                except (OSError, ValueError) as error:
                    self._files.read_again()
                    if str(error) != self._refused:
                        self._refused = str(error)
                        _log.warning("the TLS files have changed, and are not taken: %s", error)
        return self._credentials

    def may_explain(self, failure: AttemptFailure) -> bool:
        """Whether a failure is one of those that gRPC does not explain."""
        return failure.reason is None and _OF_TLS.search(failure.text) is not None

    def explained(self, address: str, failure: AttemptFailure) -> AttemptFailure:
        """Returns the failure with its cause, if that is TLS; may take a second."""
        now_s = monotonic()
        until_s, text = self._explained.get(address, (0.0, None))
        if now_s >= until_s:
            text = tls_fault(address, self._tls, _EXPLAINING_S)
            self._explained[address] = monotonic() + _EXPLAIN_EVERY_S, text
        return failure if text is None else replace(failure, text=f"{address}: {text}")


# gRPC's texts for a connection that was made, and ended before any data. Of a name with several
# addresses it tells what one said, such as the IPv6 one of localhost, where nothing listens.
_OF_TLS: Final = re.compile(
    r"handshake|TSI_|SSL|Verification|Socket closed|reset by peer|Broken pipe"
    r"|ipv6:.*(refused|unreachable)",
    re.IGNORECASE,
)


_NO_TLS: Final = re.compile("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE", re.IGNORECASE)


def tls_fault(address: str, tls: Tls | None, timeout_s: float) -> str | None:
    """Makes a TLS connection to a node and returns what is wrong with it; None: nothing is.

    Args:
        address: The node's, ``host:port``.
        tls: The files of this side; None: it connects without TLS.
        timeout_s: The most time for it.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        context = _trusting() if tls is None else tls.context()
    except (OSError, ValueError) as error:  # somebody is writing the files
        return f"the files for TLS are not in order now: {error}"
    try:
        with _connected(context, host, int(port), timeout_s) as line:
            if tls is None:
                return "the node wants TLS: give tls=Tls(ca=…), or --tls-ca"
            # A node that does not accept the certificate ends the connection after the handshake,
            # and gRPC's servers do not say why.
            return None if line.recv(1) else _inferred(tls)
    except ssl.SSLError as error:
        return None if tls is None else _tls_problem(host, tls, error)
    except (OSError, ValueError):  # nothing is reached: gRPC's own words say it
        return None


def _connected(context: ssl.SSLContext, host: str, port: int, timeout_s: float) -> ssl.SSLSocket:
    """Connects to the first address that answers.

    It wraps a socket before that connects: `wrap_socket` leaves one open that is reset in between.
    """
    failure = OSError(f"{host} has no address")
    for family, kind, number, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            plain = socket.socket(family, kind, number)
        except OSError as error:  # such as IPv6, where the machine has none
            failure = error
            continue
        with plain:  # `line` takes its descriptor over
            line = context.wrap_socket(plain, server_hostname=host)
        line.settimeout(timeout_s)
        try:
            line.connect(address)
        except OSError as error:
            line.close()
            if isinstance(error, ssl.SSLError):
                raise
            failure = error
        else:
            return line
    raise failure


def _inferred(tls: Tls) -> str:
    if tls.cert is None and tls.token is not None:
        return "the node wants a certificate here; its port for tokens is another (token_listen)"
    if tls.cert is None:
        return "the node wants a certificate of this program: tls.cert and tls.key"
    return (
        f"the node does not accept this program's certificate, {tls.cert}: it has expired, or is"
        " signed by nobody whom the node names (tls_client_ca), or its key is of a kind that gRPC"
        " does not take (Ed25519, P-521)"
    )


def _tls_problem(host: str, tls: Tls, error: ssl.SSLError) -> str | None:
    if isinstance(error, ssl.SSLEOFError):
        return None
    if isinstance(error, ssl.SSLCertVerificationError):
        return _refusal_of_node(host, tls, error)
    if _NO_TLS.search(str(error)):
        return "what listens there does not speak TLS: connect without it"
    return f"no TLS connection: {error.reason or error}"


def _refusal_of_node(host: str, tls: Tls, error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case 62 | 64:  # X509_V_ERR_HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH
            return f"the node's certificate is not for {host}: {error.verify_message}"
        case 9 | 10:  # X509_V_ERR_CERT_NOT_YET_VALID, _CERT_HAS_EXPIRED
            return f"the node's certificate is out of date: {error.verify_message}"
        case 18 | 19 | 20 | 21:  # X509_V_ERR_…_SELF_SIGNED_…, …_UNABLE_TO_…
            signed = (
                "by no public authority: give tls.ca, or --tls-ca"
                if tls.ca is None
                else "by nobody whom tls.ca names"
            )
            return f"the node's certificate is signed {signed} ({error.verify_message})"
    return f"the node's certificate is not accepted: {error.verify_message}"


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it sends nothing
    return context


def _loading(what: str, load: Callable[[], None]) -> None:
    try:
        load()
    except ssl.SSLError as error:
        text = "the key is not that of the certificate" if "MISMATCH" in str(error) else str(error)
        raise ValueError(f"{what}: {text}") from error
    except OSError as error:
        raise ValueError(f"{what}: {(error.strerror or str(error)).lower()}") from error


def _token(path: TlsFile) -> str:
    try:
        file = Path(path)
        text = file.read_text(encoding="ascii").strip()
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as error:
        raise ValueError(f"tls.token {path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"tls.token {path}: a token has ASCII characters alone") from error
    if mode & stat.S_IRWXO:
        raise ValueError(f"tls.token {path}: everybody may read it: chmod o= {path}")
    if not text or not text.isprintable() or " " in text:
        raise ValueError(f"tls.token {path}: it must hold one token, in one line")
    return text


def _no_password() -> str:
    raise ValueError("tls.key is encrypted: give one without a password, which only you may read")


def _content(file: TlsFile | None) -> bytes | None:
    return None if file is None else Path(file).read_bytes()


class _Stamp(NamedTuple):
    """How a file was found; another stamp, another file."""

    error: int | None = None
    inode: int = 0
    length_bytes: int = 0
    written_ns: int = 0
    mode: int = 0

    @classmethod
    def of(cls, file: Path) -> _Stamp:
        try:
            found = file.stat()
        except OSError as error:
            return cls(error.errno)
        return cls(None, found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode)

    def is_fresh(self, now_s: float) -> bool:
        """Whether it was just written; not one of which another clock says that it will be."""
        return 0 <= now_s - self.written_ns / 1e9 < _SETTLES_S
