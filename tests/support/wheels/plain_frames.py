"""Frames built the plain way, message by message, as docs/FORMAT.md says.

The oracle of encode.py, which makes many at once.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from crc32c import crc32c

from delaywheel.headers import encode_headers
from delaywheel.identity import WheelId
from delaywheel.storage.frames.encode import EncodedGroup
from delaywheel.storage.frames.kinds import Kind
from support.wheels.messages import Message

_MARKS = {
    Kind.MESSAGES: 0,
    Kind.CANCELS: 0b1000 << 28,
    Kind.COMMITS: (0b1000 << 28) + (0b10 << 18),
    Kind.RELEASES: (0b1000 << 28) + (0b11 << 18),
}
_LONGEST_ROW_BYTES = 16 + 4 * 4 + 2 + 4 + 8


class PlainFrame(NamedTuple):
    """One frame.

    Attributes:
        slot: the second of its messages.
        seq: its number in the wheel.
        messages: how many it has.
        rows: which rows of the group they are.
        buffer: its bytes.
    """

    slot: int
    seq: int
    messages: int
    rows: list[int]
    buffer: bytes

    def index_row(self, offset: int, kind: Kind = Kind.MESSAGES) -> bytes:
        """Its row, at this offset."""
        marked = self.messages | _MARKS[kind]
        plain = struct.pack("<IIII", self.slot, offset, len(self.buffer), marked)
        marked |= (crc32c(plain) >> 21) << 20
        return struct.pack("<IIII", self.slot, offset, len(self.buffer), marked)


def plain_frames(
    messages: Sequence[Message],
    *,
    kind: Kind,
    wheel: WheelId,
    first_seq: int,
    accepted_at_ms: int,
    max_frame_messages: int,
    max_frame_bytes: int,
) -> list[PlainFrame]:
    """The frames of a group."""
    slots = sorted({message.due_ms // 1000 for message in messages})
    topics = list(dict.fromkeys(message.topic for message in messages))
    frames: list[PlainFrame] = []
    for slot in slots:
        of_slot = [row for row, each in enumerate(messages) if each.due_ms // 1000 == slot]
        for rows in _cut(messages, of_slot, max_frame_messages, max_frame_bytes):
            seq = first_seq + len(frames)
            wanted = [messages[row] for row in rows]
            used = {each.topic for each in wanted}
            own = [topic for topic in topics if topic in used]
            buffer = _frame(wanted, own, kind, (wheel.hash64, slot, seq, accepted_at_ms))
            frames.append(PlainFrame(slot, seq, len(rows), rows, buffer))
    return frames


def frames_of(group: EncodedGroup, first_seq: int) -> list[PlainFrame]:
    """The result of encode.py for a group, frame by frame."""
    edges, order = group.edges.tolist(), iter(group.order.tolist())
    return [
        PlainFrame(
            slot,
            first_seq + number,
            count,
            [next(order) for _ in range(count)],
            bytes(group.content[edges[number] : edges[number + 1]]),
        )
        for number, (slot, count) in enumerate(
            zip(group.slots.tolist(), group.counts.tolist(), strict=True)
        )
    ]


def _cut(
    messages: Sequence[Message], rows: list[int], max_messages: int, max_bytes: int
) -> list[list[int]]:
    parts: list[list[int]] = []
    left = 0
    for row in rows:
        length = len(_content(messages[row])) + _LONGEST_ROW_BYTES
        if not parts or len(parts[-1]) == max_messages or length > left:
            parts.append([])
            left = max_bytes
        parts[-1].append(row)
        left -= length
    return parts


def _content(message: Message) -> bytes:
    return (message.key or b"") + (message.value or b"") + _headers(message)


def _headers(message: Message) -> bytes:
    return encode_headers(message.headers)


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 8)


def _length(content: bytes | None) -> int:
    return -1 if content is None else len(content)


def _frame(
    messages: Sequence[Message], topics: list[str], kind: Kind, place: tuple[int, int, int, int]
) -> bytes:
    wheel_hash, slot, seq, accepted_at_ms = place
    flags, columns = 0, b"".join(message.id for message in messages)
    columns += b"".join(struct.pack("<I", topics.index(message.topic)) for message in messages)
    if kind is Kind.MESSAGES:
        flags, columns = _message_columns(messages, columns)
    columns += b"".join(struct.pack("<H", message.due_ms % 1000) for message in messages)
    columns = _padded(columns)
    dictionary = b"".join(
        struct.pack("<H", len(topic.encode())) + topic.encode() for topic in topics
    )
    blob = b"".join(map(_content, messages))
    tail = dictionary + blob
    length = 64 + len(columns) + len(tail)
    head = struct.pack(
        "<BBHIQQqIIIIII",
        1 if kind is Kind.MESSAGES else 3,
        kind,
        flags,
        slot,
        wheel_hash,
        seq,
        accepted_at_ms,
        len(messages),
        len(topics),
        len(columns),
        len(dictionary),
        len(blob),
        length + -length % 8,
    )
    checked = head + columns + tail + bytes(-length % 8)
    return b"DWfr" + struct.pack("<I", crc32c(checked)) + checked


def _message_columns(messages: Sequence[Message], columns: bytes) -> tuple[int, bytes]:
    words = (
        [_length(message.key) for message in messages],
        [_length(message.value) for message in messages],
        [len(_headers(message)) for message in messages],
    )
    flags, columns = 0, columns + b"".join(struct.pack(f"<{len(w)}i", *w) for w in words)
    timestamps = [message.timestamp_ms for message in messages]
    partitions = [message.partition for message in messages]
    if any(each >= 0 for each in partitions):
        flags |= 1
        columns += struct.pack(f"<{len(partitions)}i", *partitions)
    if any(each >= 0 for each in timestamps):
        flags |= 2
        columns = struct.pack(f"<{len(timestamps)}q", *timestamps) + columns
    return flags, columns
