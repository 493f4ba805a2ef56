"""Kafka headers as one run of bytes, in the same form in requests, frames and slot files.

Each header is: uint32 length of the name, int32 length of the value or -1 for null (both
little-endian), the name in UTF-8, the value. Order and duplicates are kept.
"""

import struct
from collections.abc import Collection, Iterable

HEADER_LENGTHS = struct.Struct("<Ii")


class HeadersMalformedError(ValueError):
    """The lengths of headers do not add up, or a name is empty or not UTF-8."""


def encode_headers(headers: Iterable[tuple[str, bytes | None]]) -> bytes:
    """Encodes headers; a value of None is a null, which differs from empty."""
    parts = []
    for name, value in headers:
        encoded = name.encode()
        parts.append(HEADER_LENGTHS.pack(len(encoded), -1 if value is None else len(value)))
        parts.append(encoded)
        if value:
            parts.append(value)
    return b"".join(parts)


def decode_headers(buffer: bytes) -> list[tuple[str, bytes | None]]:
    """Decodes what `encode_headers` returned; raises HeadersMalformedError for anything else."""
    headers: list[tuple[str, bytes | None]] = []
    position, end = 0, len(buffer)
    unpack, beside = HEADER_LENGTHS.unpack_from, HEADER_LENGTHS.size
    while position < end:
        if end - position < beside:
            raise HeadersMalformedError("a header is cut off before its lengths end")
        name_length, value_length = unpack(buffer, position)
        position += beside
        value_at = position + name_length
        value_end = value_at + value_length if value_length > 0 else value_at
        if name_length == 0 or value_length < -1 or value_end > end:
            raise HeadersMalformedError("the lengths of a header do not add up")
        try:
            name = buffer[position:value_at].decode()
        except UnicodeDecodeError as error:
            raise HeadersMalformedError("a header's name is not UTF-8") from error
        headers.append((name, None if value_length < 0 else buffer[value_at:value_end]))
        position = value_end
    return headers


def content_bytes(
    key: bytes | None, value: bytes | None, headers: Collection[tuple[str, bytes | None]] | None
) -> int:
    """Returns the length of key, value and headers."""
    length_bytes = len(key or b"") + len(value or b"")
    if headers:
        length_bytes += sum(len(name) + len(content or b"") for name, content in headers)
    return length_bytes


def is_cut_off(name: str) -> bool:
    """Whether a header's name would be cut off: the Kafka client ends names at U+0000."""
    return "\0" in name
