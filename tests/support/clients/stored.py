"""A message that a node holds, and the command's output for it."""

from __future__ import annotations

from delaywheel_proto.v1 import delaywheel_pb2 as pb

ID = bytes(range(16))
DUE_MS = 1_900_000_000_250
HANDLE = f"n1.3:1900000000:{ID.hex()}:orders"


def stored(*, with_content: bool = True) -> pb.StoredMessage:
    """The message as a node answers."""
    message = pb.StoredMessage(
        handle=HANDLE,
        id=ID,
        due_ms=DUE_MS,
        topic="orders",
        accepted_at_ms=1_899_999_000_000,
        wheel="n1.3",
        seq=7,
        state=pb.MESSAGE_STATE_PENDING,
        key_length_bytes=-1,
        value_length_bytes=2,
        headers_length_bytes=19,
    )
    if with_content:
        message.value = b"\xff\x00"
        message.headers.add(name="a", value=b"x")
        message.headers.add(name="a")
    return message


STORED = {
    "handle": HANDLE,
    "id": ID.hex(),
    "due_ms": DUE_MS,
    "due": "2030-03-17T17:46:40.250Z",
    "topic": "orders",
    "partition": None,
    "timestamp_ms": None,
    "accepted_at_ms": 1_899_999_000_000,
    "wheel": "n1.3",
    "seq": 7,
    "state": "pending",
    "dead_reason": None,
    "rescheduled_to_ms": None,
    "place": None,
    "key_length_bytes": -1,
    "value_length_bytes": 2,
    "headers_length_bytes": 19,
}
CONTENT = {
    "key": None,
    "value": "/wA=",
    "headers": [{"name": "a", "value": "eA=="}, {"name": "a", "value": None}],
    "half": None,
}
