"""Messages as plain values, to compare with those read from columns and files."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from delaywheel.headers import encode_headers
from delaywheel.storage.frames.columns import Columns, content_starts

BASE_SLOT = 1_763_700_000


@dataclass(frozen=True)
class Message:
    due_ms: int
    id: bytes
    topic: str
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int = -1
    timestamp_ms: int = -1


def message(number: int = 0, *, slot: int = BASE_SLOT, value: bytes | None = b"value") -> Message:
    """A message identified by its number."""
    return Message(slot * 1000 + number % 1000, number.to_bytes(16, "big"), "topic", b"key", value)


def columns_of(messages: list[Message]) -> Columns:
    topics = tuple(dict.fromkeys(each.topic for each in messages))
    headers = [encode_headers(each.headers) for each in messages]
    parts = [
        (each.key or b"") + (each.value or b"") + encoded
        for each, encoded in zip(messages, headers, strict=True)
    ]
    return Columns(
        due_ms=np.array([each.due_ms for each in messages], dtype=np.int64),
        ids=np.frombuffer(b"".join(each.id for each in messages), dtype=np.uint8).reshape(-1, 16),
        topics=topics,
        topic_numbers=np.array([topics.index(each.topic) for each in messages], dtype=np.uint32),
        key_lengths=_lengths([each.key for each in messages]),
        value_lengths=_lengths([each.value for each in messages]),
        headers_lengths=_lengths(headers),
        partitions=np.array([each.partition for each in messages], dtype=np.int32),
        timestamps_ms=np.array([each.timestamp_ms for each in messages], dtype=np.int64),
        blob=b"".join(parts),
        starts=content_starts(np.array([len(part) for part in parts], dtype=np.int64)),
    )


def names_of(columns: Columns) -> Columns:
    """The rows that name these messages."""
    return Columns.of_names(columns.due_ms, columns.ids, columns.topics, columns.topic_numbers)


def messages_of(columns: Columns) -> list[Message]:
    return [
        Message(
            due_ms=int(columns.due_ms[row]),
            id=columns.ids[row].tobytes(),
            topic=columns.topic(row),
            key=columns.key(row),
            value=columns.value(row),
            headers=tuple(columns.headers(row)),
            partition=int(columns.partitions[row]),
            timestamp_ms=int(columns.timestamps_ms[row]),
        )
        for row in range(len(columns))
    ]


def _lengths(values: Sequence[bytes | None]) -> NDArray[np.int32]:
    return np.array([-1 if value is None else len(value) for value in values], dtype=np.int32)


_headers = st.lists(
    st.tuples(st.text(min_size=1, max_size=8), st.none() | st.binary(max_size=8)), max_size=3
).map(tuple)


def any_message(slots: int = 3) -> st.SearchStrategy[Message]:
    """Any message whose due lies in a few seconds."""
    return st.builds(
        Message,
        due_ms=st.integers(BASE_SLOT * 1000, (BASE_SLOT + slots) * 1000 - 1),
        id=st.binary(min_size=16, max_size=16),
        topic=st.sampled_from(["orders", "a.b_c-d", "Ω"]) | st.text(min_size=1, max_size=4),
        key=st.none() | st.binary(max_size=12),
        value=st.none() | st.binary(max_size=40),
        headers=_headers,
        partition=st.just(-1) | st.integers(0, 2**31 - 1),
        timestamp_ms=st.just(-1) | st.integers(0, 2**63 - 1),
    )


def any_messages(*, slots: int = 3, max_size: int = 20) -> st.SearchStrategy[list[Message]]:
    """Some messages of a few seconds."""
    return st.lists(any_message(slots), min_size=1, max_size=max_size)
