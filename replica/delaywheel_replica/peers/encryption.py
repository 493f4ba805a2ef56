"""TLS between nodes: mutual, 1.3, on the same port as plain text while a cluster is switched over.

docs/SETTINGS.md, `peer_tls`, says who dials how. A running cluster goes from `off` to `prefer` on
all nodes, one after the other, and then to `required`. `accept` and `required` do not connect: the
former dials in plain text.

Both ends show a certificate. It must name the host by which `members` knows the node: the dialled
one's as TLS does it, the dialling one's once its hello says which node it claims to be.

A stream's bytes go one way after the handshake (dialling.py takes anything that comes for its end),
so there are no session tickets. A message is encrypted when it is written, not when it is queued:
heartbeats that wait are replaced. What is encrypted and not yet taken by the kernel is bounded by
`_AT_ONCE_BYTES`, and goes before everything else.

A stream with TLS lasts an hour at most, as callers' connections do, and no longer than the other
side's certificate: what was revoked is out by then. The side that dialled opens another in its
place somewhat sooner, each stream at a time of its own, and closes it when that is open, or
refused; the other side ends it if that does not happen.
"""

from __future__ import annotations

import ipaddress
import random
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from math import inf
from typing import Any, Final

from delaywheel_replica.peers.framing import Part
from delaywheel_replica.peers.sockets import Channel, host_of
from delaywheel_replica.peers.states import PeerReason, PeerRefusal, PeerRefusedError

_AT_ONCE_BYTES: Final = 64 << 10
_BUFFER_BYTES: Final = 64 << 10
_HANDSHAKE_S: Final = 2.0
MAX_AGE_S: Final = 3_600.0

_FIRST_BYTE: Final = b"\x16"
"""Of every TLS connection: a handshake record. A node's preface begins otherwise."""

Contexts = Callable[[bool], ssl.SSLContext]
"""Returns what the side that was dialled (true), or that dials, needs for a handshake now."""


class PeerTls(StrEnum):
    """Whether nodes speak TLS with one another."""

    OFF = "off"
    ACCEPT = "accept"
    PREFER = "prefer"
    REQUIRED = "required"


class PlainPeerError(ConnectionError):
    """What was dialled seems to speak no TLS."""


class Cipher:
    """Encrypts one connection. Like it: one thread reads, and one at a time writes."""

    def __init__(self, line: socket.socket, context: ssl.SSLContext, host: str | None) -> None:
        """Sends nothing yet.

        `host` is what the other side's certificate must name; None: this side was dialled.
        """
        self._line = line
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._unsent = memoryview(b"")

    def shake_hands(self, receive_into: Callable[[memoryview], int]) -> None:
        """Makes the connection; raises OSError if it ended, took too long or was refused."""
        while True:
            try:
                self._session.do_handshake()
            except ssl.SSLWantReadError:
                self._line.sendall(self._outgoing.read())
                if not self._receive(receive_into):
                    raise PlainPeerError("it ended within the handshake") from None
            except ssl.SSLError:
                self._line.sendall(self._outgoing.read())  # the alert says why
                raise
            else:
                self._line.sendall(self._outgoing.read())
                return

    @property
    def names(self) -> list[str]:
        """The hosts that the other side's certificate names."""
        certificate: dict[str, Any] = dict(self._session.getpeercert() or {})
        names: list[tuple[str, str]] = certificate.get("subjectAltName", [])
        return [name for kind, name in names if kind in {"DNS", "IP Address"}]

    @property
    def left_s(self) -> float:
        """For how long the other side's certificate is still valid."""
        certificate: dict[str, Any] = dict(self._session.getpeercert() or {})
        return ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()

    @property
    def has_unsent(self) -> bool:
        """Whether encrypted bytes wait for room."""
        return bool(self._unsent)

    def read_into(self, receive_into: Callable[[memoryview], int], view: memoryview) -> int:
        """Reads what was sent; waits as the given function does. 0: the stream has ended."""
        while True:
            try:
                return self._session.read(len(view), view)  # type: ignore[return-value]  # its stubs forget the number
            except ssl.SSLWantReadError:
                if not self._receive(receive_into):
                    return 0
            except ssl.SSLZeroReturnError:
                return 0

    def write_all(self, data: bytes) -> None:
        """Sends all of it, as the socket's timeout allows."""
        self._session.write(data)
        self._line.sendall(self._outgoing.read())

    def write_some(self, buffers: Sequence[Part]) -> int:
        """Returns how many bytes of these are encrypted; the kernel may not have all of them.

        Raises:
            BlockingIOError: None: those before wait for room.
            OSError: The connection broke.
        """
        self.push()
        if self._unsent:
            raise BlockingIOError
        pieces, left = [], _AT_ONCE_BYTES
        for buffer in buffers:
            piece = memoryview(buffer)[:left]
            pieces.append(piece)
            left -= len(piece)
            if not left:
                break
        self._session.write(b"".join(pieces))
        self._unsent = memoryview(self._outgoing.read())
        self.push()
        return _AT_ONCE_BYTES - left

    def push(self) -> None:
        """Sends what waits, as far as there is room; raises OSError if the connection broke."""
        while self._unsent:
            try:
                count = self._line.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._unsent = self._unsent[count:]

    def _receive(self, receive_into: Callable[[memoryview], int]) -> int:
        count = receive_into(self._buffer)
        self._incoming.write(self._buffer[:count])
        return count


class PeerSecurity:
    """Decides which connections of peers are encrypted, and whose certificates are accepted."""

    def __init__(self, mode: PeerTls, contexts: Contexts | None) -> None:
        """Begins without connections; no contexts: TLS is off."""
        self.mode: Final = mode
        self._contexts: Final = contexts

    def ends_s(self, channel: Channel, *, is_dialled: bool) -> float:
        """Returns when this side has to end a new connection, by the monotonic clock."""
        if channel.cipher is None:
            return inf
        age_s = MAX_AGE_S * (1 if is_dialled else random.uniform(0.5, 0.75))  # noqa: S311
        return time.monotonic() + min(age_s, channel.cipher.left_s)

    def dialled(self, dial: Callable[[], Channel], address: str) -> Channel:
        """Returns a new connection to an address, encrypted if it is to be, or raises OSError.

        Raises:
            PeerRefusedError: One side refused the other.
        """
        if self._contexts is None or self.mode not in {PeerTls.PREFER, PeerTls.REQUIRED}:
            return dial()
        channel = dial()
        try:
            self._encrypt(channel, self._contexts(False), host_of(address))  # noqa: FBT003 - see Contexts
        except PlainPeerError as error:
            channel.close()
            if self.mode is PeerTls.PREFER:
                return dial()
            text = f"{address} ended the TLS handshake: perhaps peer_tls is off there"
            raise PeerRefusedError(PeerRefusal(PeerReason.TLS_REFUSED, text)) from error
        except BaseException:
            channel.close()
            raise
        return channel

    def accepted(self, channel: Channel) -> None:
        """Encrypts a connection if the side that dialled wants that.

        Raises:
            OSError: It ended, or is silent for too long.
            PeerRefusedError: One side refused the other.
        """
        if self._contexts is None or self.mode is PeerTls.OFF:
            return
        channel.socket.settimeout(_HANDSHAKE_S)
        if channel.socket.recv(1, socket.MSG_PEEK) == _FIRST_BYTE:
            self._encrypt(channel, self._contexts(True), None)  # noqa: FBT003 - see Contexts

    def judge(self, channel: Channel, address: str | None) -> PeerRefusal | None:
        """Returns why an accepted connection may not be that of the peer at an address.

        None stands for the address of a node that is no member: only plain text is refused then.
        """
        cipher = channel.cipher
        if cipher is None:
            if self.mode is not PeerTls.REQUIRED:
                return None
            return PeerRefusal(PeerReason.TLS_REFUSED, "peer_tls is required here")
        if address is None:
            return None
        host = host_of(address)
        if any(is_named(host, name) for name in cipher.names):
            return None
        named = ", ".join(cipher.names) or "no host"
        text = f"the certificate of {channel.remote} names {named}, not {host}"
        return PeerRefusal(PeerReason.TLS_REFUSED, text, f"the certificate names {named} alone")

    @staticmethod
    def _encrypt(channel: Channel, context: ssl.SSLContext, host: str | None) -> None:
        cipher = Cipher(channel.socket, context, host)
        try:
            cipher.shake_hands(channel.until(time.monotonic() + _HANDSHAKE_S))
        except (ConnectionResetError, BrokenPipeError) as error:
            raise PlainPeerError(str(error)) from error
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            text = f"{channel.remote}: {reason}"
            raise PeerRefusedError(PeerRefusal(PeerReason.TLS_REFUSED, text)) from error
        channel.cipher = cipher


PLAIN: Final = PeerSecurity(PeerTls.OFF, None)
"""Nothing is encrypted."""


def is_named(host: str, name: str) -> bool:
    """Whether a certificate's name stands for a host; `*.` stands for one label."""
    try:
        return ipaddress.ip_address(host) == ipaddress.ip_address(name)
    except ValueError:
        pass
    host, name = host.lower().rstrip("."), name.lower()
    if name.startswith("*."):
        host, name = host.partition(".")[2], name[2:]
    return bool(host) and host == name
