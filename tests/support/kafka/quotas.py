"""Kafka's quotas, which its Python client cannot set."""

from __future__ import annotations

import socket
import struct

ALTER_CLIENT_QUOTAS = 49
CALL_S = 10.0


def set_quota(address: str, client: str, name: str, value: float) -> None:
    """Sets a quota of a client id."""
    only_validate, removes = b"\0", b"\0"
    entity = struct.pack(">i", 1) + _text("client-id") + _text(client)
    change = struct.pack(">i", 1) + _text(name) + struct.pack(">d", value) + removes
    body = struct.pack(">i", 1) + entity + change + only_validate
    head = struct.pack(">hhih", ALTER_CLIENT_QUOTAS, 0, 1, -1)
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), CALL_S) as connection:
        connection.sendall(struct.pack(">i", len(head + body)) + head + body)
        (length,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
        answer = connection.recv(length, socket.MSG_WAITALL)
    # After the correlation, the throttle time, and the number of entries.
    (code,) = struct.unpack_from(">h", answer, 12)
    assert code == 0, f"error {code} of Kafka's protocol"


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()
