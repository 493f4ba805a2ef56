"""Filters of pending messages: compare whole columns, not single messages.

What remains after topic, due, id and the length of the key is compared byte by byte, in pieces of
bounded length; headers are decoded only for messages that match everything else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from delaywheel.identity import is_topic_name
from delaywheel.reasons import Reason
from delaywheel.storage.frames.columns import ID_LENGTH_BYTES, Columns
from delaywheel_proto.v1 import delaywheel_pb2 as pb
from delaywheel_replica.quantities import counted
from delaywheel_replica.server.node.refusals import RequestRefusedError, quoted

# How many bytes of keys are gathered at a time.
_PIECE_BYTES: Final = 1 << 20
_MS_BEYOND: Final = (1 << 32) * 1000


@dataclass(frozen=True)
class Wanted:
    """The conditions of a filter; None: any value.

    Attributes:
        header: The name of one of its headers, and its value; without a value, any.
        to_ms: The due must be before this.
        may_find: Whether whoever asks may find what is in a topic.
    """

    topic: str | None = None
    key: bytes | None = None
    id: bytes | None = None
    header: tuple[str, bytes | None] | None = None
    from_ms: int = 0
    to_ms: int = _MS_BEYOND
    may_find: Callable[[str], bool] | None = None

    def only_in(self, may_find: Callable[[str], bool] | None) -> Self:
        """Returns the conditions for somebody who may find what is in some topics; None: in all."""
        return replace(self, may_find=may_find)

    @cached_property
    def _names(self) -> list[bytes]:
        """What a message has among its frame's bytes if it meets the conditions."""
        topic = None if self.topic is None else self.topic.encode()
        header = None if self.header is None else self.header[0].encode()
        return [name for name in (self.key, self.id, topic, header) if name]

    @property
    def names_something(self) -> bool:
        """Whether it asks for more than a time."""
        return any(given is not None for given in (self.topic, self.key, self.id, self.header))

    def may_be_in(self, content: bytes) -> bool:
        """Whether frames with these bytes may hold a message that meets the conditions."""
        return all(name in content for name in self._names)

    def rows(self, columns: Columns) -> list[int]:
        """Returns which of these messages meet all conditions, ascending."""
        fits = (columns.due_ms >= self.from_ms) & (columns.due_ms < self.to_ms)
        if self.topic is not None:
            numbers = [n for n, topic in enumerate(columns.topics) if topic == self.topic]
            fits &= np.isin(columns.topic_numbers, numbers)
        if self.may_find is not None:
            numbers = [n for n, topic in enumerate(columns.topics) if self.may_find(topic)]
            fits &= np.isin(columns.topic_numbers, numbers)
        if self.id is not None:
            ids = np.ascontiguousarray(columns.ids).reshape(-1, ID_LENGTH_BYTES)
            fits &= (ids == np.frombuffer(self.id, dtype=np.uint8)).all(axis=1)
        if self.key is not None:
            fits &= columns.key_lengths == len(self.key)
        rows: NDArray[np.intp] = np.flatnonzero(fits)
        if self.key:
            rows = _with_key(columns, rows, self.key)
        found: list[int] = rows.tolist()
        if self.header is not None:
            found = [row for row in found if self._has_header(columns, row)]
        return found

    def _has_header(self, columns: Columns, row: int) -> bool:
        assert self.header is not None
        wanted, value = self.header
        return any(
            name == wanted and value in {None, content} for name, content in columns.headers(row)
        )


def wanted_of(asked: pb.Filter) -> Wanted:
    """Parses a filter, and bounds the length of what it names: nothing may look at it before.

    Refuses: TOPIC_INVALID, ID_INVALID, DUE_INVALID, HEADER_INVALID.
    """
    if asked.HasField("topic") and not is_topic_name(asked.topic):
        raise RequestRefusedError(Reason.TOPIC_INVALID, quoted(asked.topic))
    if asked.HasField("id") and len(asked.id) != ID_LENGTH_BYTES:
        raise RequestRefusedError(Reason.ID_INVALID, f"An id of {counted(len(asked.id), 'byte')}")
    from_ms = asked.from_ms if asked.HasField("from_ms") else 0
    to_ms = asked.to_ms if asked.HasField("to_ms") else _MS_BEYOND
    if not 0 <= from_ms < to_ms <= _MS_BEYOND:
        raise RequestRefusedError(Reason.DUE_INVALID, f"From {from_ms} to {to_ms}")
    header = None
    if asked.HasField("header"):
        if not asked.header.name:
            raise RequestRefusedError(Reason.HEADER_INVALID)
        value = asked.header.value if asked.header.HasField("value") else None
        header = asked.header.name, value
    return Wanted(
        topic=asked.topic if asked.HasField("topic") else None,
        key=asked.key if asked.HasField("key") else None,
        id=asked.id if asked.HasField("id") else None,
        header=header,
        from_ms=from_ms,
        to_ms=to_ms,
    )


def _with_key(columns: Columns, rows: NDArray[np.intp], key: bytes) -> NDArray[np.intp]:
    """Returns messages with exactly this key, among those with a key of this length."""
    content = np.frombuffer(columns.blob, dtype=np.uint8)
    wanted, within = np.frombuffer(key, dtype=np.uint8), np.arange(len(key))
    at_once = max(1, _PIECE_BYTES // len(key))
    fitting = [np.empty(0, np.intp)]
    for begin in range(0, len(rows), at_once):
        piece = rows[begin : begin + at_once]
        places = columns.starts[piece][:, np.newaxis] + within
        fitting.append(piece[(content[places] == wanted).all(axis=1)])
    return np.concatenate(fitting)
