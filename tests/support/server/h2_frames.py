"""Bytes of HTTP/2 connections as no gRPC client would send them: frames, HPACK, pseudo headers.

gRPC's own clients check what they send; here nothing does. A connection's bytes are drawn from a
`random.Random`, so that a seed says all of it. As a program it is many strangers at once, at the
addresses that it is given, until it is ended.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from random import Random
from typing import Final

AT_ONCE: Final = 4
PAUSE_S: Final = 0.02
"""Of each: together some hundred a second. Odd bytes are meant, not a flood of them."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY = 1, 4, 8, 32
WHO_AM_I: Final = b"/delaywheel.v1.DelayWheel/WhoAmI"
PATHS: Final = (
    *(
        b"/\xff",
        b"\xff",
        b"",
        b"/",
        b"*",
        b"//",
        b"/\0",
        b"/a" * 4_000,
        b"/%ff",
        "/\ud800".encode("utf-8", "surrogatepass"),
    ),
    *(WHO_AM_I, WHO_AM_I + b"\xff", WHO_AM_I + b"/", b"http://x" + WHO_AM_I),
    *(b"/delaywheel.v1.DelayWheel/DelayProduce", b"/delaywheel.v1.DelayWheel/DelayProduceStream"),
    *(b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"),
    b"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)
_NAMES: Final = (
    *(b":path", b":method", b":scheme", b":authority", b":status", b":protocol", b":", b""),
    *(b"host", b"te", b"content-type", b"content-length", b"user-agent", b"grpc-timeout"),
    *(b"grpc-encoding", b"grpc-accept-encoding", b"grpc-status", b"grpc-message", b"x-bin"),
    *(b"grpc-previous-rpc-attempts", b"grpc-tags-bin", b"grpc-trace-bin", b"lb-token"),
    *(b"authorization", b"dw-passed", b"connection", b"transfer-encoding", b"X-Upper", b"\xff"),
    *(b"grpc-internal-encoding-request", b"grpclb_client_stats", b"endpoint-load-metrics-bin"),
)
_VALUES: Final = (
    *(b"", b"\xff", b"\xff\xfe\0", b"x", b"1S", b"99999999H", b"-1", b"gzip", b"trailers", b"POST"),
    *(b"application/grpc", b"application/grpc+\xff", b"a" * 9_000, b"\r\n", b"Bearer \xff", b"0"),
)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame, whether or not there is one of this kind."""
    length = struct.pack(">I", len(payload))[1:]
    return length + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header, as HPACK encodes one that is in no table."""
    return b"\0" + _counted(name) + _counted(value)


def call_headers(path: bytes, *others: tuple[bytes, bytes]) -> bytes:
    """The headers of a call."""
    pairs = (
        *((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")),
        *((b"te", b"trailers"), (b"content-type", b"application/grpc"), *others),
    )
    return b"".join(literal(*pair) for pair in pairs)


def begun() -> bytes:
    """How a connection begins."""
    return PREFACE + frame(SETTINGS, 0, 0, b"")


def drawn(random: Random) -> bytes:
    """The bytes of a whole connection, most of them what HTTP/2 allows."""
    streams = _Streams(random)
    parts = [begun() if random.random() < 0.95 else random.randbytes(40)]
    parts += [random.choice(_PARTS)(random, streams) for _ in range(random.randrange(1, 30))]
    content = b"".join(parts)
    if random.random() < 0.1:  # some bits flip
        damaged = bytearray(content)
        for _ in range(random.randrange(1, 8)):
            damaged[random.randrange(24, len(damaged))] ^= 1 << random.randrange(8)
        content = bytes(damaged)
    return content[: random.randrange(len(content))] if random.random() < 0.1 else content


def send(address: str, content: bytes, *, patience_s: float = 0.05) -> None:
    """Sends a connection's bytes, reads a little of what comes, and hangs up."""
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(content)
        connection.settimeout(patience_s)
        while connection.recv(1 << 16):
            pass


class _Streams:
    """Numbers of streams: new ones, those that were opened, any."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._next = 1

    def new(self) -> int:
        self._next += 2
        return self._next - 2

    def any(self) -> int:
        return self._random.choice((0, 1, max(1, self._next - 2), 2, self._next + 8, 2**31 - 1))


def _number(value: int, bits: int, first: int) -> bytes:
    limit = (1 << bits) - 1
    if value < limit:
        return bytes([first | value])
    encoded = bytes([first | limit])
    value -= limit
    while value >= 0x80:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def _counted(text: bytes) -> bytes:
    return _number(len(text), 7, 0) + text


def _block(random: Random) -> bytes:
    """A block of headers: a call's, with some of them changed, repeated, left out, or no HPACK."""
    kind = random.random()
    if kind < 0.1:
        return random.randbytes(random.randrange(200))
    fields = [
        literal(b":method", b"POST"),
        literal(b":scheme", b"http"),
        literal(b":path", random.choice(PATHS)),
        literal(b":authority", b"x"),
        literal(b"te", b"trailers"),
        literal(b"content-type", b"application/grpc"),
    ]
    for _ in range(random.randrange(4)):
        name = random.choice(_NAMES)
        value = random.choice((*_VALUES, random.randbytes(8)))
        fields.append(
            random.choice(
                (
                    literal(name, value),
                    b"\x40" + _counted(name) + _counted(value),  # into the dynamic table
                    _number(random.choice((0, 1, 61, 62, 2**28)), 7, 0x80),  # of a table
                    _number(random.choice((0, 4_096, 2**28)), 5, 0x20),  # another size of the table
                    b"\0\x83\xff\xff\xff" + _counted(value),  # Huffman's end of string
                )
            )
        )
    if kind < 0.4:
        random.shuffle(fields)
    if kind < 0.2:
        fields.pop()
    return b"".join(fields)


def _call(random: Random, streams: _Streams) -> bytes:
    block, stream = _block(random), streams.new()
    flags = END_STREAM if random.random() < 0.3 else 0
    if random.random() < 0.3:
        cut = random.randrange(len(block) + 1)
        last = END_HEADERS if random.random() < 0.8 else 0
        head = frame(HEADERS, flags, stream, block[:cut][:16_384])
        return head + frame(CONTINUATION, last, stream, block[cut:][:16_384])
    return frame(HEADERS, flags | END_HEADERS, stream, block[:16_384])


def _message(random: Random, streams: _Streams) -> bytes:
    content = random.randbytes(random.randrange(60))
    said = random.choice((len(content), 0, 5, 2**31, 2**32 - 1))
    prefix = bytes([random.choice((0, 0, 0, 1, 7))]) + struct.pack(">I", said)
    return frame(DATA, random.choice((0, END_STREAM)), streams.any(), prefix + content)


def _whole_call(random: Random, streams: _Streams) -> bytes:
    """One that the node may answer."""
    stream = streams.new()
    head = frame(HEADERS, END_HEADERS, stream, call_headers(random.choice(PATHS)))
    return head + frame(DATA, END_STREAM, stream, bytes(5))


def _settings(random: Random, _: _Streams) -> bytes:
    pairs = [
        struct.pack(
            ">HI", random.randrange(12), random.choice((0, 1, 2**14, 2**24, 2**31, 2**32 - 1))
        )
        for _ in range(random.randrange(6))
    ]
    return frame(SETTINGS, random.choice((0, 0, 1)), 0, b"".join(pairs))


def _update(random: Random, streams: _Streams) -> bytes:
    size = struct.pack(">I", random.choice((0, 1, 60_000, 2**31 - 1)))
    return frame(WINDOW_UPDATE, 0, streams.any(), size)


def _end(random: Random, streams: _Streams) -> bytes:
    return frame(RST_STREAM, 0, streams.any(), struct.pack(">I", random.choice((0, 8, 2**32 - 1))))


def _any_frame(random: Random, streams: _Streams) -> bytes:
    payload = random.randbytes(random.choice((0, 4, 5, 6, 8, 100)))
    return frame(random.randrange(14), random.randrange(256), streams.any(), payload)


_PARTS: Final[Sequence[Callable[[Random, _Streams], bytes]]] = (
    *(_call, _call, _call, _whole_call, _whole_call, _message, _message),
    *(_settings, _update, _end, _any_frame),
)


def _flood(seed: int, addresses: Sequence[str]) -> None:
    """Sends what is drawn to each address in turn, until it is ended or nobody started it.

    It prints a dot for each.
    """
    parent = os.getppid()
    for number in count(seed, AT_ONCE):
        if os.getppid() != parent:
            return
        send(addresses[number % len(addresses)], drawn(Random(f"{number}")))
        os.write(1, b".")
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    with ThreadPoolExecutor(AT_ONCE) as senders:
        list(senders.map(lambda seed: _flood(seed, sys.argv[1:]), range(AT_ONCE)))
