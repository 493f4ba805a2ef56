"""Frames messages on a connection: an eight-byte preamble, then length-prefixed messages.

| bytes | |
|---|---|
| 8 | `PREFACE`, from both sides, before all else: anything else is not a node |
| 4, little-endian | the length of a message; 0: a ping, which only says that the node lives |
| as many | the message: a `ToPeer`; from the side that was dialled one `Answer` |

These never change: they let nodes of different protocol versions report the difference
(handshake.py).
"""

import struct
from collections.abc import Callable, Sequence
from typing import Final

from delaywheel_replica.core.protocol.codec import MalformedError

PREFACE: Final = b"dwpeers\n"

Part = bytes | bytearray | memoryview
"""The length's encoding; in a view each item is one byte. It must never change."""

_LENGTH: Final = struct.Struct("<I")

PING: Final = _LENGTH.pack(0)
"""A message of length 0."""

BUFFER_BYTES: Final = 64 << 10
"""How much is read at once, and buffered for each connection."""

_PIECE_BYTES: Final = 1 << 20
"""A longer message is read in pieces of this size: an announced length alone takes no memory."""


def head_of(parts: Sequence[Part]) -> bytes:
    """Returns the prefix of a message of these parts; raises ValueError if it has 4 GiB or more."""
    length_bytes = sum(map(len, parts))
    if length_bytes >> 32:
        raise ValueError(f"a message of {length_bytes} bytes")
    return _LENGTH.pack(length_bytes)


class IncomingStream:
    """The incoming side of one connection, read by one thread.

    It holds what has arrived of a message: the longest one twice, while it is put together.
    """

    def __init__(self, receive_into: Callable[[memoryview], int], most_bytes: int) -> None:
        """Reads nothing yet.

        `receive_into` waits for bytes, writes them to the buffer, and returns how many; 0: the
        stream has ended. What it raises, the methods below raise.
        """
        self._receive_into = receive_into
        self._most_bytes = most_bytes
        self._view = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0

    def receive_by(self, receive_into: Callable[[memoryview], int], most_bytes: int) -> None:
        """Replaces timeouts and limits from now on; see the arguments of the same names."""
        self._receive_into = receive_into
        self._most_bytes = most_bytes

    def take(self, count: int) -> bytes | None:
        """Returns this many bytes, at most `BUFFER_BYTES`; None if they never come."""
        while self._end - self._start < count:
            if not self._receive():
                return None
        return self._taken(count)

    def message(self) -> bytes | None:
        """Returns the next message, empty for a ping; None if it never comes.

        Raises MalformedError if its stated length exceeds the limit.
        """
        while self._end - self._start < _LENGTH.size:
            if not self._receive():
                return None
        (length_bytes,) = _LENGTH.unpack_from(self._view, self._start)
        if length_bytes > self._most_bytes:
            raise MalformedError(f"a message of {length_bytes} bytes, {self._most_bytes} at most")
        self._start += _LENGTH.size
        return (
            self.take(length_bytes)
            if length_bytes <= BUFFER_BYTES
            else self._take_long(length_bytes)
        )

    def _take_long(self, length_bytes: int) -> bytes | None:
        pieces: list[Part] = [self._taken(min(length_bytes, self._end - self._start))]
        left = length_bytes - len(pieces[0])
        while left:
            piece = memoryview(bytearray(min(left, _PIECE_BYTES)))
            filled = 0
            while filled < len(piece):
                count = self._receive_into(piece[filled:])
                if not count:
                    return None
                filled += count
            pieces.append(piece)
            left -= filled
        return b"".join(pieces)

    def _taken(self, count: int) -> bytes:
        start, self._start = self._start, self._start + count
        return bytes(self._view[start : self._start])

    def _receive(self) -> int:
        """Receives what is available, behind the bytes not consumed yet."""
        waiting = self._end - self._start
        if self._start:
            self._view[:waiting] = self._view[self._start : self._end]
            self._start, self._end = 0, waiting
        count = self._receive_into(self._view[waiting:])
        self._end += count
        return count
